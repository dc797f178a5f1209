"""A GGUF in the place of a folder: the keys and tensors that llama.cpp's ``dflash`` architecture reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from dflash2_train.export.doctor.findings import ERROR, LLAMA_CPP, WARNING, Examination, Finding, errors_first
from dflash2_train.export.doctor.gguf_file import ARCHITECTURE, GGUF_CHECKS, SIZES, OpenedGguf
from dflash2_train.export.doctor.opened import number
from dflash2_train.export.doctor.target_facts import TargetFacts
from dflash2_train.export.doctor.tensor_checks import LISTED, NEAR_ZERO
from dflash2_train.export.published import SECOND_KEYS

check = GGUF_CHECKS.check
HERE = (LLAMA_CPP,)
OPTIONAL = ("token_embd.weight", "output.weight", "d2t")
CONVERT = "Convert the drafter again with a current converter"
MAY_BE_ZERO = ("selector_", "_conv_proj")


@check(
    "gguf-architecture",
    group="kind",
    rule=f"general.architecture is {ARCHITECTURE}, for DFlash 2 as well",
    servers=HERE,
    next_step="Name the drafter's GGUF; its target goes to --target",
)
def _architecture(gguf: OpenedGguf) -> Iterator[str]:
    stated = gguf.value("general.architecture")
    if stated != ARCHITECTURE:
        yield f"general.architecture={stated!r}"


@check(
    "gguf-keys",
    group="keys",
    rule="all sizes are stated as whole numbers above 0",
    servers=HERE,
    next_step=CONVERT,
)
def _keys(gguf: OpenedGguf) -> Iterator[str]:
    for key in (*SIZES, "attention.value_length", "context_length"):
        if (gguf.number(key) or 0) <= 0:
            yield f"{ARCHITECTURE}.{key}={gguf.value(key)!r}"
    for key in ("attention.layer_norm_rms_epsilon", "rope.freq_base"):
        if (number(gguf.value(key)) or 0) <= 0:
            yield f"{ARCHITECTURE}.{key}={gguf.value(key)!r}"


@check(
    "gguf-old-converter",
    group="keys",
    rule="the file comes from a converter that knows DFlash 2",
    servers=HERE,
    next_step=f"{CONVERT}: the old one wrote target_layers without adding 1",
)
def _old_converter(gguf: OpenedGguf) -> Iterator[str]:
    for key in ("mask_token_id", "target_hidden_size"):
        if gguf.value(key) is not None:
            yield f"{ARCHITECTURE}.{key}={gguf.value(key)!r} is a key of the old converter"


@check(
    "gguf-second-keys",
    group="keys",
    rule="block_size and the sizes of convolution and selector are stated",
    servers=HERE,
    next_step=f"{CONVERT}; llama.cpp refuses this file",
)
def _second_keys(gguf: OpenedGguf) -> Iterator[str]:
    for key in ("block_size", *SECOND_KEYS) if gguf.is_second else ():
        if (gguf.number(key) or 0) <= 0:
            yield f"{ARCHITECTURE}.{key}={gguf.value(key)!r}"


@check(
    "gguf-target-layers",
    group="keys",
    rule="target_layers is a filled, ascending list of layers, each a tap plus 1",
    servers=HERE,
    next_step=f"{CONVERT}, from a config.json with ascending taps",
)
def _target_layers(gguf: OpenedGguf) -> Iterator[str]:
    layers = gguf.target_layers
    if not layers:
        yield f"{ARCHITECTURE}.target_layers={gguf.value('target_layers')!r}"
    elif layers != sorted(set(layers)):
        yield f"{ARCHITECTURE}.target_layers={layers} is not ascending and unique"
    elif layers[0] < 1:
        yield f"{ARCHITECTURE}.target_layers={layers}: a list without the added 1"


@check(
    "gguf-causal",
    group="keys",
    rule="attention.causal is false or absent",
    servers=HERE,
    next_step=f"{CONVERT}: blocks are bidirectional inside",
)
def _causal(gguf: OpenedGguf) -> Iterator[str]:
    if gguf.value("attention.causal") not in (None, False):
        yield f"{ARCHITECTURE}.attention.causal={gguf.value('attention.causal')!r}"


@check(
    "gguf-window",
    group="keys",
    rule="sliding_window and a pattern of one entry a layer come together",
    servers=HERE,
    next_step=f"{CONVERT}, from a config.json with use_sliding_window, sliding_window and layer_types",
)
def _window(gguf: OpenedGguf) -> Iterator[str]:
    window, pattern = gguf.value("attention.sliding_window"), gguf.value("attention.sliding_window_pattern")
    if (window is None) != (pattern is None):
        yield f"sliding_window={window!r}, sliding_window_pattern={pattern!r}"
    elif isinstance(pattern, list) and len(pattern) != gguf.number("block_count"):
        yield f"sliding_window_pattern has {len(pattern)} entries, block_count={gguf.value('block_count')!r}"
    elif window is not None and (number(window) or 0) < (gguf.number("block_size") or 1):
        yield f"sliding_window={window!r} for blocks of {gguf.number('block_size')}"


@check(
    "gguf-embedding-scale",
    group="keys",
    rule="the block's embeddings are not scaled",
    servers=HERE,
    next_step="Train without input_embedding_scale: llama.cpp stores the factor and does not apply it",
)
def _embedding_scale(gguf: OpenedGguf) -> Iterator[str]:
    scale = gguf.value("embedding_scale")
    if scale is not None and scale != 1.0:
        yield f"{ARCHITECTURE}.embedding_scale={scale!r}"


@check(
    "gguf-lattice",
    group="keys",
    rule="embedding_length >= C * (C + 1), C = selector_top_k, and conv_group_size divides it",
    servers=HERE,
    next_step="It cannot be served by llama.cpp, which refuses it",
)
def _lattice(gguf: OpenedGguf) -> Iterator[str]:
    hidden, width, group = map(gguf.number, ("embedding_length", "selector_top_k", "conv_group_size"))
    if hidden and width and hidden < width * (width + 1):
        yield f"embedding_length={hidden}, selector_top_k={width} needs {width * (width + 1)}"
    if hidden and group and hidden % group:
        yield f"conv_group_size={group} does not divide embedding_length={hidden}"


@check(
    "gguf-tokenizer",
    group="keys",
    rule="the target's tokenizer is in the file, with as many tokens as the codebooks have rows",
    servers=HERE,
    next_step="Convert with --target-model-dir, the folder of the target",
)
def _tokenizer(gguf: OpenedGguf) -> Iterator[str]:
    if not gguf.num_tokens:
        yield "there is no tokenizer.ggml.tokens"
    elif gguf.vocab_size is not None and gguf.num_tokens != gguf.vocab_size:
        yield f"tokenizer.ggml.tokens has {gguf.num_tokens} entries, the codebooks have {gguf.vocab_size} rows"


@check(
    "gguf-mask-id",
    group="keys",
    rule="tokenizer.ggml.mask_token_id is a row of the embedding",
    servers=HERE,
    next_step=CONVERT,
)
def _mask_id(gguf: OpenedGguf) -> Iterator[str]:
    token = gguf.mask_token_id
    if token is None or not 0 <= token < (gguf.vocab_size or token + 1):
        yield f"tokenizer.ggml.mask_token_id={token!r}, {gguf.vocab_size} rows"


def _same_faults(names: list[str], total: int, what: str) -> Iterator[str]:
    """A message a tensor, or one for many."""
    if len(names) > LISTED:
        yield f"{len(names)} of {total} tensors are {what}: {', '.join(names[:4])} and more"
    else:
        yield from (f"{name} is {what}" for name in names)


@check(
    "gguf-tensors-missing",
    group="tensors",
    rule="every tensor is there: 6 + 15 a layer with convolution and selector, 3 + 11 a layer without",
    servers=HERE,
    next_step=f"{CONVERT}; llama.cpp refuses this file",
)
def _missing(gguf: OpenedGguf) -> Iterator[str]:
    expected = gguf.expected or {}
    bases = {name for name in expected if name.endswith("_conv_base") and f"{name}.weight" in gguf.tensors}
    yield from _same_faults(sorted(expected.keys() - gguf.tensors.keys() - bases), len(expected), "missing")


@check(
    "gguf-tensors-unknown",
    group="tensors",
    rule="there is no other tensor; conv bases carry no .weight",
    servers=HERE,
    next_step=f"{CONVERT}; llama.cpp counts the tensors",
)
def _unknown(gguf: OpenedGguf) -> Iterator[str]:
    if gguf.expected is not None:
        unknown = gguf.tensors.keys() - gguf.expected.keys() - set(OPTIONAL)
        sinks = {name for name in unknown if name.endswith("attn_sinks.weight")}
        yield from _same_faults(sorted(unknown - sinks), len(gguf.tensors), "unknown")


@check(
    "gguf-shapes",
    group="tensors",
    rule="shapes are those that the keys give; nothing is transposed",
    servers=HERE,
    next_step=CONVERT,
)
def _shapes(gguf: OpenedGguf) -> Iterator[str]:
    expected = dict(gguf.expected or {})
    hidden = gguf.number("embedding_length")
    if gguf.vocab_size and hidden:
        expected |= {"token_embd.weight": (gguf.vocab_size, hidden), "output.weight": (gguf.vocab_size, hidden)}
    for name in sorted(expected.keys() & gguf.tensors.keys()):
        if gguf.shape(name) != expected[name]:
            yield f"{name} is {list(gguf.shape(name))}, expected {list(expected[name])} (rows first)"


@check(
    "gguf-float32",
    group="tensors",
    rule="conv bases and norms are F32",
    servers=HERE,
    next_step="Keep these tensors in F32 while converting; they are small",
)
def _float32(gguf: OpenedGguf) -> Iterator[str]:
    for name in sorted((gguf.expected or {}).keys() & gguf.tensors.keys()):
        if name.endswith(("_conv_base", "_norm.weight")) and gguf.kind(name) != "F32":
            yield f"{name} is {gguf.kind(name)}"


@check(
    "gguf-finite",
    group="tensors",
    rule="every value is finite",
    servers=HERE,
    next_step="Convert from an earlier checkpoint, or to a type with more range than F16",
)
def _finite(gguf: OpenedGguf) -> Iterator[str]:
    for name in sorted(gguf.tensors):
        figures = gguf.figures(name)
        if figures is not None and not figures.finite:
            yield f"{name} holds values that are not finite"


@check(
    "gguf-zero",
    group="tensors",
    rule="no tensor is zero, and no matrix one value, throughout",
    servers=HERE,
    next_step="Convert again: such a tensor was lost or never trained",
)
def _zero(gguf: OpenedGguf) -> Iterator[str]:
    for name in sorted((gguf.expected or {}).keys() & gguf.tensors.keys()):
        figures = gguf.figures(name)
        if figures is None or not figures.finite or any(part in name for part in MAY_BE_ZERO):
            continue
        if figures.largest < NEAR_ZERO:
            yield f"{name} is zero"
        elif len(gguf.shape(name)) == 2 and figures.low == figures.high:
            yield f"{name} is {figures.low:g} throughout"


@check(
    "gguf-untrained",
    group="tensors",
    severity=WARNING,
    rule="convolutions and selector do something",
    servers=HERE,
    next_step="Train on: these change nothing, as at the start",
)
def _untrained(gguf: OpenedGguf) -> Iterator[str]:
    for name in sorted((gguf.expected or {}).keys() & gguf.tensors.keys()):
        if name.startswith("selector_") and _is_zero(gguf, name):
            yield f"{name} is zero"
        projection = name.replace("_conv_base", "_conv_proj.weight")
        if name.endswith("_conv_base") and projection in gguf.tensors and _is_zero(gguf, projection):
            if _is_identity(gguf, name):
                yield f"{name} is the identity"


def _is_identity(gguf: OpenedGguf, name: str) -> bool:
    """Whether a base kernel [2, taps, H] is one at tap 0 and zero elsewhere."""
    if gguf.shape(name) != (gguf.expected or {}).get(name):
        return False
    kernel = torch.cat([piece.reshape(-1) for piece in gguf.pieces(name)]).reshape(gguf.shape(name))
    return bool((kernel[:, 0] == 1).all()) and not bool(kernel[:, 1:].any())


def _is_zero(gguf: OpenedGguf, name: str) -> bool:
    figures = gguf.figures(name)
    return figures is not None and figures.finite and figures.largest < NEAR_ZERO


@check(
    "gguf-mask-row",
    group="tensors",
    rule="where the file has an embedding of its own, the mask token's row is a real one",
    servers=HERE,
    next_step="Write the trained mask vector into that row while converting",
)
def _mask_row(gguf: OpenedGguf) -> Iterator[str]:
    token, name = gguf.mask_token_id, "token_embd.weight"
    if name not in gguf.tensors or token is None or gguf.figures(name) is None:
        return
    norms = torch.cat([piece.norm(dim=-1) for piece in gguf.pieces(name)])
    if 0 <= token < len(norms) and float(norms[token]) < 1e-3 * float(norms.median()):
        yield f"row {token} of {name} has norm {float(norms[token]):.2e}, the middle row {float(norms.median()):.2e}"


@check(
    "gguf-target",
    group="target",
    rule="embedding, vocabulary, layers and context are the target's",
    servers=HERE,
    next_step="Serve it with the target that it was trained for",
)
def _target(gguf: OpenedGguf) -> Iterator[str]:
    target = gguf.target
    if target is None:
        return
    if gguf.number("embedding_length") != target.hidden_size:
        yield f"embedding_length={gguf.number('embedding_length')}, {target.name} has {target.hidden_size}"
    if gguf.vocab_size is not None and gguf.vocab_size != target.vocab_size:
        yield f"{gguf.vocab_size} rows in the codebooks, {target.name} has {target.vocab_size}"
    beyond = [layer for layer in gguf.target_layers if layer > target.num_layers]
    if beyond:
        yield f"target_layers has {beyond}, {target.name} has {target.num_layers} layers"
    context = gguf.number("context_length")
    if context is not None and context < target.max_position_embeddings:
        yield f"context_length={context}, {target.name} reaches {target.max_position_embeddings}"


def examine_gguf(path: Path, *, target: TargetFacts | None = None) -> Examination[OpenedGguf]:
    """Everything about a drafter's GGUF.

    Args:
        path: the file; nothing in it is trusted.
        target: the target to compare with, or None.

    Raises:
        UserError: the package ``gguf`` is not installed.
    """
    try:
        gguf = OpenedGguf(path, target)
    except ValueError as error:
        return Examination(subject=None, findings=[_unreadable(str(error))], not_checked=["everything else"])
    findings = GGUF_CHECKS.run(gguf, "kind")
    if not findings:
        findings = [finding for group in ("keys", "tensors", "target") for finding in GGUF_CHECKS.run(gguf, group)]
    return Examination(subject=gguf, findings=errors_first(findings), not_checked=_not_checked(gguf))


def _unreadable(message: str) -> Finding:
    return Finding(
        check="gguf-file",
        severity=ERROR,
        message=message,
        rule="the file is a whole GGUF",
        servers=HERE,
        next_step="Copy or convert it again",
    )


def _not_checked(gguf: OpenedGguf) -> list[str]:
    missing = []
    if gguf.target is None:
        missing.append("sizes and layers of the target: name it with --target")
    if gguf.expected is None:
        missing.append("names and shapes of tensors: the keys do not give them")
    opaque = sorted(name for name in gguf.tensors if gguf.figures(name) is None)
    if opaque:
        missing.append(f"values of {len(opaque)} tensors of a type that gguf cannot read back")
    return missing
