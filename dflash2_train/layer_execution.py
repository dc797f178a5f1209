"""How the drafter's layers are run: recomputed in the backward pass, compiled, or plainly. None changes the function.

Recomputing (gradient checkpointing) keeps only a layer's input and runs the layer again for its gradient: about one
forward of the layers more, for the memory of one layer in place of all. Gradients are the same to the last bit, for
the layers draw no random numbers. Compiling is for CUDA; it changes the order of roundings.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dflash2_train.config import ConfigError, TrainConfig


def apply_layer_options(layers: nn.ModuleList, train: TrainConfig, device: torch.device) -> None:
    """Make every layer run as ``train.gradient_checkpointing`` and ``train.compile_layers`` say; names stay.

    Raises:
        ConfigError: compiling was asked for on something else than CUDA.
    """
    if train.compile_layers and device.type != "cuda":
        raise ConfigError(
            f"train.compile_layers=true: layers are compiled on CUDA only, this run is on {device.type}. Set it to "
            "false."
        )
    for layer in layers:
        run = layer.forward
        if train.compile_layers:
            run = torch.compile(run)
        if train.gradient_checkpointing:
            run = partial(checkpoint, run, use_reentrant=False, preserve_rng_state=False)
        # On the instance: a wrapping module would rename every parameter of the published list.
        layer.forward = run
