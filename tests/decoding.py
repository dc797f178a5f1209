"""Parts of decoding tests: a proposer that knows the answer, and the loop with a proposer of one's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from transformers import PreTrainedModel

from dflash2_train.runner import DecodeSettings, GenerationResult
from dflash2_train.runner.loop import speculate
from dflash2_train.runner.outcome import Clock, RowOutput
from dflash2_train.runner.propose import Proposal, Proposer


class Oracle:
    """Proposes each row's true continuation, right for a scripted number of tokens, and checks what it is fed.

    Args:
        truths: the true texts, longer than is decoded.
        num_prompt: length of each prompt.
        right: right tokens of the next proposal; one is taken a row and round.
        num_drafted: K.
        vocab_size: wrong tokens stay below it.
        num_output: tokens that each row writes in the end; a finished row of a static cache is drafted for no more.
    """

    def __init__(
        self,
        truths: Sequence[list[int]],
        num_prompt: Sequence[int],
        right: Iterator[int],
        num_drafted: int,
        *,
        vocab_size: int,
        num_output: Sequence[int] | None = None,
    ) -> None:
        self.truths, self.num_prompt = list(truths), list(num_prompt)
        self.right, self.num_drafted, self.vocab_size = right, num_drafted, vocab_size
        self.num_output = [len(truth) for truth in truths] if num_output is None else list(num_output)
        self.observed: list[list[torch.Tensor]] = [[] for _ in truths]

    def start(self, row: int, tap_hidden: torch.Tensor) -> None:
        self.observed[row] = [tap_hidden]

    def observe(self, tap_hidden: torch.Tensor, num_kept: Sequence[int]) -> None:
        for pieces, taps, kept in zip(self.observed, tap_hidden, num_kept, strict=True):
            pieces.append(taps[:kept])

    def propose(self, anchor_ids: Sequence[int], anchor_positions: Sequence[int]) -> Proposal:
        rows = []
        for row, (anchor, position) in enumerate(zip(anchor_ids, anchor_positions, strict=True)):
            assert sum(len(piece) for piece in self.observed[row]) == position
            start = position - self.num_prompt[row]
            if start >= self.num_output[row] - 1:
                rows.append(torch.zeros(self.num_drafted, dtype=torch.long))
                continue
            assert self.truths[row][start] == anchor
            ahead = self.truths[row][start + 1 : start + 1 + self.num_drafted]
            ids = torch.tensor(ahead + [0] * (self.num_drafted - len(ahead)))
            right = next(self.right)
            ids[right:] = (ids[right:] + 1) % self.vocab_size
            rows.append(ids)
        return Proposal(draft_ids=torch.stack(rows), distribution=None)

    def keep_rows(self, indices: Sequence[int]) -> None:
        self.truths = [self.truths[index] for index in indices]
        self.num_prompt = [self.num_prompt[index] for index in indices]
        self.num_output = [self.num_output[index] for index in indices]
        self.observed = [self.observed[index] for index in indices]


def run_loop(
    model: PreTrainedModel,
    proposer: Proposer,
    taps: Sequence[int],
    prompts: Sequence[Sequence[int]],
    settings: DecodeSettings,
    generator: torch.Generator | None = None,
) -> list[GenerationResult]:
    """``generate_batch`` with another proposer than a drafter."""
    outputs, clock = [RowOutput(row, settings) for row in range(len(prompts))], Clock(model.device)
    for _ in speculate(model, proposer, taps, prompts, settings, generator, outputs, clock):
        pass
    return [output.result(clock.timings) for output in outputs]
