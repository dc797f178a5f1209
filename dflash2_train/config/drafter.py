"""The drafter's shape and the rules that tie it to the target."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

from dflash2_train.config.rules import require
from dflash2_train.config.target import TargetConfig

LAYER_TYPES = ("full_attention", "sliding_attention")
SIZES = (  # positive in an experiment and in a published drafter alike
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "rms_norm_eps",
    "rope_theta",
    "max_position_embeddings",
    "output_multiplier",
)
POSITIVE = (*SIZES, "final_logit_softcapping", "initializer_range")


@dataclass(kw_only=True)
class DrafterConfig:
    """Shape of the DFlash 2 drafter. Published field names (config.json) win where there is one."""

    num_layers: int = MISSING  # drafter layers, L
    num_heads: int = MISSING  # query heads
    num_kv_heads: int = MISSING  # key and value heads
    head_dim: int = MISSING  # features of a head
    intermediate_size: int = MISSING  # inner features of an MLP
    block_size: int = 8  # W: the anchor and K = W - 1 drafted tokens
    target_layer_ids: list[int] = MISSING  # taps: 0-based target layers, ascending and unique
    mask_token_id: int = MISSING  # an existing, never generated row of the target's embedding
    layer_types: list[str] = field(default_factory=list)  # one per layer; empty = all full attention
    sliding_window: int | None = None  # tokens that a sliding layer sees, its own counted
    conv_kernel_size: int = 2  # slots that a convolution sees, its own counted
    conv_group_size: int = 16  # neighbouring features that share a kernel
    selector_rank: int = 256  # R: features of a codebook entry
    selector_top_k: int = 16  # C: candidates a position
    rms_norm_eps: float = 1e-5  # of every norm
    rope_theta: float = 10000.0  # base of the rotary embedding, the drafter's own
    max_position_embeddings: int = MISSING  # at least the target's served context
    output_multiplier: float = 1.0  # factor on the unary logits, as the target has on its own
    final_logit_softcapping: float | None = None  # c of c * tanh(logit / c), as the target has; None = none
    initializer_range: float = 0.02  # standard deviation of random weights

    @property
    def num_drafted(self) -> int:
        """K: tokens proposed a block."""
        return self.block_size - 1

    def resolved_layer_types(self) -> list[str]:
        """``layer_types`` with the default written out."""
        return list(self.layer_types) or ["full_attention"] * self.num_layers

    def check(self, target: TargetConfig) -> None:
        for key in POSITIVE:
            value = getattr(self, key)
            require(
                value is None or value > 0, f"drafter.{key}", value, "must be positive", "Use the experiment's value."
            )
        self._check_taps(target)
        self._check_layers()
        require(
            self.block_size >= 2,
            "drafter.block_size",
            self.block_size,
            "needs the anchor and one drafted token",
            "Use 8.",
        )
        require(
            0 <= self.mask_token_id < target.vocab_size,
            "drafter.mask_token_id",
            self.mask_token_id,
            f"must be an existing row of the target's embedding (0..{target.vocab_size - 1})",
            "Choose a reserved token of the tokenizer that the target never writes.",
        )
        require(
            target.hidden_size % self.conv_group_size == 0,
            "drafter.conv_group_size",
            self.conv_group_size,
            f"must divide the hidden size {target.hidden_size}",
            "Use 16.",
        )
        require(
            2 <= self.selector_top_k <= target.vocab_size,
            "drafter.selector_top_k",
            self.selector_top_k,
            "must lie between 2 and the vocabulary size",
            "Use 16.",
        )

    def _check_taps(self, target: TargetConfig) -> None:
        taps = self.target_layer_ids
        require(
            len(taps) > 0,
            "drafter.target_layer_ids",
            taps,
            "must name at least one tap",
            "Spread taps over the layers.",
        )
        require(
            taps == sorted(set(taps)),
            "drafter.target_layer_ids",
            taps,
            "must be ascending and unique, since vLLM sorts them silently",
            "Sort the list.",
        )
        require(
            0 <= taps[0] and taps[-1] < target.num_layers,
            "drafter.target_layer_ids",
            taps,
            f"ids are 0-based layers of the target, so below {target.num_layers}",
            "Do not add 1; servers do.",
        )

    def _check_layers(self) -> None:
        require(
            self.num_heads % self.num_kv_heads == 0,
            "drafter.num_heads",
            self.num_heads,
            f"must be a multiple of drafter.num_kv_heads={self.num_kv_heads}",
            "Change one of them.",
        )
        require(
            self.head_dim % 2 == 0,
            "drafter.head_dim",
            self.head_dim,
            "rotary embedding needs an even size",
            "Use 64 or 128.",
        )
        kinds = self.resolved_layer_types()
        require(
            len(kinds) == self.num_layers,
            "drafter.layer_types",
            self.layer_types,
            f"needs {self.num_layers} entries, one a layer",
            "Leave it empty for full attention everywhere.",
        )
        for kind in kinds:
            require(kind in LAYER_TYPES, "drafter.layer_types", kind, f"must be one of {LAYER_TYPES}", "Fix the entry.")
        if "sliding_attention" in kinds:
            require(
                self.sliding_window is not None and self.sliding_window >= self.block_size,
                "drafter.sliding_window",
                self.sliding_window,
                f"sliding layers need a window of at least drafter.block_size={self.block_size}",
                "Use 2048.",
            )
        else:
            require(
                self.sliding_window is None,
                "drafter.sliding_window",
                self.sliding_window,
                "is set but no layer is sliding_attention",
                "Set it to null or change drafter.layer_types.",
            )
