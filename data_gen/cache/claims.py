"""Who is at work on which segment: claims as files, taken and taken over without a lock.

A claim is a file ``segment-00000012.0000`` that its owner creates whole and exclusively (a hard link of a finished
temporary file, which local and network file systems both do atomically) and touches as a sign of life. A claim is
taken over by creating the file of the next generation, ``segment-00000012.0001``: exactly one of several takers
succeeds, and an owner that was only slow finds itself outnumbered. Nothing is ever renamed or deleted to take it over,
so that no late taker can remove a fresh claim.

A claim is stale when its owner's process is gone (on this host) or when it shows no sign of life for ``stale_after_s``
by the observer's own clock. The clocks of hosts need not agree: only changes of the file's time are looked at.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

from dflash2_train.config import UserError

BEAT_EVERY_S = 1.0  # signs of life are not sent more often


class ClaimLostError(Exception):
    """The claim was taken over or cleared away; the owner drops its work and looks for other work."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """The right to write one segment."""

    segment: int
    generation: int  # 0 for a fresh claim, one more at each takeover
    host: str
    pid: int
    token: str  # of the owner; unique among all processes
    num_bytes: int  # reserved in the ring


def this_host() -> str:
    """Name of this host and process-number space: only within it does a process number mean anything."""
    space = Path("/proc/self/ns/pid")
    return f"{socket.gethostname()} {space.readlink()}" if space.exists() else socket.gethostname()


def process_is_gone(host: str, pid: int) -> bool:
    """Whether process ``pid`` of ``host`` is known to be gone; False where that cannot be seen from here.

    One that is dead and waits for its parent to take notice is gone too: it does nothing any more.
    """
    if host != this_host():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return _is_zombie(pid)


def _is_zombie(pid: int) -> bool:
    try:
        told = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # gone meanwhile, or a system without /proc
        return False
    return told.rpartition(")")[2].split()[0] in ("Z", "X")  # behind the name, which may hold anything


def create_exclusive(path: Path, data: bytes) -> bool:
    """Create ``path`` with all of ``data``, or return False because it exists.

    Raises:
        UserError: the file system has no hard links.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    temporary.write_bytes(data)
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    except PermissionError as error:
        raise UserError(
            f"{path.parent}: this file system makes no hard links ({error}). Choose another data.stream.root."
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
    return True


def read_small(path: Path) -> str:
    """Text of a file that others may replace meanwhile; a network file system then calls our handle stale.

    Raises:
        FileNotFoundError: it is gone.
    """
    while True:
        try:
            return path.read_text(encoding="utf-8")
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise


class ClaimFolder:
    """The claims of a ring, as seen and made by one process.

    Args:
        folder: where the files lie.
        stale_after_s: without a sign of life for so long a claim may be taken over.
    """

    def __init__(self, folder: Path, *, stale_after_s: float) -> None:
        self.folder, self.stale_after_s = folder, stale_after_s
        self.token = uuid.uuid4().hex
        self._seen: dict[str, tuple[int, float]] = {}  # file name -> (its time, our clock when we first saw that time)
        self._last_beat = 0.0

    def newest(self) -> dict[int, Claim]:
        """The claim in force of every claimed segment."""
        found: dict[int, Claim] = {}
        for path in sorted(self.folder.glob("segment-*")):  # by segment, then generation
            try:
                found[_segment_of(path)] = _read(path)
            except FileNotFoundError:
                continue  # released since the folder was listed
        return found

    def take(self, segment: int, num_bytes: int, *, generation: int = 0) -> Claim | None:
        """Claim a segment, or None because another process was first."""
        claim = Claim(
            segment=segment,
            generation=generation,
            host=this_host(),
            pid=os.getpid(),
            token=self.token,
            num_bytes=num_bytes,
        )
        taken = create_exclusive(self._path(segment, generation), json.dumps(asdict(claim)).encode())
        self._last_beat = time.monotonic()
        return claim if taken else None

    def take_over(self, claim: Claim, num_bytes: int) -> Claim | None:
        """Claim what a stale owner held, or None because another process was first."""
        return self.take(claim.segment, num_bytes, generation=claim.generation + 1)

    def is_stale(self, claim: Claim) -> bool:
        """Whether the owner is gone or silent for too long."""
        return process_is_gone(claim.host, claim.pid) or self.silence(claim) > self.stale_after_s

    def silence(self, claim: Claim) -> float:
        """Seconds without a sign of life, as far as this process has watched."""
        path, now = self._path(claim.segment, claim.generation), time.monotonic()
        try:
            stamp = path.stat().st_mtime_ns
        except FileNotFoundError:
            return 0.0
        if self._seen.get(path.name, (None, 0.0))[0] != stamp:
            self._seen[path.name] = (stamp, now)
        return now - self._seen[path.name][1]

    def beat(self, claim: Claim, *, force: bool = False) -> None:
        """Give a sign of life, at most every ``BEAT_EVERY_S`` unless forced, and make sure that the claim still stands.

        Raises:
            ClaimLostError: the claim is no longer this process's.
        """
        now = time.monotonic()
        if not force and now - self._last_beat < BEAT_EVERY_S:
            return
        self._last_beat = now
        path = self._path(claim.segment, claim.generation)
        try:
            os.utime(path)
            owner = _read(path).token
        except FileNotFoundError as error:
            raise ClaimLostError(f"the claim of segment {claim.segment} was cleared away") from error
        if owner != claim.token or self._path(claim.segment, claim.generation + 1).exists():
            raise ClaimLostError(f"the claim of segment {claim.segment} was taken over")

    def release(self, claim: Claim) -> None:
        """Clear a claim and those it took over, its own file last, so that none of theirs comes into force again."""
        for generation in range(claim.generation + 1):
            path = self._path(claim.segment, generation)
            path.unlink(missing_ok=True)
            self._seen.pop(path.name, None)

    def _path(self, segment: int, generation: int) -> Path:
        return self.folder / f"segment-{segment:08d}.{generation:04d}"


def _segment_of(path: Path) -> int:
    return int(path.stem.removeprefix("segment-"))


def _read(path: Path) -> Claim:
    """A claim file; one that a power cut emptied belongs to nobody, so that it goes stale and is taken over."""
    try:
        return Claim(**json.loads(read_small(path)))
    except (ValueError, TypeError):
        generation = int(path.suffix.removeprefix("."))
        return Claim(segment=_segment_of(path), generation=generation, host="", pid=0, token="", num_bytes=0)
