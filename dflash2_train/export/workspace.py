"""The hidden folder beside a result, where it is made before it takes its name: one maker at a time, and nothing stays.

    .NAME.tmp/lock    held by whoever makes NAME
    .NAME.tmp/…       what is being made

A process that is killed cannot tidy up. So the folder has one fixed name, and whoever comes next empties it: the lock
is an ``flock``, which goes with its process however that ends, so a folder whose lock is free belongs to nobody.

A folder cannot take the place of another in one step, so the earlier result waits under ``.NAME.replaced`` meanwhile,
from where it comes back if a crash leaves it there.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from dflash2_train.config import UserError
from dflash2_train.export.payload import RECORD, TOOL, read_json
from dflash2_train.provenance import fsync_path, publish

LOCK = "lock"
_ATTEMPTS = 20  # to lock a folder that others make and remove at the same time


class ExportError(UserError):
    """A drafter that cannot be exported, or a folder that must not be replaced; the text says what to do."""


@contextmanager
def workspace(final: Path) -> Iterator[Path]:
    """An empty folder beside ``final``, for this process alone; afterwards it is gone, however the block ended.

    Args:
        final: file or folder to be made; its parents are made where they are missing. No symbolic link
            (:func:`real_path`), or the result would take the place of the link.

    Raises:
        ExportError: another process makes the same, or the system refused to write, be it here or in the block.
    """
    folder = final.with_name(f".{final.name}.tmp")
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder, final) as lock:
            try:
                _empty(folder)
                yield folder
            finally:
                _empty(folder)
                (folder / LOCK).unlink(missing_ok=True)
                lock.close()  # before the folder goes: NFS keeps a removed file in it for as long as it is open
                _remove_unless_taken(folder)
    except OSError as error:
        raise ExportError(
            f"{final}: could not be written ({error}). Nothing half-written stays and what stood there is kept; mend "
            "what the message says and run the same command again."
        ) from error


def real_path(path: Path) -> Path:
    """``path`` with symbolic links followed, so that what it leads to is replaced and the link stays."""
    return Path(os.path.realpath(path))


@contextmanager
def _locked(folder: Path, final: Path) -> Iterator[IO[bytes]]:
    """The lock of ``folder``, which is made."""
    for _ in range(_ATTEMPTS):
        try:
            folder.mkdir(exist_ok=True)
            lock = open(folder / LOCK, "ab")  # noqa: SIM115 - open for as long as the lock is held
        except (FileExistsError, FileNotFoundError):  # removed meanwhile by one that has just ended
            continue
        with lock:
            _take(lock, folder, final)
            if _is_at(lock, folder / LOCK):
                yield lock
                return
    raise _in_use(final)


def _take(lock: IO[bytes], folder: Path, final: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise _in_use(final) from error
    except OSError as error:
        raise ExportError(
            f"{folder} lies on a file system that makes no locks ({error.strerror}), so nothing would keep two exports "
            "apart. Mount it with locks (Lustre: -o flock), or choose another folder."
        ) from error


def _in_use(final: Path) -> ExportError:
    return ExportError(f"{final}: another process is writing it. Wait for it or stop it, or choose another folder.")


def _is_at(lock: IO[bytes], path: Path) -> bool:
    """Whether the locked file still stands under its name: the one that held it before may have removed it."""
    try:
        return os.path.samestat(os.fstat(lock.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _empty(folder: Path) -> None:
    """Remove everything but the lock."""
    for path in folder.iterdir():
        if path.name == LOCK:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _remove_unless_taken(folder: Path) -> None:
    """Remove the folder; one in which another process has made its lock meanwhile stays, for it is that one's."""
    try:
        folder.rmdir()
    except OSError:
        if not (folder / LOCK).exists() and folder.exists():
            raise


def _replaced_name(final: Path) -> Path:
    """Where the previous export waits while its successor is renamed."""
    return final.with_name(f".{final.name}.replaced")


def check_replaceable(final: Path) -> None:
    """Refuse to touch a folder that no export wrote; bring back one that a crash left aside.

    Raises:
        ExportError: ``final`` is a file, or a folder with content but without this tool's record.
    """
    aside = _replaced_name(final)
    if aside.exists() and not final.exists():
        os.replace(aside, final)
    if not final.exists():
        return
    if not final.is_dir():
        raise ExportError(f"export.output_dir={final}: is a file. Choose another folder.")
    if not any(final.iterdir()):
        return
    ours = (final / RECORD).exists() and read_json(final / RECORD).get("tool") == TOOL
    if not ours:
        raise ExportError(
            f"export.output_dir={final}: has files that no export wrote (no {RECORD} of {TOOL}) and is left as it is. "
            "Choose another folder or move that one away."
        )


def replace_folder(temporary: Path, final: Path) -> None:
    """Publish ``temporary`` as ``final``; a previous export is set aside first and removed last."""
    aside = _replaced_name(final)
    if aside.exists():
        shutil.rmtree(aside)
    if final.exists():
        os.replace(final, aside)
        fsync_path(final.parent)
    try:
        publish(temporary, final)
    except OSError:
        if aside.exists():
            os.replace(aside, final)
        raise
    if aside.exists():
        shutil.rmtree(aside)
