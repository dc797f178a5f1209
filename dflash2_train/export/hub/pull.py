"""Fetching a drafter from the Hub at one commit, with every hash checked before it gets its name.

Files arrive in a hidden folder beside the destination, where a cut pull is continued by the same command. Only when
each has the sha256 that ``run.json`` lists, and ``run.json`` its own, the folder is renamed. ``pulled.json`` then says
which repository, commit and hashes it was, so that a deployment can pin them.
"""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash2_train.config import UserError
from dflash2_train.export.hub.client import HubCaller, HubError, find_token, open_api
from dflash2_train.export.hub.push import git_hash
from dflash2_train.export.payload import CONFIG, PULLED, RECORD, read_json
from dflash2_train.export.record import hash_files, read_record, self_hash_holds
from dflash2_train.export.workspace import replace_folder
from dflash2_train.provenance import atomic_write_json

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

logger = logging.getLogger(__name__)
LIBRARY_FOLDER = ".cache"  # where huggingface_hub keeps unfinished downloads
DRAFTER_FILES = (".json", ".safetensors", ".pt", ".gguf", ".md", ".txt")  # of a repository without a record


@dataclass(frozen=True, kw_only=True)
class Pulled:
    """A drafter that was fetched."""

    folder: Path
    commit: str
    num_files: int
    skipped: list[str]  # files of the repository that were not fetched
    was_there: bool


class _Source:
    """One repository at one commit."""

    def __init__(self, api: HfApi, call: HubCaller, repo_id: str, revision: str | None) -> None:
        from huggingface_hub.hf_api import RepoFile

        self.api, self.call, self.repo_id = api, call, repo_id
        info = call("looking at", lambda: api.model_info(repo_id, revision=revision))
        self.commit = str(info.sha)
        self.files: dict[str, RepoFile] = {
            entry.path: entry
            for entry in call("listing", lambda: list(api.list_repo_tree(repo_id, revision=self.commit)))
            if isinstance(entry, RepoFile)
        }

    def fetch(self, name: str, folder: Path) -> Path:
        """One file into ``folder``; a part that is there already is continued."""
        return Path(
            self.call(
                f"fetching {name} of",
                lambda: self.api.hf_hub_download(
                    self.repo_id,
                    name,
                    revision=self.commit,
                    local_dir=folder,
                    cache_dir=folder / LIBRARY_FOLDER,  # or it would copy from the user's cache, damaged or not
                ),
            )
        )


def pull(
    repo_id: str,
    folder: Path,
    *,
    revision: str | None = None,
    without_record: bool = False,
    endpoint: str | None = None,
) -> Pulled:
    """Fetch ``repo_id`` into ``folder``.

    Args:
        repo_id: ``owner/name``.
        folder: to make; an unchanged earlier pull of the same repository there is replaced, anything else is refused.
        revision: branch, tag or commit; None = the newest of main.
        without_record: also take a drafter that this tool did not export: without ``run.json`` only the hashes that
            the Hub itself keeps can be checked.
        endpoint: of the Hub; None = the usual one.

    Raises:
        UserError: ``folder`` is something else, the repository is no drafter of this tool, or its content is not what
            the hashes say.
        HubError: not found, not allowed, or no connection.
    """
    token = find_token(required=False)
    api = open_api(endpoint, token)
    kept = _pulled_before(folder, repo_id)
    source = _Source(api, HubCaller(api.endpoint, repo_id, token), repo_id, revision)
    if kept is not None and kept.get("commit") == source.commit:
        return Pulled(folder=folder, commit=source.commit, num_files=len(kept["files"]), skipped=[], was_there=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.{source.commit[:12]}.pull")
    partial.mkdir(exist_ok=True)
    try:
        wanted = _wanted(source, partial, without_record)
        for name in sorted(wanted):
            source.fetch(name, partial)
        _check(source, partial, wanted)
    except HubError:
        raise  # what arrived stays for the next pull to continue
    except UserError:
        shutil.rmtree(partial)  # nothing may build on files that were refused
        raise
    _publish(source, partial, folder, revision)
    skipped = sorted(source.files.keys() - wanted)
    return Pulled(folder=folder, commit=source.commit, num_files=len(wanted), skipped=skipped, was_there=False)


def _pulled_before(folder: Path, repo_id: str) -> dict[str, Any] | None:
    """The note of an unchanged pull of this repository in ``folder``; None where nothing is there.

    Raises:
        UserError: something else is there, or somebody changed what was pulled.
    """
    if folder.is_file():
        raise UserError(f"--to {folder}: is a file. Name another folder.")
    if not folder.exists() or not any(folder.iterdir()):
        return None
    try:
        kept = read_json(folder / PULLED) if (folder / PULLED).exists() else {}
    except ValueError as error:
        raise UserError(f"--to {folder}: {error}") from error
    if kept.get("repo_id") != repo_id:
        held = f"was pulled from {kept['repo_id']}" if kept.get("repo_id") else "was written by no pull"
        raise UserError(f"--to {folder}: is there and {held}, so it is left as it is. Name another folder.")
    if kept.get("files") != hash_files(folder, leave_out=()):
        raise UserError(f"--to {folder}: changed since it was pulled. Move it away, or name another folder.")
    return kept


def _wanted(source: _Source, partial: Path, without_record: bool) -> set[str]:
    """Names of the files to fetch, after a look at the two small ones that tell what this is."""
    if CONFIG not in source.files:
        raise UserError(f"{source.repo_id}: has no {CONFIG}, so it is no drafter. Name another repository.")
    source.fetch(CONFIG, partial)
    try:
        config = read_json(partial / CONFIG)
    except ValueError as error:
        raise UserError(f"{source.repo_id}: its {CONFIG} is no JSON object. Name another repository.") from error
    if not isinstance(config.get("dflash_config"), dict) and "DFlash" not in str(config.get("architectures")):
        raise UserError(
            f"{source.repo_id}: is no DFlash drafter (architectures={config.get('architectures')}). "
            "Name another repository."
        )
    if RECORD not in source.files:
        if not without_record:
            raise UserError(
                f"{source.repo_id}: has no {RECORD}, so nothing says what its files should be. Add --without-record to "
                "take it with no more than the Hub's own hashes checked."
            )
        logger.warning("%s: no %s; only the hashes that the Hub keeps are checked", source.repo_id, RECORD)
        return {name for name in source.files if name.endswith(DRAFTER_FILES) and not name.startswith(".")}
    source.fetch(RECORD, partial)
    listed = {str(name) for name in read_record(partial)["files"]}
    unsafe = [name for name in listed if Path(name).name != name or name.startswith(".")]
    missing = sorted(listed - source.files.keys())
    if unsafe or missing:
        what = f"names that lead out of the folder: {unsafe}" if unsafe else f"files that are not there: {missing}"
        raise UserError(f"{source.repo_id}: its {RECORD} lists {what}. Ask its owner to push it again.")
    return {*listed, RECORD}


def _check(source: _Source, partial: Path, wanted: set[str]) -> None:
    """Raise UserError unless every file is what ``run.json`` and the Hub say."""
    found = hash_files(partial, leave_out=())
    listed: dict[str, str] = {}
    if RECORD in wanted:
        record = read_record(partial)
        listed = record["files"]
        if not self_hash_holds(record):
            listed = {**listed, RECORD: "another content"}
    wrong = [name for name in sorted(wanted) if name in listed and found.get(name) != listed[name]]
    for name in sorted(wanted):
        entry = source.files[name]
        held = found.get(name) == entry.lfs.sha256 if entry.lfs else git_hash(partial / name) == entry.blob_id
        wrong += [name] if not held and name not in wrong else []
    if wrong:
        raise UserError(
            f"{source.repo_id} at {source.commit}: {', '.join(wrong)} are not what {RECORD} and the Hub list, so "
            "nothing was kept. Pull again; if it stays so, the repository was edited by hand: ask its owner."
        )


def _publish(source: _Source, partial: Path, folder: Path, revision: str | None) -> None:
    """Write what was pulled and give the folder its name."""
    shutil.rmtree(partial / LIBRARY_FOLDER, ignore_errors=True)
    note = {
        "repo_id": source.repo_id,
        "revision": revision or "main",
        "commit": source.commit,
        "endpoint": source.api.endpoint,
        "time_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "files": hash_files(partial, leave_out=()),
    }
    atomic_write_json(partial / PULLED, note)
    replace_folder(partial, folder)
    logger.debug("pulled: %s", json.dumps(note))
