"""A drafter folder of any known style, recognised by its own facts and opened; tensors are read one at a time."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash2_train.export.convert import angelspec, hf, specforge, speculators, zlab
from dflash2_train.export.convert.style import ConvertError, Hints, Loss, Seen, Style
from dflash2_train.export.payload import CARD, CONFIG, MASK, PLAIN_DTYPES, RECORD, read_json
from dflash2_train.export.published import (
    PublishedDrafter,
    by_published_name,
    drafter_in,
    is_second_generation,
    shape_of,
)
from dflash2_train.export.weight_files import WeightFiles
from dflash2_train.model.drafter_config import DrafterShape
from dflash2_train.provenance import sha256_file

# In this order: the last two differ in one file, and the first three have marks that no other has.
STYLES: Mapping[str, Style] = {
    module.STYLE.name: module.STYLE for module in (speculators, angelspec, specforge, hf, zlab)
}
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_LICENCE = re.compile(r"\A---\n(?:.*\n)*?license:[ \t]*(\S+)[ \t]*\n(?:.*\n)*?---\n")


@dataclass(frozen=True, kw_only=True)
class Source:
    """An opened drafter."""

    folder: Path
    style: Style
    config: dict[str, Any]  # as found
    published: dict[str, Any]  # the same in published keys
    drafter: PublishedDrafter
    losses: list[Loss]

    @property
    def dtypes(self) -> set[str]:
        """Torch names of the tensors' types."""
        return {PLAIN_DTYPES[self.drafter.files.header[stored][0]] for stored in self.drafter.names.values()}

    @property
    def tokens(self) -> dict[str, Any]:
        """Special tokens, None where the configuration does not state one."""
        return {key: self.published.get(key) for key in TOKENS}

    @property
    def selector_adds_nothing(self) -> bool:
        """Whether a factor of every selector score is zero."""
        factors = (name for name in self.drafter.names if name.startswith("candidate_selector."))
        return any(not bool(self.drafter.read(name).any()) for name in factors)

    @property
    def convolutions_pass_through(self) -> bool:
        """Whether every convolution is the identity: tap 0 of its base is one, all else zero."""
        for name in self.drafter.names:
            if name.endswith(".base_kernel"):
                kernel = self.drafter.read(name)  # [2, taps, H]
                if not bool((kernel[:, 0] == 1).all()) or bool(kernel[:, 1:].any()):
                    return False
            elif name.endswith(".kernel_projection.weight") and bool(self.drafter.read(name).any()):
                return False
        return True


def open_source(folder: Path, hints: Hints) -> Source:
    """Recognise and open a drafter folder.

    Args:
        folder: with ``config.json`` and safetensors files; nothing in it is trusted.
        hints: what the user says where its format does not.

    Raises:
        ConvertError: no drafter of a known style, or one that says something that drafters here do not compute.
    """
    try:
        config, files = read_json(folder / CONFIG), WeightFiles(folder)
        seen = Seen(config=config, header=files.header, files=frozenset(path.name for path in folder.iterdir()))
        style = recognised(folder, seen)
        return _opened(folder, style, seen, files, hints)
    except (ConvertError, ValueError) as error:
        raise ConvertError(f"{folder}: {error}") from error


def recognised(folder: Path, seen: Seen) -> Style:
    """The style whose marks a folder has.

    Raises:
        ConvertError: none; tells what was looked for and what there is.
    """
    style = next((style for style in STYLES.values() if style.recognises(seen)), None)
    if style is not None:
        return style
    looked = "\n  ".join(f"{style.title}: {style.marks}" for style in STYLES.values())
    some = ", ".join(sorted(seen.header)[:6])
    raise ConvertError(
        f"is in no style that is known here. Looked for:\n  {looked}\n"
        f"Found: architectures={seen.config.get('architectures')!r}, model_type={seen.config.get('model_type')!r}, "
        f"{len(seen.header)} tensors ({some} …). Name the folder of a DFlash or DFlash 2 drafter, not of its target."
    )


def _opened(folder: Path, style: Style, seen: Seen, files: WeightFiles, hints: Hints) -> Source:
    published, shape, generation = _described(style, seen, hints)
    spelled = style.published_names(seen.header)
    stored = {own: name for name, own in spelled.items()}
    if len(stored) < len(spelled):
        raise ConvertError("two of its tensors have one meaning. Remove the one that does not belong there.")
    names = {name: stored[own] for name, own in by_published_name(stored).items()}
    _refuse_vocabulary_map(names)
    return Source(
        folder=folder,
        style=style,
        config=dict(seen.config),
        published=published,
        drafter=drafter_in(files, names, shape, generation),
        losses=_left_behind(style, seen),
    )


def _described(style: Style, seen: Seen, hints: Hints) -> tuple[dict[str, Any], DrafterShape, int]:
    """The configuration in published keys, the drafter's shape and its generation."""
    try:
        published = style.publish(seen.config, hints)
        shape, generation = shape_of(published, seen.header)
    except (TypeError, AttributeError) as error:  # nothing in the file is trusted, the kinds of its values neither
        raise ConvertError(f"{CONFIG}: a value is of another kind than its key has ({error}). Correct it.") from error
    return published, shape, generation


def _refuse_vocabulary_map(names: Mapping[str, str]) -> None:
    maps = sorted({"d2t", "t2d"} & names.keys())
    if maps:
        raise ConvertError(
            f"{' and '.join(maps)}: it drafts over a part of the target's vocabulary, through a head of its own. "
            "Drafters here use the target's head over all of it. It cannot be converted."
        )


def _left_behind(style: Style, seen: Seen) -> list[Loss]:
    unused = ", ".join(sorted(style.unused & seen.header.keys()))
    measured = ", ".join(sorted(name for name in seen.files if name.startswith("evaluation-")))
    lost = []
    if unused:
        lost.append(Loss(what="tensors", text=f"{unused}: of the target, for training alone"))
    if measured:
        lost.append(Loss(what="evaluations", text=f"{measured}: stay with the source, whose files they measured"))
    return lost


def stated_licence(folder: Path) -> str | None:
    """Licence in the front matter of a model card, or None."""
    card = folder / CARD
    found = _LICENCE.match(card.read_text(encoding="utf-8", errors="replace")) if card.is_file() else None
    return found[1] if found else None


def source_record(source: Source, name: str, commit: str | None) -> dict[str, Any]:
    """What identifies a source: name, commit, style, licence, sha256 of its files, and the record that it carries."""
    try:
        record = read_json(source.folder / RECORD) if (source.folder / RECORD).exists() else None
    except ValueError as error:
        raise ConvertError(str(error)) from error
    drafter = source.drafter
    kept = [CONFIG, *(path.name for path in drafter.files.paths), *([MASK] if drafter.mask is not None else [])]
    return {
        "name": name if commit else Path(name).name,
        "commit": commit,
        "style": source.style.name,
        "license": stated_licence(source.folder),
        "files": {file: sha256_file(source.folder / file) for file in kept},
        "config": source.config,
        "record": record,
    }


def is_idle(source: Source) -> bool:
    """Whether convolution and selector, where there are any, change nothing."""
    if not any(map(is_second_generation, source.drafter.names)):
        return True
    return source.selector_adds_nothing and source.convolutions_pass_through
