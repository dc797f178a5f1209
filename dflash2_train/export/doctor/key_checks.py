"""``config.json``: which kind of drafter it is, where keys stand, and keys that one reader alone honours."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dflash2_train.export.doctor.findings import (
    ERROR,
    LLAMA_CPP,
    READERS,
    REFERENCE,
    RUNNER,
    SERVERS,
    SGLANG,
    VLLM,
    WARNING,
)
from dflash2_train.export.doctor.known_keys import NESTED, NESTED_ONLY, TOP
from dflash2_train.export.doctor.opened import DRAFTER_CHECKS, OpenedDrafter, whole
from dflash2_train.export.published import FIRST_ARCHITECTURE, SECOND_KEYS
from dflash2_train.model.drafter_config import ARCHITECTURE, MODEL_TYPE

check = DRAFTER_CHECKS.check
TOP_WHOLE = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)


@check(
    "speculators-format",
    group="kind",
    rule="the published layout nests everything of DFlash in dflash_config",
    servers=(SGLANG, LLAMA_CPP, REFERENCE, RUNNER),
    next_step="dflash2-export convert makes a drafter of it that all read; only vLLM reads this package's flat layout",
)
def _speculators(drafter: OpenedDrafter) -> Iterator[str]:
    kind = drafter.config.get("speculators_model_type")
    if kind is not None:
        yield f"speculators_model_type={kind!r}: a checkpoint in the layout of the speculators package"


@check(
    "not-a-drafter",
    group="kind",
    rule=f"a drafter names {ARCHITECTURE} or {FIRST_ARCHITECTURE}, or has a dflash_config",
    servers=READERS,
    next_step="Name the folder of a drafter; that of its target goes to --target",
)
def _not_a_drafter(drafter: OpenedDrafter) -> Iterator[str]:
    named = any("dflash" in str(name).lower() for name in drafter.architectures)
    if not named and "dflash_config" not in drafter.config and "speculators_model_type" not in drafter.config:
        yield f"architectures={drafter.config.get('architectures')!r} and no dflash_config: this is no DFlash drafter"


@check(
    "dflash-config",
    group="kind",
    rule="dflash_config is an object",
    servers=READERS,
    next_step="Write block_size, mask_token_id, target_layer_ids and the sizes of conv and selector into it",
)
def _dflash_config(drafter: OpenedDrafter) -> Iterator[str]:
    foreign = "speculators_model_type" in drafter.config or any(_not_a_drafter(drafter))
    if not foreign and not isinstance(drafter.config.get("dflash_config"), dict):
        yield f"dflash_config={drafter.config.get('dflash_config')!r}"


@check(
    "architecture",
    group="config",
    rule=f"architectures is ['{ARCHITECTURE}'] alone, ['{FIRST_ARCHITECTURE}'] for a drafter without conv and selector",
    servers=READERS,
    next_step="Write exactly that name: servers choose the model class by it",
)
def _architecture(drafter: OpenedDrafter) -> Iterator[str]:
    wanted = ARCHITECTURE if drafter.is_second else FIRST_ARCHITECTURE
    if drafter.config.get("architectures") != [wanted]:
        yield f"architectures={drafter.config.get('architectures')!r}, must be ['{wanted}']"


@check(
    "model-type",
    group="config",
    rule=f"model_type is {MODEL_TYPE}, the transformers class whose fields the file follows",
    servers=(VLLM, SGLANG, REFERENCE, RUNNER),
    next_step=f"Write {MODEL_TYPE}; transformers knows no model of another name with these fields",
)
def _model_type(drafter: OpenedDrafter) -> Iterator[str]:
    if drafter.config.get("model_type") != MODEL_TYPE:
        yield f"model_type={drafter.config.get('model_type')!r}"


@check(
    "required-keys",
    group="config",
    rule="sizes are stated as whole numbers; readers disagree about defaults",
    servers=READERS,
    next_step="Write the value that the drafter was trained with",
)
def _required(drafter: OpenedDrafter) -> Iterator[str]:
    for key in TOP_WHOLE:
        if (drafter.top(key) or 0) <= 0:
            yield f"{key}={drafter.config.get(key)!r} is missing or no whole number above 0"
    for key in ("block_size", "num_target_layers"):
        if (whole(drafter.either(key)) or 0) <= 0:
            yield f"{key}={drafter.either(key)!r} is missing or no whole number above 0"
    if drafter.mask_token_id is None:
        yield f"mask_token_id={drafter.either('mask_token_id')!r} is missing or no whole number"
    if drafter.is_second:
        for key in SECOND_KEYS:
            if (whole(drafter.nested.get(key)) or 0) <= 0 and key not in drafter.config:
                yield f"dflash_config.{key}={drafter.nested.get(key)!r} is missing or no whole number above 0"


@check(
    "nesting",
    group="config",
    rule="conv, selector and scale keys stand in dflash_config, all of the transformers class at the top level",
    servers=(VLLM, SGLANG),
    next_step="Move the key; where it stands, some readers use their default without a word",
)
def _nesting(drafter: OpenedDrafter) -> Iterator[str]:
    for key in NESTED_ONLY:
        if key in drafter.config:
            yield f"{key} stands at the top level, where vLLM and SGLang do not look"
    for key in sorted(drafter.nested.keys() & TOP - NESTED):
        yield f"{key} stands in dflash_config, where no reader looks"


@check(
    "two-values",
    group="config",
    rule="a key at both levels has one value",
    servers=(VLLM, SGLANG, LLAMA_CPP, RUNNER),
    next_step="Make them equal: some readers take the one, some the other",
)
def _two_values(drafter: OpenedDrafter) -> Iterator[str]:
    for key in ("block_size", "mask_token_id", "target_layer_ids", "num_target_layers"):
        outer, inner = drafter.config.get(key), drafter.nested.get(key)
        if outer is not None and inner is not None and outer != inner:
            yield f"{key} is {outer!r} at the top level and {inner!r} in dflash_config"


@check(
    "block-size-top",
    group="config",
    severity=WARNING,
    rule="block_size stands at both levels",
    servers=(LLAMA_CPP,),
    next_step="Repeat it at the top level: older GGUF converters look there alone and take 16 else",
)
def _block_size_top(drafter: OpenedDrafter) -> Iterator[str]:
    if "block_size" not in drafter.config and drafter.block_size is not None:
        yield f"block_size={drafter.block_size} stands in dflash_config alone"


@check(
    "not-nested",
    group="config",
    severity=WARNING,
    rule="mask_token_id and target_layer_ids stand in dflash_config",
    servers=(SGLANG, LLAMA_CPP),
    next_step="Repeat the key in dflash_config",
)
def _not_nested(drafter: OpenedDrafter) -> Iterator[str]:
    for key in ("mask_token_id", "target_layer_ids"):
        if key in drafter.config and key not in drafter.nested:
            yield f"{key} stands at the top level alone"


@check(
    "unknown-key",
    group="config",
    severity=WARNING,
    rule="every key is one that some reader knows",
    servers=(),
    next_step="Correct or remove it: nobody reads it, so what it was meant to say is not so",
)
def _unknown_key(drafter: OpenedDrafter) -> Iterator[str]:
    for prefix, section, known in (("", drafter.config, TOP), ("dflash_config.", drafter.nested, NESTED | TOP)):
        for key in sorted(section.keys() - known):
            similar = difflib.get_close_matches(key, known, n=1, cutoff=0.75)
            yield f"{prefix}{key} is unknown" + (f"; was {similar[0]} meant?" if similar else "")


@check(
    "remote-code",
    group="config",
    severity=WARNING,
    rule="a drafter is data: no code comes with it",
    servers=(REFERENCE,),
    next_step="Remove auto_map; servers build the drafter from their own classes",
)
def _remote_code(drafter: OpenedDrafter) -> Iterator[str]:
    if drafter.config.get("auto_map"):
        yield f"auto_map={drafter.config['auto_map']!r} asks transformers to run code of the repository"


@check(
    "tie-word-embeddings",
    group="config",
    severity=WARNING,
    rule="tie_word_embeddings is false: there is no embedding to tie",
    servers=(REFERENCE,),
    next_step="Write false",
)
def _tie(drafter: OpenedDrafter) -> Iterator[str]:
    if drafter.config.get("tie_word_embeddings") is not False:
        yield f"tie_word_embeddings={drafter.config.get('tie_word_embeddings')!r}"


@dataclass(frozen=True, kw_only=True)
class PartialKey:
    """A key that changes the drafts for the readers that know it, and for no other."""

    id: str
    key: str
    neutral: tuple[object, ...]  # values that change nothing, beside absence
    servers: tuple[str, ...]  # whose drafts differ from what the drafter was trained for, or that refuse
    effect: str
    severity: str = ERROR
    rule: str = "no key asks for what a part of the readers computes and the others do not"


PARTIAL_KEYS = (
    PartialKey(
        id="aux-layer-ids",
        key="eagle_aux_hidden_state_layer_ids",
        neutral=(None,),
        servers=(VLLM,),
        effect="vLLM takes these layers in the place of target_layer_ids, and without adding 1",
    ),
    PartialKey(
        id="layer-ids",
        key="layer_ids",
        neutral=(None,),
        servers=(VLLM,),
        effect="vLLM takes these layers, without adding 1, where it finds no others",
    ),
    PartialKey(
        id="use-swa",
        key="use_swa",
        neutral=(None, False),
        servers=SERVERS,
        effect="vLLM makes every layer slide, the others none",
    ),
    PartialKey(
        id="swa-window",
        key="swa_window_size",
        neutral=(None,),
        servers=SERVERS,
        effect="vLLM takes this window in the place of sliding_window, the others do not",
    ),
    PartialKey(
        id="attention-sinks",
        key="attention_sink_bias",
        neutral=(None, False),
        servers=READERS,
        effect="vLLM adds sink weights that no tensor fills",
    ),
    PartialKey(
        id="value-scale",
        key="attention_value_scale",
        neutral=(None, 1, 1.0),
        servers=READERS,
        effect="vLLM scales attention values, llama.cpp and the reference do not",
    ),
    PartialKey(
        id="nested-causal",
        key="causal",
        neutral=(None, False),
        servers=(VLLM,),
        effect="vLLM makes the block causal where is_causal is absent, the others do not look",
    ),
    PartialKey(
        id="sample-from-anchor",
        key="sample_from_anchor",
        neutral=(None, False),
        servers=(VLLM, RUNNER),
        effect="vLLM refuses it at start; it belongs to another kind of drafter",
    ),
    PartialKey(
        id="no-taps",
        key="use_aux_hidden_state",
        neutral=(None, True),
        servers=(VLLM,),
        effect="vLLM drops fc and with it all of the target's states",
    ),
    PartialKey(
        id="selector-scale",
        key="selector_scale",
        neutral=(None, 1, 1.0),
        servers=READERS,
        effect="no server scales selector scores: fold the factor into a codebook",
    ),
    PartialKey(
        id="embedding-scale",
        key="input_embedding_scale",
        neutral=(None, 1, 1.0),
        servers=(SGLANG, LLAMA_CPP, RUNNER),
        effect="vLLM and the reference scale the block's embeddings, SGLang and llama.cpp do not",
    ),
    PartialKey(
        id="rope-layout",
        key="is_neox_style",
        neutral=(None, True),
        servers=READERS,
        effect="vLLM and SGLang rotate pairs of neighbours then, llama.cpp and the reference halves",
    ),
    PartialKey(
        id="rope-layout-sglang",
        key="rope_is_neox_style",
        neutral=(None, True),
        servers=READERS,
        effect="SGLang and the GGUF converter rotate pairs of neighbours then, vLLM and the reference halves",
    ),
    PartialKey(
        id="own-head-flag",
        key="has_own_lm_head",
        neutral=(None, False),
        servers=(VLLM,),
        effect="vLLM keeps a head of the drafter's own, the others take the target's",
        severity=WARNING,
    ),
    PartialKey(
        id="own-embedding-flag",
        key="has_embed_tokens",
        neutral=(None, True),
        servers=(LLAMA_CPP,),
        effect="the GGUF converter drops the drafter's own embedding",
        severity=WARNING,
    ),
    PartialKey(
        id="attention-bias",
        key="attention_bias",
        neutral=(None, False),
        servers=READERS,
        effect="vLLM adds biases that no tensor fills, SGLang and llama.cpp expect tensors",
        rule="the published layout has no biases",
    ),
    PartialKey(
        id="activation",
        key="hidden_act",
        neutral=(None, "silu"),
        servers=READERS,
        effect="SGLang refuses it, llama.cpp computes silu all the same",
        rule="the activation is silu",
    ),
    PartialKey(
        id="quantised",
        key="quantization_config",
        neutral=(None,),
        servers=(SGLANG, LLAMA_CPP, REFERENCE, RUNNER),
        effect="readers quantise different parts of a drafter, most none",
        rule="a published drafter is not quantised",
    ),
)


def _partial(row: PartialKey) -> None:
    @check(
        row.id,
        group="config",
        severity=row.severity,
        rule=row.rule,
        servers=row.servers,
        next_step=f"Leave {row.key} out",
    )
    def breaches(drafter: OpenedDrafter) -> Iterator[str]:
        places: tuple[tuple[str, dict[str, Any]], ...] = (("", drafter.config), ("dflash_config.", drafter.nested))
        for prefix, section in places:
            value = section.get(row.key)
            if not prefix and row.key in NESTED_ONLY:
                continue  # where it stands is what is wrong then
            if not any(
                value is neutral or (value == neutral and type(value) is type(neutral)) for neutral in row.neutral
            ):
                yield f"{prefix}{row.key}={value!r}: {row.effect}"


for _row in PARTIAL_KEYS:
    _partial(_row)
