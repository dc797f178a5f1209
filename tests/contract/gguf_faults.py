"""Faults that can be planted in a drafter's GGUF, in its keys and tensors before it is written or in its bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dflash2_train.export.doctor import Finding
from dflash2_train.export.doctor.gguf_checks import examine_gguf
from tests.contract.tiny_gguf import Edit, Parts, gguf_parts, write_gguf
from tests.families import HIDDEN, VOCAB

SWA = "glm53_flash_swa"
BASE, PROJECTION = "blk.0.attn_conv_base", "blk.0.attn_conv_proj.weight"


@dataclass(frozen=True, kw_only=True)
class GgufFault:
    """One fault: planted alone, it must be found by ``check`` and by no other."""

    what: str
    check: str
    edit: Edit = field(default=lambda parts: None)
    spoil: Callable[[Path], object] = field(default=lambda path: None)


def key(**changes: object) -> Edit:
    """Set keys, dots written as double underscores; None removes one."""

    def edit(parts: Parts) -> None:
        for name, value in changes.items():
            full = name.replace("__", ".")
            if value is None:
                del parts.keys[full]
            else:
                parts.keys[full] = value

    return edit


def tensor(name: str, new: object) -> Edit:
    """Set one tensor, or remove it for None."""
    return lambda parts: parts.tensors.pop(name) if new is None else parts.tensors.update({name: new})


def change(name: str, function: object) -> Edit:
    return lambda parts: parts.tensors.update({name: function(parts.tensors[name])})


def identity(parts: Parts) -> None:
    parts.tensors[BASE] = np.zeros_like(parts.tensors[BASE])
    parts.tensors[BASE][:, 0] = 1
    parts.tensors[PROJECTION] = np.zeros_like(parts.tensors[PROJECTION])


def old_architecture(parts: Parts) -> None:
    parts.architecture = "llama"


def own_embedding(parts: Parts) -> None:
    table = np.random.default_rng(0).standard_normal((VOCAB, HIDDEN)).astype(np.float16)
    table[VOCAB - 1] = 0
    parts.tensors["token_embd.weight"] = table


GGUF_FAULTS = (
    GgufFault(what="the target's own file", check="gguf-architecture", edit=old_architecture),
    GgufFault(what="no head size", check="gguf-keys", edit=key(attention__value_length=None)),
    GgufFault(what="no rotary base", check="gguf-keys", edit=key(rope__freq_base=None)),
    GgufFault(what="a key of the old converter", check="gguf-old-converter", edit=key(mask_token_id=5)),
    GgufFault(what="no block size", check="gguf-second-keys", edit=key(block_size=None)),
    GgufFault(what="no selector width", check="gguf-second-keys", edit=key(selector_top_k=None)),
    GgufFault(what="no layers of the target", check="gguf-target-layers", edit=key(target_layers=None)),
    GgufFault(what="layers out of order", check="gguf-target-layers", edit=key(target_layers=[15, 6, 25, 34, 43])),
    GgufFault(
        what="layers without the added 1", check="gguf-target-layers", edit=key(target_layers=[0, 14, 24, 33, 42])
    ),
    GgufFault(what="causal blocks", check="gguf-causal", edit=key(attention__causal=True)),
    GgufFault(what="a window without a pattern", check="gguf-window", edit=key(attention__sliding_window_pattern=None)),
    GgufFault(what="a pattern too short", check="gguf-window", edit=key(attention__sliding_window_pattern=[True])),
    GgufFault(what="a window below the block", check="gguf-window", edit=key(attention__sliding_window=7)),
    GgufFault(what="scaled embeddings", check="gguf-embedding-scale", edit=key(embedding_scale=2.0)),
    GgufFault(what="too many candidates", check="gguf-lattice", edit=key(selector_top_k=8)),
    GgufFault(what="no tokenizer", check="gguf-tokenizer", edit=key(tokenizer__ggml__tokens=None)),
    GgufFault(what="another tokenizer", check="gguf-tokenizer", edit=key(tokenizer__ggml__tokens=["a", "b"])),
    GgufFault(what="no mask token", check="gguf-mask-id", edit=key(tokenizer__ggml__mask_token_id=None)),
    GgufFault(
        what="a mask token beyond the table", check="gguf-mask-id", edit=key(tokenizer__ggml__mask_token_id=VOCAB)
    ),
    GgufFault(what="a tensor left out", check="gguf-tensors-missing", edit=tensor("blk.1.ffn_up.weight", None)),
    GgufFault(what="an unknown tensor", check="gguf-tensors-unknown", edit=tensor("mask", np.ones(4, np.float32))),
    GgufFault(
        what="a conv base named as a weight",
        check="gguf-tensors-unknown",
        edit=lambda parts: parts.tensors.update({f"{BASE}.weight": parts.tensors.pop(BASE)}),
    ),
    GgufFault(
        what="a transposed conv base", check="gguf-shapes", edit=change(BASE, lambda base: base.transpose(2, 1, 0))
    ),
    GgufFault(
        what="a conv base in half precision",
        check="gguf-float32",
        edit=change(BASE, lambda base: base.astype(np.float16)),
    ),
    GgufFault(
        what="a value beyond half precision",
        check="gguf-finite",
        edit=change("fc.weight", lambda weight: (weight.astype(np.float32) * 0 + 1e9 * weight).astype(np.float16)),
    ),
    GgufFault(what="a norm of zeros", check="gguf-zero", edit=change("output_norm.weight", np.zeros_like)),
    GgufFault(what="a matrix of ones", check="gguf-zero", edit=change("blk.0.attn_v.weight", np.ones_like)),
    GgufFault(what="a convolution that was never trained", check="gguf-untrained", edit=identity),
    GgufFault(
        what="a selector that was never trained",
        check="gguf-untrained",
        edit=change("selector_successor.weight", np.zeros_like),
    ),
    GgufFault(what="an own embedding with an empty mask row", check="gguf-mask-row", edit=own_embedding),
    GgufFault(what="a cut file", check="gguf-file", spoil=lambda path: path.write_bytes(path.read_bytes()[:-5000])),
    GgufFault(
        what="a file cut in its keys", check="gguf-file", spoil=lambda path: path.write_bytes(path.read_bytes()[:300])
    ),
    GgufFault(what="an empty file", check="gguf-file", spoil=lambda path: path.write_bytes(b"")),
    GgufFault(what="another file", check="gguf-file", spoil=lambda path: path.write_bytes(b"text, no model" * 10)),
)


def found_in_gguf(folder: Path, path: Path, fault: GgufFault) -> list[Finding]:
    """Write the exported ``folder`` as a GGUF to ``path`` with the fault in it; the findings."""
    parts = gguf_parts(folder)
    with np.errstate(over="ignore"):
        fault.edit(parts)
    write_gguf(path, parts)
    fault.spoil(path)
    return examine_gguf(path).findings
