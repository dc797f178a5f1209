"""A recorder reads what the layers hand on, for as long as it is open, and never gives an older forward's states."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dflash2_train.config import ConfigError
from dflash2_train.pretrained import load_pretrained
from dflash2_train.streams import TapRecorder, stream_after
from tests.architectures import HIDDEN, LAYERS, write_architecture

IDS = torch.tensor([[5, 6, 7]])


def test_states_are_given_once_and_hooks_end_with_the_recorder(tmp_path: Path) -> None:
    write_architecture(tmp_path, "llama")
    model = load_pretrained(tmp_path, torch.float32)
    with TapRecorder(model, [1, LAYERS - 1]) as recorder:
        model(IDS)
        assert {layer: state.shape for layer, state in recorder.take().items()} == {
            1: (1, 3, HIDDEN),
            LAYERS - 1: (1, 3, HIDDEN),
        }
        with pytest.raises(RuntimeError, match="did not run"):
            recorder.take()
    model(IDS)
    with pytest.raises(RuntimeError, match="did not run"):
        recorder.take()


def test_layers_that_the_model_does_not_have_are_refused(tmp_path: Path) -> None:
    write_architecture(tmp_path, "llama")
    with pytest.raises(ValueError, match="taps="):
        TapRecorder(load_pretrained(tmp_path, torch.float32), [LAYERS])


def test_several_streams_are_averaged_and_unknown_shapes_refused() -> None:
    streams = torch.arange(2.0 * HIDDEN * 4).reshape(1, 2, 4, HIDDEN)
    assert torch.equal(stream_after((streams, None), HIDDEN, 4), streams.mean(dim=2))
    for shape, count in (((1, 3, 2, HIDDEN), 4), ((1, 3, 4, HIDDEN), 1), ((1, 3, HIDDEN + 1), 1), ((1, 3, HIDDEN), 4)):
        with pytest.raises(ConfigError, match="not defined"):
            stream_after(torch.zeros(shape), HIDDEN, count)
