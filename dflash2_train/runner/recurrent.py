"""Rollback of recurrent layers: snapshot before a block, replay of the tokens that stay.

A recurrent state can't be cut, and transformers can crop convolution states only. So the states are copied before a
block of drafts; afterwards, if some were rejected, the copy is put back and each recurrent module runs once more over
its own recorded input, cut to the tokens that stay. What a layer is fed at a token does not depend on later tokens,
so those inputs are right whatever was rejected; the rest of the model is not run again.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, LinearAttentionLayer

from dflash2_train.config import ConfigError

INPUT = "hidden_states"
CACHE_ARGUMENTS = {"cache_params", "past_key_values"}  # what recurrent modules call the cache
Call = dict[str, Any]  # arguments by name


class LayerState(NamedTuple):
    """Copies of one layer's states, by the layer's own keys."""

    convolution: dict[int, Tensor]
    recurrent: dict[int, Tensor]


class RecurrentRollback:
    """Records what the recurrent modules of ``model`` are fed. Costs nothing for a model without them.

    Args:
        model: the target.
        layers: indices of its recurrent layers.

    Raises:
        ConfigError: a recurrent layer whose module can't be run on its own.
    """

    def __init__(self, model: PreTrainedModel, layers: list[int]) -> None:
        self._modules = _recurrent_modules(model, layers)
        self._calls: dict[int, Call] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Hooks on the modules, as long as the context is open."""
        with ExitStack() as stack:
            for index, module in self._modules.items():
                handle = module.register_forward_pre_hook(self._hook(index), with_kwargs=True)
                stack.callback(handle.remove)
            yield
        self._calls.clear()

    def _hook(self, index: int) -> Any:
        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._calls[index] = inspect.signature(type(module).forward).bind(module, *args, **kwargs).arguments

        return keep

    def snapshot(self, cache: Cache) -> dict[int, LayerState]:
        """Copies of all recurrent states."""
        return {index: _copy_state(cache.layers[index]) for index in self._modules}

    def take_calls(self) -> dict[int, Call]:
        """What the modules were fed in the last forward; it is forgotten here."""
        calls, self._calls = self._calls, {}
        return calls

    def replay(self, cache: Cache, before: dict[int, LayerState], calls: dict[int, Call], num_kept: int) -> None:
        """Put ``before`` back and run every recurrent module over the first ``num_kept`` tokens of ``calls``."""
        for index, module in self._modules.items():
            _restore_state(cache.layers[index], before[index])
            module(**_cut(calls[index], num_kept))
        self._calls.clear()  # what the replay itself recorded


def _recurrent_modules(model: PreTrainedModel, layers: list[int]) -> dict[int, nn.Module]:
    found: dict[int, nn.Module] = {}
    if not layers:
        return found
    for module in model.get_decoder().modules():
        index = module.__dict__.get("layer_idx")
        arguments = set(inspect.signature(type(module).forward).parameters)
        if index in layers and INPUT in arguments and arguments & CACHE_ARGUMENTS:
            found[index] = module
    missing = sorted(set(layers) - set(found))
    if missing:
        raise ConfigError(
            f"target {model.config.model_type}: no module of the recurrent layers {missing} can be run on its own, so "
            "the built-in runner can't roll them back. Measure this target on a vLLM or SGLang server."
        )
    return found


def _copy_state(layer: Any) -> LayerState:
    assert isinstance(layer, LinearAttentionLayer)
    return LayerState(
        {key: state.clone() for key, state in layer.conv_states.items() if state is not None},
        {key: state.clone() for key, state in layer.recurrent_states.items() if state is not None},
    )


def _restore_state(layer: Any, before: LayerState) -> None:
    for key, state in before.convolution.items():
        layer.conv_states[key].copy_(state)
    for key, state in before.recurrent.items():
        layer.recurrent_states[key].copy_(state)


def _cut(call: Call, num_kept: int) -> Call:
    """The recorded arguments with everything of the form [B, S, ...] cut to the first ``num_kept`` tokens."""
    arguments = {name: value for name, value in call.items() if name != "self"}
    arguments.update(arguments.pop("kwargs", {}))
    sequence = arguments[INPUT].shape[:2]

    def cut(value: Any) -> Any:
        return value[:, :num_kept] if isinstance(value, torch.Tensor) and value.shape[:2] == sequence else value

    return {name: cut(value) for name, value in arguments.items()}
