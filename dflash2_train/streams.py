"""The residual stream after a decoder layer of a transformers model, read as the layer hands it on.

Hugging Face's ``hidden_states`` would keep every layer alive, and holds the *normalised* state for the last layer; a
hook on the layer itself gives the stream before the final norm, for the last layer too.

Hyper-connections (GLM-5.3-Flash) carry N residual streams a token, [B, S, N, H]. What a layer hands on is complete:
its own output is mixed in already. The tap is the mean over the N streams, which is also what that target's final norm
reads, and what servers capture.

B sequences, S tokens, H hidden size, N streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dflash2_train.config import ConfigError
from dflash2_train.taps import check_taps

if TYPE_CHECKING:
    from torch import Tensor
    from torch.utils.hooks import RemovableHandle
    from transformers import PreTrainedModel

STREAMS_KEY = "hc_mult"  # where a configuration states its number of streams


def stream_after(output: Any, hidden_size: int, num_streams: int) -> Tensor:
    """The stream [B, S, H] in what a decoder layer returned.

    Raises:
        ConfigError: the layer's output is neither [B, S, H] nor, with several streams, [B, S, N, H].
    """
    state: Tensor = output[0] if isinstance(output, tuple) else output
    if num_streams == 1 and state.ndim == 3 and state.shape[2] == hidden_size:
        return state
    if num_streams > 1 and state.ndim == 4 and tuple(state.shape[2:]) == (num_streams, hidden_size):
        return state.mean(dim=2)
    raise ConfigError(
        f"target: a decoder layer returned a state of shape {list(state.shape)}, expected [B, S, {hidden_size}] with "
        f"{num_streams} stream(s). Taps of this architecture are not defined here; use another target."
    )


class TapRecorder:
    """Records the streams after some decoder layers. A context manager: hooks live exactly as long as it is open.

    Args:
        model: any transformers language model whose decoder has ``layers``.
        layers: 0-based ids, ascending.

    Raises:
        ValueError: ids that the model does not have.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[int]) -> None:
        config = model.config.get_text_config(decoder=True)
        check_taps(layers, int(config.num_hidden_layers))
        self._model, self._layers = model, tuple(layers)
        self._hidden_size = int(config.hidden_size)
        self.num_streams = int(config.to_dict().get(STREAMS_KEY) or 1)
        self._states: dict[int, Tensor] = {}
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> TapRecorder:
        modules = self._model.get_decoder().layers
        for layer in self._layers:
            self._handles.append(modules[layer].register_forward_hook(self._hook(layer)))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._states.clear()

    def _hook(self, layer: int) -> Any:
        def keep(_module: object, _inputs: object, output: Any) -> None:
            self._states[layer] = stream_after(output, self._hidden_size, self.num_streams)

        return keep

    def take(self) -> dict[int, Tensor]:
        """Streams [B, S, H] of the last forward by layer; they are forgotten here.

        Raises:
            RuntimeError: a layer did not run since the last call.
        """
        missing = [layer for layer in self._layers if layer not in self._states]
        if missing:
            raise RuntimeError(f"layers {missing} did not run in this forward, so their streams are unknown")
        states, self._states = self._states, {}
        return states
