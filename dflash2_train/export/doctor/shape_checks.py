"""``config.json``: sizes, attention, rotary embedding, taps and mask id, each by itself and against the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dflash2_train.config import LAYER_TYPES
from dflash2_train.export.doctor.findings import (
    LLAMA_CPP,
    READERS,
    REFERENCE,
    RUNNER,
    SERVERS,
    SGLANG,
    VLLM,
    WARNING,
)
from dflash2_train.export.doctor.opened import DRAFTER_CHECKS, OpenedDrafter, number, whole

check = DRAFTER_CHECKS.check
# Taps of published drafters as their config.json states them, by layers of the target. A list that is one of these
# plus one was copied from a server's log or a GGUF, where 1 has been added already.
PUBLISHED_TAPS = (
    (45, (5, 14, 24, 33, 42)),
    (45, (5, 9, 14, 19, 24, 28, 33, 38, 42)),
    (64, (5, 19, 33, 47, 61)),
    (52, (1, 13, 25, 37, 49)),
    (78, (1, 20, 38, 56, 75)),
)


@check(
    "head-sizes",
    group="config",
    rule="query heads are a multiple of key heads, and head_dim is even",
    servers=READERS,
    next_step="State the sizes that the tensors have",
)
def _heads(drafter: OpenedDrafter) -> Iterator[str]:
    heads, kv_heads, head_dim = map(drafter.top, ("num_attention_heads", "num_key_value_heads", "head_dim"))
    if heads and kv_heads and heads % kv_heads:
        yield f"num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}"
    if head_dim and head_dim % 2:
        yield f"head_dim={head_dim}: rotary embedding turns pairs of channels"


@check(
    "conv-group",
    group="config",
    rule="conv_group_size divides hidden_size",
    servers=READERS,
    next_step="State the group size of training",
)
def _conv_group(drafter: OpenedDrafter) -> Iterator[str]:
    hidden, group = drafter.top("hidden_size"), whole(drafter.nested.get("conv_group_size"))
    if hidden and group and hidden % group:
        yield f"conv_group_size={group} does not divide hidden_size={hidden}"


@check(
    "selector-width",
    group="config",
    rule="selector_top_k lies between 2 and vocab_size",
    servers=READERS,
    next_step="State the number of candidates of training",
)
def _selector_width(drafter: OpenedDrafter) -> Iterator[str]:
    width, vocab = whole(drafter.nested.get("selector_top_k")), drafter.top("vocab_size")
    if width and vocab and not 2 <= width <= vocab:
        yield f"selector_top_k={width}, vocab_size={vocab}"


@check(
    "selector-lattice",
    group="config",
    severity=WARNING,
    rule="llama.cpp needs hidden_size >= C * (C + 1), C = selector_top_k",
    servers=(LLAMA_CPP,),
    next_step="Do not convert it to GGUF, or train with fewer candidates",
)
def _selector_lattice(drafter: OpenedDrafter) -> Iterator[str]:
    hidden, width = drafter.top("hidden_size"), whole(drafter.nested.get("selector_top_k"))
    if hidden and width and hidden < width * (width + 1):
        yield f"hidden_size={hidden} is below {width * (width + 1)}, so llama.cpp refuses to load it"


@check(
    "norm-eps",
    group="config",
    rule="rms_norm_eps is stated and small",
    servers=READERS,
    next_step="Write the value of training; a missing one reads as 1e-6",
)
def _norm_eps(drafter: OpenedDrafter) -> Iterator[str]:
    eps = number(drafter.config.get("rms_norm_eps"))
    if eps is None or not 0 < eps < 1e-2:
        yield f"rms_norm_eps={drafter.config.get('rms_norm_eps')!r}"


@check(
    "output-scale",
    group="config",
    rule="output_multiplier is above 0, final_logit_softcapping at least 0 (0 is off)",
    servers=SERVERS,
    next_step="Write the target's own value, or leave the key out for none",
)
def _output_scale(drafter: OpenedDrafter) -> Iterator[str]:
    scale = drafter.nested.get("output_multiplier", 1.0)
    if (number(scale) or 0) <= 0:
        yield f"output_multiplier={scale!r}: vLLM loads it and fails at the first draft"
    cap = drafter.nested.get("final_logit_softcapping")
    if cap is not None and (number(cap) is None or cap < 0):
        yield f"final_logit_softcapping={cap!r}"


@check(
    "same-size-keys",
    group="config",
    rule="target_hidden_size equals hidden_size, draft_vocab_size equals vocab_size",
    servers=READERS,
    next_step="Leave the key out; readers other than vLLM take the first, and vLLM expects a d2t tensor else",
)
def _same_size(drafter: OpenedDrafter) -> Iterator[str]:
    for key, other in (("target_hidden_size", "hidden_size"), ("draft_vocab_size", "vocab_size")):
        value = drafter.config.get(key)
        if value is not None and value != drafter.config.get(other):
            yield f"{key}={value!r}, {other}={drafter.config.get(other)!r}"


@check(
    "block-size",
    group="config",
    rule="a block is the anchor and at least one drafted token",
    servers=READERS,
    next_step="Write the block size of training, the anchor counted",
)
def _block_size(drafter: OpenedDrafter) -> Iterator[str]:
    if drafter.block_size == 1:
        yield "block_size=1 drafts nothing"


@check(
    "is-causal",
    group="config",
    rule="is_causal is stated and false: blocks are bidirectional inside",
    servers=(VLLM, SGLANG, REFERENCE),
    next_step="Write false. Absent, it makes sliding layers causal in vLLM, SGLang and the reference",
)
def _is_causal(drafter: OpenedDrafter) -> Iterator[str]:
    value = drafter.config.get("is_causal")
    if value is None and drafter.has_sliding_layers:
        yield "is_causal is absent while layers slide"
    elif value is not None and value is not False:
        yield f"is_causal={value!r}: all readers but llama.cpp draft causally then"


@check(
    "is-causal-absent",
    group="config",
    severity=WARNING,
    rule="is_causal is stated",
    servers=(RUNNER,),
    next_step="Write false. Full-attention layers are bidirectional without it today, by each reader's own default",
)
def _is_causal_absent(drafter: OpenedDrafter) -> Iterator[str]:
    if drafter.config.get("is_causal") is None and not drafter.has_sliding_layers:
        yield "is_causal is absent"


@check(
    "layer-types",
    group="config",
    rule="layer_types has one known entry a layer",
    servers=READERS,
    next_step=f"Write one of {', '.join(LAYER_TYPES)} for each layer",
)
def _layer_types(drafter: OpenedDrafter) -> Iterator[str]:
    kinds, layers = drafter.layer_types, drafter.top("num_hidden_layers")
    if kinds is None:
        yield f"layer_types={drafter.config.get('layer_types')!r}: readers derive it, each in its own way"
        return
    if layers is not None and len(kinds) != layers:
        yield f"layer_types has {len(kinds)} entries, num_hidden_layers={layers}"
    yield from (f"layer_types holds {kind!r}" for kind in sorted({str(kind) for kind in kinds} - set(LAYER_TYPES)))


@check(
    "use-sliding-window",
    group="config",
    rule="use_sliding_window is true where layers slide",
    servers=READERS,
    next_step="Write true. Without it vLLM and SGLang refuse, and the GGUF converter writes full attention silently",
)
def _use_sliding(drafter: OpenedDrafter) -> Iterator[str]:
    if drafter.has_sliding_layers and drafter.config.get("use_sliding_window") is not True:
        yield f"use_sliding_window={drafter.config.get('use_sliding_window')!r} while layers slide"


@check(
    "sliding-window",
    group="config",
    rule="sliding layers have a window of at least one block",
    servers=READERS,
    next_step="Write the window of training, the current token counted",
)
def _window(drafter: OpenedDrafter) -> Iterator[str]:
    window, width = drafter.config.get("sliding_window"), drafter.block_size or 1
    if drafter.has_sliding_layers and (whole(window) or 0) < width:
        yield f"sliding_window={window!r} for blocks of {width}"


@check(
    "window-unused",
    group="config",
    severity=WARNING,
    rule="nothing speaks of a window where no layer slides",
    servers=(LLAMA_CPP, RUNNER),
    next_step="Write use_sliding_window false and leave sliding_window out, or correct layer_types",
)
def _window_unused(drafter: OpenedDrafter) -> Iterator[str]:
    if drafter.layer_types is None or drafter.has_sliding_layers:
        return
    if drafter.config.get("use_sliding_window") is True:
        yield "use_sliding_window=True, but no layer slides"
    if drafter.config.get("sliding_window") is not None and drafter.config.get("use_sliding_window") is not False:
        yield f"sliding_window={drafter.config['sliding_window']!r}, but no layer slides"


@check(
    "rope-theta",
    group="config",
    rule="rope_parameters holds rope_theta",
    servers=READERS,
    next_step="Write the base of training in rope_parameters; a missing one reads as 10000",
)
def _rope_theta(drafter: OpenedDrafter) -> Iterator[str]:
    parameters, legacy = drafter.config.get("rope_parameters"), drafter.config.get("rope_theta")
    theta = parameters.get("rope_theta") if isinstance(parameters, Mapping) else None
    if (number(theta) or 0) <= 0:
        yield f"rope_parameters={parameters!r} has no rope_theta above 0"
    elif legacy is not None and legacy != theta:
        yield f"rope_theta is {legacy!r} at the top level and {theta!r} in rope_parameters"


@check(
    "rope-scaling",
    group="config",
    rule="positions are rotated plainly: rope_type default, all channels",
    servers=(SGLANG, LLAMA_CPP, RUNNER),
    next_step="Raise max_position_embeddings instead; readers scale differently, and a GGUF rotates every channel",
)
def _rope_scaling(drafter: OpenedDrafter) -> Iterator[str]:
    parameters = drafter.config.get("rope_parameters")
    parameters = parameters if isinstance(parameters, Mapping) else {}
    if parameters.get("rope_type", "default") != "default":
        yield f"rope_parameters.rope_type={parameters['rope_type']!r}"
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        yield f"rope_parameters.partial_rotary_factor={parameters['partial_rotary_factor']!r}"
    if drafter.config.get("rope_scaling") is not None:
        yield f"rope_scaling={drafter.config['rope_scaling']!r}"


@check(
    "taps",
    group="config",
    rule="target_layer_ids is a filled list of layer numbers",
    servers=READERS,
    next_step="Write the 0-based target layers that the drafter was trained on; each reader guesses others",
)
def _taps(drafter: OpenedDrafter) -> Iterator[str]:
    if drafter.taps is None:
        yield f"target_layer_ids={drafter.either('target_layer_ids')!r}"


@check(
    "taps-order",
    group="config",
    rule="target_layer_ids is ascending",
    servers=(VLLM, SGLANG),
    next_step="Sort the list, and fc's columns with it; vLLM and SGLang capture in layer order and permute silently",
)
def _taps_order(drafter: OpenedDrafter) -> Iterator[str]:
    if drafter.taps and drafter.taps != sorted(drafter.taps):
        yield f"target_layer_ids={drafter.taps}"


@check(
    "taps-unique",
    group="config",
    rule="target_layer_ids names no layer twice",
    servers=(VLLM, SGLANG),
    next_step="Remove the repeat, and its columns of fc; vLLM removes it silently and then lacks features",
)
def _taps_unique(drafter: OpenedDrafter) -> Iterator[str]:
    if drafter.taps and len(set(drafter.taps)) != len(drafter.taps):
        yield f"target_layer_ids={drafter.taps}"


@check(
    "taps-range",
    group="config",
    rule="target_layer_ids are 0-based layers of the target, below num_target_layers",
    servers=READERS,
    next_step="State 0-based layers: servers add the 1; vLLM fails at the first draft only",
)
def _taps_range(drafter: OpenedDrafter) -> Iterator[str]:
    layers = whole(drafter.either("num_target_layers"))
    outside = [tap for tap in drafter.taps or [] if tap < 0 or (layers and tap >= layers)]
    if outside:
        yield f"target_layer_ids has {outside}, num_target_layers={layers}"


@check(
    "taps-shifted",
    group="config",
    severity=WARNING,
    rule="target_layer_ids are the layers themselves, without the 1 that servers add",
    servers=READERS,
    next_step="Subtract 1 from each if the list was copied from a server's log or a GGUF",
)
def _taps_shifted(drafter: OpenedDrafter) -> Iterator[str]:
    layers = whole(drafter.either("num_target_layers"))
    for published_layers, published in PUBLISHED_TAPS:
        if layers == published_layers and drafter.taps == [tap + 1 for tap in published]:
            yield f"target_layer_ids={drafter.taps} is the list of a published drafter, {list(published)}, plus 1"


@check(
    "mask-id",
    group="config",
    rule="mask_token_id is a row of the target's embedding",
    servers=READERS,
    next_step="State the row of training; vLLM loads one beyond the table without a word",
)
def _mask_id(drafter: OpenedDrafter) -> Iterator[str]:
    token, vocab = drafter.mask_token_id, drafter.top("vocab_size")
    if token is not None and vocab and not 0 <= token < vocab:
        yield f"mask_token_id={token}, vocab_size={vocab}"


@check(
    "mask-id-special",
    group="config",
    rule="the mask token does not occur in text",
    servers=READERS,
    next_step="Train with a reserved token: wherever this one stands, the mask vector would take its place",
)
def _mask_id_special(drafter: OpenedDrafter) -> Iterator[str]:
    token = drafter.mask_token_id
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        stored = drafter.config.get(key)
        if token is not None and token in (stored if isinstance(stored, list) else [stored]):
            yield f"mask_token_id={token} is also {key}"
