"""What is trained, as it is before the first step: the drafter, warm or fresh, inside its objective."""

from __future__ import annotations

import torch

from dflash2_train.config import RunConfig
from dflash2_train.model.drafter import Drafter
from dflash2_train.model.drafter_config import DrafterShape
from dflash2_train.model.initialise import fc_from_taps, initialise, look_at_recent
from dflash2_train.objective import Objective
from dflash2_train.target import FrozenHead, TargetTensors
from dflash2_train.training_data import FirstSamples
from dflash2_train.warm_start import warm_drafter


def build_objective(config: RunConfig, samples: FirstSamples | None) -> Objective:
    """Drafter (warm from another one, or fresh with what the target lends) and frozen tables, on the CPU.

    Args:
        config: the experiment.
        samples: whose states shape a fresh drafter; None where a checkpoint replaces it anyway.
    """
    frozen = FrozenHead.load(config.target, dtype=config.train.dtype)
    shape = DrafterShape.from_config(config)
    if config.train.warm_start is not None:
        drafter = warm_drafter(config.train.warm_start, shape, frozen.embedding)
    else:
        drafter = fresh_drafter(config, shape, frozen, samples)
    drafter.attention = config.train.attention
    return Objective(drafter, frozen, config.loss)


def fresh_drafter(config: RunConfig, shape: DrafterShape, frozen: FrozenHead, samples: FirstSamples | None) -> Drafter:
    """A new drafter: random, with what the config takes from the target and from captured states."""
    drafter = Drafter(shape)
    drafter.reset_mask_embedding(frozen.embedding[shape.mask_token_id].float())
    if config.train.init_tap_weights:
        fc_from_taps(drafter, config.train.init_tap_weights)
    tensors = TargetTensors(config.target)
    layers = dict(enumerate(config.train.init_layers))
    initialise(drafter, tensors.__getitem__, layers, prefix=tensors.decoder_prefix())
    with torch.no_grad():
        drafter.norm.weight.mul_(config.train.init_norm_scale)
        if config.train.init_recent_gain > 0 and samples is not None:
            states = [samples.read(index).tap_hidden for index in range(len(samples))]
            context = drafter.encode_context(torch.cat(states).float())  # [tokens, H]
            look_at_recent(drafter, context, config.train.init_recent_gain)
    return drafter
