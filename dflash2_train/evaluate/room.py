"""Which prompts fit the context: a prompt, its longest answer and one more block, in target and drafter alike."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash2_train.config import ConfigError, RunConfig
from dflash2_train.evaluate.subject import published_shape

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Room:
    """What prompts have to fit into; all lengths in tokens."""

    context: int  # of target and drafter, the smaller one
    answer: int  # eval.max_new_tokens
    block: int  # the largest K: every decoder then answers the same prompts

    def fits(self, num_prompt_tokens: int) -> bool:
        """Whether a prompt can be answered in full."""
        return num_prompt_tokens + self.answer + self.block <= self.context

    def check(self, name: str, lengths: Sequence[int]) -> None:
        """Say how many of a task's prompts are too long, before anything is loaded.

        Raises:
            ConfigError: none of them fits.
        """
        too_long = sum(not self.fits(length) for length in lengths)
        if too_long == len(lengths):
            raise ConfigError(
                f"eval.max_new_tokens={self.answer}: none of the {too_long} prompts of {name}, the shortest of "
                f"{min(lengths)} tokens, fits the context of {self.context} tokens with its answer and one block. "
                "Lower it, or take shorter prompts."
            )
        if too_long:
            logger.warning("%s: %d of %d prompts are too long, counted apart", name, too_long, len(lengths))

    def labels(self, too_long: int) -> list[str]:
        """What a reader must know of prompts that were left out; nothing if none was."""
        if not too_long:
            return []
        return [
            f"{too_long} prompts do not fit the context of {self.context} tokens with their answer and were not decoded"
        ]


def open_room(config: RunConfig, folder: Path, block: int) -> Room:
    """The room that target and drafter in ``folder`` leave.

    Raises:
        ConfigError: their configurations cannot be read.
    """
    from dflash2_train.target import open_target_config

    of_target = open_target_config(config.target).max_position_embeddings
    context = min(published_shape(folder).max_position_embeddings, of_target)
    return Room(context=context, answer=config.eval.max_new_tokens, block=block)
