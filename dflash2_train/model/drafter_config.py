"""The shape of a drafter and its two-way mapping to the published ``config.json``.

Three servers and the reference implementation read that file, each with its own defaults for what is absent, and
most mistakes draft badly without an error: an absent ``is_causal`` makes sliding layers causal, an absent
``use_sliding_window`` drops the window, unsorted taps are permuted. So :meth:`DrafterShape.to_published` writes every
key that any of them reads, with one value that means the same to all, and :meth:`DrafterShape.from_published`
refuses a file whose meaning would depend on the reader.

This module is free of torch: exporters and planners read shapes without loading it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash2_train.config import DTYPES, LAYER_TYPES, RunConfig
from dflash2_train.config.drafter import SIZES
from dflash2_train.taps import check_taps

ARCHITECTURE = "DFlash2DraftModel"
MODEL_TYPE = "qwen3"  # the transformers class whose fields the published file follows
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"  # tables that a drafter may bring along, [V, H] each

# Keys that change what some server computes and that this drafter does not implement: value that means "off".
_REFUSED_TOP_LEVEL: dict[str, object] = {
    "attention_bias": False,
    "hidden_act": "silu",
    "is_neox_style": True,
    "rope_is_neox_style": True,
    "rope_scaling": None,
    "eagle_aux_hidden_state_layer_ids": None,
    "quantization_config": None,
}
_REFUSED_NESTED: dict[str, object] = {
    "input_embedding_scale": 1.0,
    "sample_from_anchor": False,
    "use_swa": False,
    "swa_window_size": None,
    "attention_sink_bias": False,
    "attention_value_scale": None,
    "causal": False,
}


@dataclass(frozen=True, kw_only=True)
class DrafterShape:
    """Every number that the drafter's modules need. Published field names win where there is one.

    Raises:
        ValueError: on construction, for the first broken rule; the text names field, value and rule.
    """

    hidden_size: int  # H, the target's
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int  # V, rows of the target's embedding
    target_layer_ids: tuple[int, ...]  # taps: 0-based, ascending, unique
    num_target_layers: int
    block_size: int  # W: the anchor and K = W - 1 drafted tokens
    mask_token_id: int
    layer_types: tuple[str, ...]
    sliding_window: int | None  # of sliding layers, the current token counted
    conv_kernel_size: int
    conv_group_size: int
    selector_rank: int  # R
    selector_top_k: int  # C
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        for key in _POSITIVE:
            self._rule(getattr(self, key) > 0, key, "must be positive")
        check_taps(self.target_layer_ids, self.num_target_layers)
        heads, vocab, hidden, layers = self.num_kv_heads, self.vocab_size, self.hidden_size, self.num_layers
        self._rule(self.num_heads % heads == 0, "num_heads", f"must be a multiple of num_kv_heads={heads}")
        self._rule(self.head_dim % 2 == 0, "head_dim", "rotary embedding needs an even size")
        self._rule(self.block_size >= 2, "block_size", "needs the anchor and one drafted token")
        self._rule(0 <= self.mask_token_id < vocab, "mask_token_id", f"must lie below vocab_size={vocab}")
        self._rule(hidden % self.conv_group_size == 0, "conv_group_size", f"must divide hidden_size={hidden}")
        self._rule(2 <= self.selector_top_k <= vocab, "selector_top_k", f"must lie between 2 and vocab_size={vocab}")
        self._rule(len(self.layer_types) == layers, "layer_types", f"needs {layers} entries, one a layer")
        self._rule(set(self.layer_types) <= set(LAYER_TYPES), "layer_types", f"entries must be among {LAYER_TYPES}")
        window, width = self.sliding_window, self.block_size
        if self.has_sliding_layers:
            wide = window is not None and window >= width
            self._rule(wide, "sliding_window", f"sliding layers need at least block_size={width}")
        else:
            self._rule(window is None, "sliding_window", "is set but no layer is sliding_attention")

    def _rule(self, holds: bool, key: str, rule: str) -> None:
        _require(holds, key, getattr(self, key), rule)

    @property
    def num_taps(self) -> int:
        """T: target layers whose states condition the drafter."""
        return len(self.target_layer_ids)

    @property
    def num_drafted(self) -> int:
        """K: tokens proposed a block."""
        return self.block_size - 1

    @property
    def num_conv_groups(self) -> int:
        """Channel groups that share a dynamic kernel weight."""
        return self.hidden_size // self.conv_group_size

    @property
    def has_sliding_layers(self) -> bool:
        """Whether any layer is ``sliding_attention``."""
        return "sliding_attention" in self.layer_types

    @classmethod
    def from_config(cls, config: RunConfig) -> DrafterShape:
        """The shape that an experiment describes; its target gives H, V and the number of layers."""
        drafter, target = config.drafter, config.target
        return cls(
            hidden_size=target.hidden_size,
            num_layers=drafter.num_layers,
            num_heads=drafter.num_heads,
            num_kv_heads=drafter.num_kv_heads,
            head_dim=drafter.head_dim,
            intermediate_size=drafter.intermediate_size,
            vocab_size=target.vocab_size,
            target_layer_ids=tuple(drafter.target_layer_ids),
            num_target_layers=target.num_layers,
            block_size=drafter.block_size,
            mask_token_id=drafter.mask_token_id,
            layer_types=tuple(drafter.resolved_layer_types()),
            sliding_window=drafter.sliding_window,
            conv_kernel_size=drafter.conv_kernel_size,
            conv_group_size=drafter.conv_group_size,
            selector_rank=drafter.selector_rank,
            selector_top_k=drafter.selector_top_k,
            rms_norm_eps=drafter.rms_norm_eps,
            rope_theta=drafter.rope_theta,
            max_position_embeddings=drafter.max_position_embeddings,
            output_multiplier=drafter.output_multiplier,
            final_logit_softcapping=drafter.final_logit_softcapping,
            initializer_range=drafter.initializer_range,
        )

    def to_published(
        self,
        dtype: str,
        *,
        bos_token_id: int | None,
        eos_token_id: int | list[int] | None,
        pad_token_id: int | None,
    ) -> dict[str, Any]:
        """The ``config.json`` that vLLM, SGLang, the llama.cpp converter and the reference read alike.

        Args:
            dtype: of the exported weights, ``bfloat16`` or ``float32``.
            bos_token_id: copied from the target, as are the next two; none has an effect on drafting.
            eos_token_id: one id or several.
            pad_token_id: None if the target has none.

        Raises:
            ValueError: an unknown dtype.
        """
        _require(dtype in DTYPES, "dtype", dtype, f"must be one of {DTYPES}")
        published: dict[str, Any] = {
            "architectures": [ARCHITECTURE],
            "model_type": MODEL_TYPE,
            "dtype": dtype,
            "is_causal": False,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "rms_norm_eps": self.rms_norm_eps,
            "initializer_range": self.initializer_range,
            "layer_types": list(self.layer_types),
            "max_window_layers": self.num_layers,
            "use_sliding_window": self.has_sliding_layers,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "rope_theta": self.rope_theta,
            "max_position_embeddings": self.max_position_embeddings,
            "vocab_size": self.vocab_size,
            "tie_word_embeddings": False,
            "use_cache": False,
            "bos_token_id": bos_token_id,
            "eos_token_id": eos_token_id,
            "pad_token_id": pad_token_id,
            "num_target_layers": self.num_target_layers,
            "block_size": self.block_size,
            "dflash_config": self._nested(),
        }
        if self.has_sliding_layers:
            published["sliding_window"] = self.sliding_window
        return published

    def _nested(self) -> dict[str, Any]:
        nested: dict[str, Any] = {
            "block_size": self.block_size,
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": list(self.target_layer_ids),
            "conv_kernel_size": self.conv_kernel_size,
            "conv_group_size": self.conv_group_size,
            "selector_rank": self.selector_rank,
            "selector_top_k": self.selector_top_k,
        }
        if self.output_multiplier != 1.0:
            nested["output_multiplier"] = self.output_multiplier
        if self.final_logit_softcapping is not None:
            nested["final_logit_softcapping"] = self.final_logit_softcapping
        return nested

    @classmethod
    def from_published(cls, published: Mapping[str, Any]) -> DrafterShape:
        """The shape in a published ``config.json``.

        Optional keys and what their absence means: ``output_multiplier`` 1, ``final_logit_softcapping`` off (as is
        0), ``initializer_range`` 0.02. All else is required.

        Raises:
            ValueError: a key is missing, contradicts another, or asks for something that this drafter does not
                compute; the text names the key.
        """
        nested = _published_nested(published)
        _check_fixed_meaning(published, nested)
        num_layers = _required(published, "num_hidden_layers")
        layer_types = tuple(_required(published, "layer_types"))
        softcap = nested.get("final_logit_softcapping")
        return cls(
            hidden_size=_required(published, "hidden_size"),
            num_layers=num_layers,
            num_heads=_required(published, "num_attention_heads"),
            num_kv_heads=_required(published, "num_key_value_heads"),
            head_dim=_required(published, "head_dim"),
            intermediate_size=_required(published, "intermediate_size"),
            vocab_size=_required(published, "vocab_size"),
            target_layer_ids=tuple(_either(published, nested, "target_layer_ids")),
            num_target_layers=_either(published, nested, "num_target_layers"),
            block_size=_either(published, nested, "block_size"),
            mask_token_id=_either(published, nested, "mask_token_id"),
            layer_types=layer_types,
            sliding_window=_published_window(published, layer_types),
            conv_kernel_size=_required(nested, "conv_kernel_size", "dflash_config."),
            conv_group_size=_required(nested, "conv_group_size", "dflash_config."),
            selector_rank=_required(nested, "selector_rank", "dflash_config."),
            selector_top_k=_required(nested, "selector_top_k", "dflash_config."),
            rms_norm_eps=_required(published, "rms_norm_eps"),
            rope_theta=_published_rope_theta(published),
            max_position_embeddings=_required(published, "max_position_embeddings"),
            output_multiplier=nested.get("output_multiplier", 1.0),
            final_logit_softcapping=softcap if softcap else None,
            initializer_range=published.get("initializer_range", 0.02),
        )


_POSITIVE = ("hidden_size", "vocab_size", "num_target_layers", *SIZES)


def _require(condition: bool, key: str, value: object, rule: str) -> None:
    if not condition:
        raise ValueError(f"{key}={value!r}: {rule}.")


def _required(section: Mapping[str, Any], key: str, prefix: str = "") -> Any:
    """``section[key]``, or an error that names the key; a null counts as missing."""
    if section.get(key) is None:
        raise ValueError(
            f"{prefix}{key} is missing from the published config.json. Write it; readers disagree about defaults."
        )
    return section[key]


def _either(published: Mapping[str, Any], nested: Mapping[str, Any], key: str) -> Any:
    """A key that readers take from ``dflash_config`` or from the top level: one is enough, two must agree."""
    inner, outer = nested.get(key), published.get(key)
    if inner is not None and outer is not None and inner != outer:
        raise ValueError(
            f"{key} is {outer!r} at the top level and {inner!r} in dflash_config. Make them equal; servers read either."
        )
    value = outer if inner is None else inner
    if value is None:
        raise ValueError(
            f"{key} is missing from the published config.json, in dflash_config as well as at the top level."
        )
    return value


def _published_nested(published: Mapping[str, Any]) -> Mapping[str, Any]:
    nested = _required(published, "dflash_config")
    if not isinstance(nested, Mapping):
        raise ValueError(f"dflash_config={nested!r}: must be an object.")
    return nested


def _check_fixed_meaning(published: Mapping[str, Any], nested: Mapping[str, Any]) -> None:
    """Refuse a file that asks for anything but the one forward pass implemented here."""
    architectures = _required(published, "architectures")
    _require(ARCHITECTURE in architectures, "architectures", architectures, f"must contain {ARCHITECTURE}")
    _require(
        _required(published, "model_type") == MODEL_TYPE, "model_type", published["model_type"], f"must be {MODEL_TYPE}"
    )
    causal = _required(published, "is_causal")
    _require(causal is False, "is_causal", causal, "must be false: blocks are bidirectional inside")
    for section, refused, prefix in ((published, _REFUSED_TOP_LEVEL, ""), (nested, _REFUSED_NESTED, "dflash_config.")):
        for key, off in refused.items():
            value = section.get(key)
            _require(value is None or value == off, f"{prefix}{key}", value, f"is not supported, only {off!r}")
    for key, must_equal in (("target_hidden_size", "hidden_size"), ("draft_vocab_size", "vocab_size")):
        value = published.get(key)
        _require(value is None or value == published.get(must_equal), key, value, f"must equal {must_equal}")


def _published_window(published: Mapping[str, Any], layer_types: tuple[str, ...]) -> int | None:
    """The window of sliding layers. ``use_sliding_window`` must say true exactly when there is such a layer."""
    use = _required(published, "use_sliding_window")
    sliding = "sliding_attention" in layer_types
    _require(
        use is sliding, "use_sliding_window", use, f"must be {str(sliding).lower()} for layer_types={list(layer_types)}"
    )
    return int(_required(published, "sliding_window")) if sliding else None


def _published_rope_theta(published: Mapping[str, Any]) -> float:
    """The rotary base, from ``rope_parameters`` or the legacy top-level key; both must agree."""
    parameters = published.get("rope_parameters")
    parameters = {} if parameters is None else parameters
    if not isinstance(parameters, Mapping):
        raise ValueError(f"rope_parameters={parameters!r}: must be an object.")
    kind = parameters.get("rope_type", "default")
    _require(kind == "default", "rope_parameters.rope_type", kind, "only default is supported")
    partial = parameters.get("partial_rotary_factor", 1.0)
    _require(partial == 1.0, "rope_parameters.partial_rotary_factor", partial, "only 1.0 is supported")
    nested, legacy = parameters.get("rope_theta"), published.get("rope_theta")
    if nested is not None and legacy is not None and nested != legacy:
        raise ValueError(
            f"rope_theta is {legacy!r} at the top level and {nested!r} in rope_parameters. Make them equal."
        )
    theta = legacy if nested is None else nested
    if theta is None:
        raise ValueError(
            "rope_theta is missing from rope_parameters and from the top level of the published config.json."
        )
    return float(theta)
