"""Faults that can be planted in a clean export, and how: what the table of faults is made of."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash2_train.config import TargetConfig
from dflash2_train.export.doctor.target_facts import TargetFacts
from dflash2_train.export.record import SELF
from dflash2_train.export.rewrite import rewrite_papers
from dflash2_train.provenance import sha256_file, sha256_json
from tests.cases import edit_json
from tests.families import HIDDEN, VOCAB
from tests.reports import write_report

Plant = Callable[[Path], object]
MASK_ID = VOCAB - 1
WEIGHTS = "model.safetensors"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault: planted alone, it must be found by ``check``, and by no other but those in ``also``."""

    what: str
    check: str
    plant: Plant
    contract: str = ""  # the silent failure or loader row that it is an instance of
    family: str = "glm53_flash_swa"
    also: tuple[str, ...] = ()
    keep_record: bool = False  # else run.json and PROVENANCE.txt go, whose hashes would report every edit again
    target: Callable[[Path], TargetFacts] | None = None
    proposals: int | None = None


def config(**changes: object) -> Plant:
    """Edit ``config.json``; see ``edit_json``."""
    return lambda folder: edit_json(folder / "config.json", **changes)


def record(**changes: object) -> Plant:
    """Edit ``run.json``; see ``edit_json``."""
    return lambda folder: edit_json(folder / "run.json", **changes)


def tensors(edit: Callable[[dict[str, Tensor]], object]) -> Plant:
    """Edit the dict of tensors in place."""

    def plant(folder: Path) -> None:
        stored = load_file(folder / WEIGHTS)
        edit(stored)
        save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / WEIGHTS, {"format": "pt"})

    return plant


def put(name: str, new: Callable[[Tensor], Tensor]) -> Plant:
    """Replace one tensor by a function of itself."""
    return tensors(lambda stored: stored.update({name: new(stored[name])}))


def add(name: str, *shape: int) -> Plant:
    """One tensor more, random."""
    return tensors(lambda stored: stored.update({name: torch.randn(shape).bfloat16()}))


def rename(name: str, new: str) -> Plant:
    """Another name for one tensor."""
    return tensors(lambda stored: stored.update({new: stored.pop(name)}))


def mask(payload: object) -> Plant:
    """Another content of the mask file; None takes the file away."""

    def plant(folder: Path) -> None:
        path = folder / "mask_embedding.pt"
        if payload is None:
            path.unlink()
        else:
            torch.save(payload, path)

    return plant


def file(name: str, content: bytes | None) -> Plant:
    """Write a file, or remove it."""
    return lambda folder: (folder / name).unlink() if content is None else _write(folder / name, content)


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def cut(name: str, keep: int) -> Plant:
    """Keep the first bytes of a file (or all but some, for a negative number)."""
    return lambda folder: _write(folder / name, (folder / name).read_bytes()[:keep])


def both(*plants: Plant) -> Plant:
    """One after another."""

    def plant(folder: Path) -> None:
        for each in plants:
            each(folder)

    return plant


def shard(folder: Path) -> None:
    """Split the weights into two files with an index, without a fault."""
    stored = load_file(folder / WEIGHTS)
    names = sorted(stored)
    halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for name, part in halves.items():
        save_file({key: stored[key] for key in part}, folder / name, {"format": "pt"})
    (folder / WEIGHTS).unlink()
    listed = {key: name for name, part in halves.items() for key in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": listed}))


def sharded(edit: Callable[[dict[str, str], Path], object]) -> Plant:
    """Shards whose index (tensor -> file) is edited in place."""

    def plant(folder: Path) -> None:
        shard(folder)
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        edit(index["weight_map"], folder)
        path.write_text(json.dumps(index))

    return plant


def reseal(folder: Path) -> None:
    """Make the record's hashes those of the files as they are now."""
    record = json.loads((folder / "run.json").read_text())
    for name in record["files"]:
        record["files"][name] = sha256_file(folder / name)
    record[SELF] = sha256_json({key: value for key, value in record.items() if key != SELF})
    (folder / "run.json").write_text(json.dumps(record))


def measured(*, equal: bool = True, committed: int | None = None) -> Plant:
    """Take an evaluation into the card; ``committed`` then changes a count of it in the record, hashes made to fit."""

    def plant(folder: Path) -> None:
        rewrite_papers(folder, [write_report(folder.parent / "report.json", folder, equal=equal)])
        if committed is not None:
            record = json.loads((folder / "run.json").read_text())
            record["evaluations"][0]["passes"][0]["committed"] = committed
            (folder / "run.json").write_text(json.dumps(record))
            reseal(folder)

    return plant


@dataclass(kw_only=True)
class TinyTarget:
    """A target's folder as the checks read it: tokenizer files and an embedding."""

    sizes: dict[str, int] = field(default_factory=dict)
    ordinary: int = VOCAB - 2  # ids from 0 on that text is made of
    special: dict[int, str] = field(default_factory=lambda: {VOCAB - 2: "<|end|>", MASK_ID: "<|reserved|>"})
    template: str = "{{ bos }}<|end|>"
    tokenizer_config: dict[str, object] = field(default_factory=dict)
    eos: tuple[int, ...] = (1, 2)
    edit_rows: Callable[[Tensor], object] | None = None
    copy_own: bool = False  # the drafter's own embedding becomes the target's

    def __call__(self, folder: Path) -> TargetFacts:
        """Write it beside the drafter's ``folder`` and tell what is known of it."""
        at = folder.parent / "target"
        at.mkdir(exist_ok=True)
        (at / "config.json").write_text("{}")
        vocabulary = {f"t{id}": id for id in range(self.ordinary)}
        added = [{"id": id, "content": text, "special": True} for id, text in self.special.items()]
        (at / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": added}))
        (at / "tokenizer_config.json").write_text(json.dumps(self.tokenizer_config))
        (at / "chat_template.jinja").write_text(self.template)
        table = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(5)).bfloat16()
        if self.edit_rows is not None:
            self.edit_rows(table)
        save_file({"model.embed_tokens.weight": table}, at / WEIGHTS)
        if self.copy_own:
            tensors(lambda stored: stored.update({"embed_tokens.weight": table}))(folder)
        sizes = {"hidden_size": HIDDEN, "num_layers": 45, "vocab_size": VOCAB} | self.sizes
        reach = sizes.pop("max_position_embeddings", 64)
        return TargetFacts(
            name="tiny",
            max_position_embeddings=reach,
            eos_token_ids=self.eos,
            config=TargetConfig(name=str(at), license="", **sizes),
            **sizes,
        )
