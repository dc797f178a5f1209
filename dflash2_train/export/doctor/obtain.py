"""From what the user named to files on this machine: a folder, a GGUF, or a Hub id at one commit."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from dflash2_train.config import UserError, absolute

HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")
# What the checks read. Never *.py, and never a pickle but the one whose form is checked without running it.
FETCHED = ("*.json", "*.safetensors", "mask_embedding.pt", "PROVENANCE.txt", "README.md")


@dataclass(frozen=True, kw_only=True)
class Obtained:
    """Files to look at and where they came from."""

    path: Path  # a folder, or a GGUF file
    name: str  # as servers would be told: path or Hub id
    commit: str | None = None  # of a Hub id

    @property
    def is_gguf(self) -> bool:
        """Whether it is a single GGUF file."""
        return self.path.is_file()


def obtain(name: str, revision: str | None = None) -> Obtained:
    """The drafter that ``name`` says.

    Args:
        name: a folder, a ``.gguf`` file, or ``owner/name`` or ``owner/name@revision`` on the Hub. What exists on this
            machine wins.
        revision: branch, tag or commit of a Hub id; None is its main branch. Whichever it is, all files are taken from
            the one commit that is reported.

    Raises:
        UserError: nothing of that name here or on the Hub, no access, or no network.
    """
    path = absolute(name)
    if path.exists():
        return _local(path, name)
    repository, _, pinned = name.partition("@")
    if not HUB_ID.match(repository) or name.startswith((".", "/", "~")):
        raise UserError(
            f"{name}: no such folder or file. Name a drafter's folder, a .gguf file or a Hub id owner/name."
        )
    if pinned and revision and pinned != revision:
        raise UserError(f"{name}: --revision {revision} contradicts it. Give the revision once.")
    return _fetch(repository, pinned or revision)


def _local(path: Path, name: str) -> Obtained:
    if path.is_file():
        if path.suffix == ".gguf":
            return Obtained(path=path, name=name)
        raise UserError(f"{name}: is a file and no .gguf. Name the folder that holds config.json and the weights.")
    ggufs = sorted(path.glob("*.gguf"))
    if (path / "config.json").exists() or not ggufs:
        return Obtained(path=path, name=name)
    if len(ggufs) > 1:
        raise UserError(f"{name}: holds {len(ggufs)} GGUF files and no config.json. Name one: {ggufs[0]}")
    return Obtained(path=ggufs[0], name=str(ggufs[0]))


def _fetch(repository: str, revision: str | None) -> Obtained:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    at = f"{repository}@{revision or 'main'}"
    try:
        folder = Path(snapshot_download(repository, revision=revision, allow_patterns=list(FETCHED)))
    except GatedRepoError as error:
        raise UserError(
            f"{at}: its owner lets in only whom they accepted. Accept the terms on its page and log in (hf auth login)."
        ) from error
    except RepositoryNotFoundError as error:
        raise UserError(
            f"{at}: no such folder here and no such repository on the Hub, or a private one. "
            "Check the name; for a private one log in (hf auth login)."
        ) from error
    except RevisionNotFoundError as error:
        raise UserError(f"{at}: the repository has no such revision. Name a branch, tag or commit of it.") from error
    except LocalEntryNotFoundError as error:
        raise UserError(
            f"{at}: no such folder here, and neither the Hub could be reached nor does the cache hold it. "
            "Check the network and HF_HUB_OFFLINE, or name a local folder."
        ) from error
    except (OSError, ValueError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise UserError(f"{at}: the Hub did not give it: {first}. Try again, or name a local folder.") from error
    if not (folder / "config.json").exists():
        raise UserError(f"{at}: has no config.json. Of a repository of GGUFs, download one and name the file.")
    return Obtained(path=folder, name=repository, commit=folder.name)
