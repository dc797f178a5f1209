"""Start a drafter from its target instead of from noise.

A drafter layer has the parts of a Llama or Qwen layer under the same names, so attention, MLP and norms can be copied
from chosen target layers wherever the shapes agree. The final norm feeds the target's own output head and therefore
must come from the target. ``fc`` can start as a weighted sum of the taps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash2_train.config import ConfigError
from dflash2_train.model.drafter import Drafter, DrafterLayer

logger = logging.getLogger(__name__)

LAYER_TENSORS = (
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "self_attn.q_norm.weight",
    "self_attn.k_norm.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
)
_OPTIONAL = {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}  # Llama has none; the drafter's stay at one

SLOWEST_ANGLE = 0.05  # radians a token; slower pairs of a rotation hardly tell neighbours apart
KEPT_NOISE = 0.1  # share of the random start that look_at_recent leaves in place

TargetState = Mapping[str, Tensor] | Callable[[str], Tensor]


@dataclass(frozen=True)
class InitialisationReport:
    """Names of the drafter's tensors that were copied, and of those that kept their random start, with the reason."""

    copied: tuple[str, ...]
    kept: dict[str, str]


@torch.no_grad()
def initialise(
    drafter: Drafter, target_state: TargetState, layer_map: Mapping[int, int], *, prefix: str = "model."
) -> InitialisationReport:
    """Copy layers and the final norm of the target into the drafter.

    Args:
        drafter: changed in place; values are cast to its dtype.
        target_state: the target's tensors by name, or a function that returns one and raises KeyError if there is none.
        layer_map: drafter layer -> target layer, 0-based. Layers that it leaves out keep their start.
        prefix: what stands before ``layers.`` and ``norm.weight`` in the target's names.

    Returns:
        what was copied and what was kept, also logged.

    Raises:
        ValueError: a drafter layer that does not exist, or a final norm of another size; names the tensor.
        KeyError: the target lacks a tensor; names it.
    """
    own = dict(drafter.named_parameters())
    fetch = target_state if callable(target_state) else target_state.__getitem__
    copied: list[str] = []
    kept: dict[str, str] = {}
    for layer, source_layer in sorted(layer_map.items()):
        if not 0 <= layer < drafter.shape.num_layers:
            raise ValueError(f"layer_map key {layer}: the drafter has layers 0..{drafter.shape.num_layers - 1}.")
        for name in LAYER_TENSORS:
            ours = f"layers.{layer}.{name}"
            reason = _copy(own[ours], fetch, f"{prefix}layers.{source_layer}.{name}", optional=name in _OPTIONAL)
            if reason is None:
                copied.append(ours)
            else:
                kept[ours] = reason
    reason = _copy(own["norm.weight"], fetch, f"{prefix}norm.weight", optional=False)
    if reason is not None:
        raise ValueError(f"norm.weight: {reason}. The final norm must be the target's; check target.hidden_size.")
    copied.append("norm.weight")
    logger.info("initialised %d drafter tensors from the target, kept %d", len(copied), len(kept))
    for name, why in kept.items():
        logger.info("kept %s: %s", name, why)
    return InitialisationReport(tuple(copied), kept)


def _copy(parameter: Tensor, fetch: Callable[[str], Tensor], source: str, *, optional: bool) -> str | None:
    """Copy one tensor. Returns None, or why it could not be copied."""
    try:
        value = fetch(source)
    except KeyError as error:
        if optional:
            return f"the target has no {source}"
        raise KeyError(f"the target has no tensor {source}") from error
    if value.shape != parameter.shape:
        return f"target tensor {source} has shape {tuple(value.shape)}, the drafter's {tuple(parameter.shape)}"
    parameter.copy_(value)
    return None


@torch.no_grad()
def fc_from_taps(drafter: Drafter, weights: Sequence[float]) -> None:
    """Set ``fc`` to the weighted sum of the taps: T blocks ``weight * identity`` side by side.

    Raises:
        ValueError: not one weight a tap.
    """
    if len(weights) != drafter.shape.num_taps:
        raise ValueError(f"weights={list(weights)}: needs {drafter.shape.num_taps} entries, one a tap.")
    blocks = drafter.fc.weight.zero_().unflatten(1, (drafter.shape.num_taps, -1))  # [H, T, H]
    for tap, weight in enumerate(weights):
        blocks[:, tap].fill_diagonal_(weight)


@torch.no_grad()
def look_at_recent(drafter: Drafter, context: Tensor, gain: float) -> None:
    """Start layer 0 as a look at the newest context tokens, whose states pass on unchanged.

    What comes next hangs first of all on the target's newest states. From random weights, attention takes most of a
    short run to find them among a hundred equal keys; here it starts there and learns on.

    Residual streams carry a large constant part in a few channels. Keys read it (``context @ u`` is 1 on average) and
    queries read the mask vector, so both start as one constant vector, set in the rotation's quick pairs alone:

        score(distance) = gain * D / n * sum over n pairs f of cos(angle_f * distance)      highest at distance 0

    Values and output are identities over as many channels as the key heads hold. The block's own keys lack the
    constant part (its channels are cut from the input norm) and score near zero. A tenth of the random start stays
    everywhere, so that heads can part.

    Args:
        drafter: changed in place; ``fc`` and ``mask_embedding`` must have their start.
        context: [N, H] encoded states of real text, fp32.
        gain: sharpness; 2 prefers a token to the one before it by about one nat.

    Raises:
        ConfigError: the context has no constant part to read; names the key that switches this start off.
    """
    shape, layer = drafter.shape, drafter.layers[0]
    assert isinstance(layer, DrafterLayer)
    attention = layer.self_attn
    mean = context.mean(0)  # [H]
    channels = mean.abs().topk(max(4, shape.hidden_size // 48)).indices
    reader = torch.zeros_like(mean)
    reader[channels] = mean[channels]
    reader /= reader.square().sum()
    spread = float((context @ reader).std())
    if not spread < 0.5:
        raise ConfigError(
            f"train.init_recent_gain={gain}: the cached states have no constant part to start from (relative spread "
            f"{spread:.2f}, limit 0.5). Set it to 0."
        )
    layer.input_layernorm.weight[channels] = 0.0
    mask = drafter.mask_embedding
    normed = mask * mask.square().mean().rsqrt() * layer.input_layernorm.weight  # [H], what a mask slot's query reads
    half = shape.head_dim // 2
    angles = shape.rope_theta ** -(torch.arange(half) / half)  # radians a token
    constant = torch.zeros(shape.head_dim)
    constant[:half][angles > SLOWEST_ANGLE] = 1.0
    for projection, source in ((attention.q_proj, normed / normed.square().sum()), (attention.k_proj, reader)):
        heads = projection.weight.mul_(KEPT_NOISE).unflatten(0, (-1, shape.head_dim))  # [heads, D, H]
        heads.add_(torch.outer(constant, source))
    attention.q_norm.weight.fill_(gain**0.5)
    attention.k_norm.weight.fill_(gain**0.5)
    width = min(shape.num_kv_heads * shape.head_dim, shape.hidden_size)
    attention.v_proj.weight.mul_(KEPT_NOISE)[:width, :width].fill_diagonal_(1.0)
    # The first query head of each key head writes that head's channels back.
    group = shape.num_heads // shape.num_kv_heads
    columns = attention.o_proj.weight.mul_(KEPT_NOISE).unflatten(1, (shape.num_kv_heads, group, shape.head_dim))
    for channel in range(width):
        columns[channel, channel // shape.head_dim, 0, channel % shape.head_dim] = 1.0
