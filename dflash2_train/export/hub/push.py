"""Putting an exported drafter on the Hub.

What goes is what ``run.json`` lists, or ``gguf.json`` for GGUF files, in one commit that names the run, once doctor and
hashes agree. A push that was cut is continued by the same command: files that arrived are not sent again, and
nothing is visible before the commit. Afterwards the Hub is asked for the hashes of what it holds.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash2_train.config import UserError
from dflash2_train.export.doctor import check_folder
from dflash2_train.export.doctor.findings import refuse_errors
from dflash2_train.export.doctor.gguf_checks import examine_gguf
from dflash2_train.export.hub.client import TOKEN, HubCaller, HubError, find_token, open_api
from dflash2_train.export.payload import CARD, GGUF_RECORD, RECORD, TOOL, WEIGHTS, read_json
from dflash2_train.export.record import SELF, changed_files, hash_files, read_record
from dflash2_train.provenance import public_value

if TYPE_CHECKING:
    from huggingface_hub import HfApi

logger = logging.getLogger(__name__)
TEXT_FILES = (".json", ".md", ".txt")
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")  # a loader may take one that was left behind
MAIN = "main"
_NOT_FIT = "{path}: would not serve as trained, so it is not pushed"


@dataclass(frozen=True, kw_only=True)
class PushFile:
    """A file that goes."""

    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class PushPlan:
    """What a push would send."""

    folder: Path
    files: list[PushFile]
    left_here: list[str]  # files of the folder that its record does not list
    message: str  # of the commit
    description: str

    @property
    def num_bytes(self) -> int:
        """Of all files together."""
        return sum(file.num_bytes for file in self.files)


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """Where a push ended."""

    url: str  # of the commit
    commit: str
    private: bool


def plan_push(folder: Path) -> PushPlan:
    """Look at a drafter and say what would go to the Hub; asks nobody.

    Args:
        folder: as ``dflash2-export`` wrote it, a drafter or the GGUF files made of one.

    Raises:
        UserError: no export of this tool, files changed since, an error that the doctor finds, or a text that holds
            something like a Hub token.
    """
    if (folder / GGUF_RECORD).exists() and not (folder / RECORD).exists():
        return _plan_ggufs(folder)
    record, found = read_record(folder), hash_files(folder, leave_out=())
    _refuse_changed(folder, changed_files(folder, record, found))
    refuse_errors(check_folder(folder), _NOT_FIT.format(path=folder))
    source = record.get("source") or {}
    run, step = record.get("run_id") or "not recorded", source.get("step", "not recorded")
    return _plan(
        folder,
        found,
        [*record["files"], RECORD],
        message=f"Drafter {record['config']['name']}, run {run}, step {step}",
        description=f"run.json {record.get(SELF, '')}, checked before the push: hashes and dflash2-export doctor",
    )


def _plan_ggufs(folder: Path) -> PushPlan:
    """The same for a folder of GGUF files with their record."""
    try:
        record = read_json(folder / GGUF_RECORD)
    except ValueError as error:
        raise UserError(str(error)) from error
    if record.get("tool") != TOOL or not isinstance(record.get("files"), dict) or public_value(record) != record:
        raise UserError(
            f"{folder / GGUF_RECORD}: is not a record of {TOOL}, or of an earlier version that kept local paths. "
            "Export again with export.format=gguf."
        )
    found = hash_files(folder, leave_out=())
    files = record["files"]
    _refuse_changed(folder, [name for name in files if found.get(name) != files[name]["sha256"]])
    for name in files:
        refuse_errors(examine_gguf(folder / name).findings, _NOT_FIT.format(path=folder / name))
    weights = record["source"]["drafter"][WEIGHTS]
    return _plan(
        folder,
        found,
        [*files, GGUF_RECORD, CARD],
        message=f"Drafter {record['config']['name']} as GGUF, of weights {weights[:12]}",
        description=f"made of {WEIGHTS} {weights}, checked before the push: hashes and dflash2-export doctor",
    )


def _plan(folder: Path, found: dict[str, str], names: list[str], *, message: str, description: str) -> PushPlan:
    refuse_secrets(folder, names)
    return PushPlan(
        folder=folder,
        files=[
            PushFile(name=name, num_bytes=(folder / name).stat().st_size, sha256=found[name]) for name in sorted(names)
        ],
        left_here=sorted(found.keys() - set(names)),
        message=message,
        description=description,
    )


def _refuse_changed(folder: Path, changed: list[str]) -> None:
    if changed:
        raise UserError(
            f"{folder}: {', '.join(changed)} changed after the export, so it is not pushed. Restore the files, or "
            "export again."
        )


def refuse_secrets(folder: Path, names: list[str]) -> None:
    """Raise UserError when a text that would be published holds something of a token's form."""
    for name in names:
        if name.endswith(TEXT_FILES) and TOKEN.search((folder / name).read_text(encoding="utf-8", errors="replace")):
            raise UserError(
                f"{folder / name}: holds something that looks like a Hub token, so it is not pushed. Revoke it, "
                "take it out of the configuration, and export again."
            )


def push(
    plan: PushPlan,
    repo_id: str,
    *,
    public: bool = False,
    revision: str = MAIN,
    replace: bool = False,
    endpoint: str | None = None,
) -> Pushed:
    """Create the repository if needed and commit the files of ``plan``.

    Args:
        plan: of :func:`plan_push`.
        repo_id: ``owner/name``.
        public: create it for everyone to see, or allow one that is so already.
        revision: branch; made from main if missing.
        replace: remove other files of the repository in the same commit.
        endpoint: of the Hub; None = the usual one.

    Raises:
        HubError: no token, not allowed, a public repository without ``public``, weights in the repository that this
            drafter does not have, a connection that stays away, or another content there after the commit.
    """
    token = find_token(required=True)
    api = open_api(endpoint, token)
    call = HubCaller(api.endpoint, repo_id, token)
    private = call("looking at", lambda: _visibility(api, repo_id))
    if private is False and not public:
        raise HubError(
            f"{repo_id} is public, so everyone could read what is pushed. Add --public if that is meant, or name "
            "another repository."
        )
    if private is None:
        call("creating", lambda: api.create_repo(repo_id, private=not public, exist_ok=True))
        private = not public
    elif private and public:
        logger.warning("%s exists and stays private; its visibility is changed in its settings on the Hub", repo_id)
    if revision != MAIN:
        call("branching", lambda: api.create_branch(repo_id, branch=revision, exist_ok=True))
    _refuse_strays(call("listing", lambda: api.list_repo_files(repo_id, revision=revision)), plan, repo_id, replace)
    names = [file.name for file in plan.files]
    info = call(
        "pushing to",
        lambda: api.upload_folder(
            repo_id=repo_id,
            folder_path=plan.folder,
            allow_patterns=names,
            delete_patterns="*" if replace else None,
            commit_message=plan.message,
            commit_description=plan.description,
            revision=revision,
        ),
    )
    held = call("checking", lambda: api.get_paths_info(repo_id, names, revision=info.oid))
    _refuse_difference(plan, {entry.path: entry for entry in held}, repo_id)
    return Pushed(url=str(info.commit_url), commit=str(info.oid), private=private)


def _visibility(api: HfApi, repo_id: str) -> bool | None:
    """Whether a repository is private; None where there is none."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return bool(api.model_info(repo_id).private)
    except HfHubHTTPError as error:
        if error.response.status_code == 404:
            return None
        raise


def _refuse_strays(present: list[str], plan: PushPlan, repo_id: str, replace: bool) -> None:
    """Weights of something else beside ours would be loaded by some server sooner or later."""
    others = sorted(set(present) - {file.name for file in plan.files})
    strays = [name for name in others if name.endswith(WEIGHT_FILES)]
    if strays and not replace:
        raise HubError(
            f"{repo_id} holds weights that this drafter does not have: {', '.join(strays)}. Add --replace to remove "
            "all other files of it in the same commit, or push elsewhere."
        )
    if others and not replace:
        logger.info("%s keeps %d other files: %s", repo_id, len(others), ", ".join(others))


def _refuse_difference(plan: PushPlan, held: dict[str, Any], repo_id: str) -> None:
    """Raise HubError unless the Hub holds exactly what was meant to go: by sha256, or by git's own hash."""
    wrong = []
    for file in plan.files:
        entry = held.get(file.name)
        if entry is None:
            wrong.append(f"{file.name} (missing)")
        elif entry.lfs is not None:
            wrong += [file.name] if entry.lfs.sha256 != file.sha256 else []
        elif entry.blob_id != git_hash(plan.folder / file.name):
            wrong.append(file.name)
    if wrong:
        raise HubError(
            f"{repo_id}: after the commit the Hub holds another content of {', '.join(wrong)} than was checked here. "
            "Do not use that commit; push again while nothing else writes to the folder."
        )


def git_hash(path: Path) -> str:
    """The id that git gives a file's content: sha1 over ``blob``, its size, a zero byte, and the bytes."""
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
