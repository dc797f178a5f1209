"""Tap ids and the two ways that libraries count layers.

A tap ``t`` is a 0-based decoder layer of the target and means the residual stream *after* that layer.
Hugging Face's ``hidden_states`` puts the embedding output at index 0, and vLLM captures on entry to a
layer, so both call the same tensor ``t + 1``. Published configurations store ``t``; servers add the one
themselves. Every conversion happens here, because an off-by-one trains without an error and drafts badly.
"""

from __future__ import annotations

from collections.abc import Sequence

TAP_CONVENTION = "residual stream after layer t (0-based) = Hugging Face hidden_states[t + 1]"
STREAM_RULE = "one stream, or the mean over the completed streams of hyper-connections; before the final norm"


def check_taps(taps: Sequence[int], num_layers: int) -> None:
    """Raise ValueError unless ``taps`` are ascending, unique, 0-based ids of ``num_layers`` layers."""
    if not taps:
        raise ValueError("taps=[]: at least one target layer must be tapped. Name layers spread over the depth.")
    if list(taps) != sorted(set(taps)):
        raise ValueError(
            f"taps={list(taps)}: must be ascending and unique, since servers sort them silently. Sort them."
        )
    if taps[0] < 0 or taps[-1] >= num_layers:
        raise ValueError(f"taps={list(taps)}: ids are 0-based and must lie in 0..{num_layers - 1}. Do not add 1.")


def hf_hidden_state_index(tap: int) -> int:
    """Index into Hugging Face's ``hidden_states`` tuple of the stream after layer ``tap``."""
    return tap + 1


def vllm_layer_id(tap: int) -> int:
    """Layer id under which vLLM's hidden-state extraction captures the stream after layer ``tap``."""
    return tap + 1
