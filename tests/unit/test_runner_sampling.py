"""The whole loop draws from the target's own distribution, whatever is drafted and however.

The target is a table: the next token depends on the last one alone. Thousands of rows are decoded as one batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from dflash2_train.runner import DecodeSettings, generate_batch, loop
from dflash2_train.runner.propose import Proposal
from dflash2_train.runner.target_session import TargetRows
from dflash2_train.runner.verify import DraftDistribution, sample_ids, target_probabilities
from tests.decoding import run_loop
from tests.drafters import random_drafter

VOCAB, NUM_ROWS, START = 5, 20_000, 2
LARGEST_DISTANCE = 0.02
SMALLEST_P = 1e-4


class TableSession:
    """A target whose logits are a table [V, V] of the last token."""

    static = False
    device = torch.device("cpu")

    def __init__(self, table: Tensor, num_rows: int) -> None:
        self.table, self.lengths = table, [0] * num_rows

    def __enter__(self) -> TableSession:
        return self

    def __exit__(self, *_: object) -> None: ...

    def prefill(self, row: int, ids: Tensor) -> TargetRows:
        self.lengths[row] = len(ids)
        return TargetRows(self.table[ids[-1:]][None], torch.zeros(1, len(ids), 0))

    def forward(self, block_ids: Tensor) -> TargetRows:
        return TargetRows(self.table[block_ids], torch.zeros(*block_ids.shape, 0))

    def commit(self, num_kept: Sequence[int]) -> None:
        self.lengths = [length + kept for length, kept in zip(self.lengths, num_kept, strict=True)]

    def keep_rows(self, indices: Sequence[int]) -> None:
        self.lengths = [self.lengths[index] for index in indices]


class TableProposer:
    """Drafts by another table, of three candidates a token: the best one, or drawn with its true probabilities."""

    def __init__(self, table: Tensor, num_drafted: int, *, sampled: bool, generator: torch.Generator) -> None:
        logits, self.candidates = table.topk(3, dim=-1)
        self.q, self.num_drafted, self.sampled, self.generator = logits.softmax(-1), num_drafted, sampled, generator

    def start(self, row: int, tap_hidden: Tensor) -> None: ...

    def observe(self, tap_hidden: Tensor, num_kept: Sequence[int]) -> None: ...

    def keep_rows(self, indices: Sequence[int]) -> None: ...

    def propose(self, anchor_ids: Sequence[int], anchor_positions: Sequence[int]) -> Proposal:
        last, ids, candidates, probabilities = torch.tensor(anchor_ids), [], [], []
        for _ in range(self.num_drafted):
            row_q = self.q[last]
            choice = sample_ids(row_q, self.generator) if self.sampled else row_q.argmax(-1)
            candidates.append(self.candidates[last])
            probabilities.append(row_q)
            last = self.candidates[last].gather(-1, choice[:, None])[:, 0]
            ids.append(last)
        distribution = DraftDistribution(torch.stack(candidates, 1), torch.stack(probabilities, 1))
        return Proposal(draft_ids=torch.stack(ids, 1), distribution=distribution if self.sampled else None)


def tables(seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield 1.5 * torch.randn(VOCAB, VOCAB, generator=generator)


def p_value(observed: Tensor, expected: Tensor) -> float:
    """Of Pearson's chi-square for counts [n] whose expectations are all well above zero."""
    statistic = ((observed - expected).square() / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2), statistic / 2))


FILTERS: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 3, "min_p": 0.1},
]


@pytest.mark.parametrize("sampled", [False, True], ids=["argmax", "selector"])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("num_drafted", [1, 3])
def test_the_second_and_third_token_are_distributed_as_the_targets_own(
    monkeypatch: pytest.MonkeyPatch, sampled: bool, filters: dict[str, Any], num_drafted: int
) -> None:
    source = tables(3)
    table = next(source)
    other = table + 0.5 * next(source)  # near enough to be accepted at times
    generator = torch.Generator().manual_seed(11)
    monkeypatch.setattr(loop, "open_session", lambda *_, num_rows, **__: TableSession(table, num_rows))
    proposer = TableProposer(other, num_drafted, sampled=sampled, generator=generator)
    chosen = DecodeSettings(max_new_tokens=3, num_drafted=num_drafted, stop_ids=frozenset(), **filters)
    model: Any = SimpleNamespace(device=torch.device("cpu"))
    results = run_loop(model, proposer, (), [[START]] * NUM_ROWS, chosen, generator)

    tokens = torch.tensor([result.token_ids for result in results])
    p = target_probabilities(table, **filters)
    exact = (p[START] @ p)[:, None] * p  # [second, third]: the first token is summed over
    counts = torch.bincount(tokens[:, 1] * VOCAB + tokens[:, 2], minlength=VOCAB * VOCAB).float()
    assert 0.5 * float((counts / NUM_ROWS - exact.flatten()).abs().sum()) < LARGEST_DISTANCE
    possible = exact.flatten() > 0
    assert counts[~possible].sum() == 0, "a token that the target never samples came out"
    assert p_value(counts[possible], exact.flatten()[possible] * NUM_ROWS) > SMALLEST_P
    accepted = sum(one.num_accepted for result in results for one in result.rounds)
    assert accepted > NUM_ROWS / 10, "a draft that is never accepted would test nothing"


@pytest.mark.parametrize("draft_sampling", ["argmax", "selector"])
def test_a_real_target_and_drafter_sample_as_the_target_alone(draft_sampling: str) -> None:
    torch.manual_seed(4)
    config = LlamaConfig(
        vocab_size=VOCAB + 1,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        initializer_range=0.3,
    )
    target = LlamaForCausalLM(config).eval()
    shape: dict[str, Any] = {"vocab_size": VOCAB + 1, "mask_token_id": VOCAB, "num_target_layers": 2}
    drafter = random_drafter(target_layer_ids=(0, 1), selector_top_k=4, num_layers=1, **shape).eval()
    chosen = DecodeSettings(
        max_new_tokens=4, num_drafted=3, stop_ids=frozenset(), temperature=0.8, draft_sampling=draft_sampling
    )
    num_rows = 600
    results = generate_batch(target, drafter, [[START, 1]] * num_rows, chosen, torch.Generator().manual_seed(2))

    second = torch.tensor([result.token_ids[1] for result in results])
    with torch.inference_mode():
        first_p = target_probabilities(target(torch.tensor([[START, 1]])).logits[0, -1], temperature=0.8)
        texts = torch.tensor([[START, 1, first] for first in range(VOCAB + 1)])
        second_p = target_probabilities(target(texts).logits[:, -1], temperature=0.8)
    expected = (first_p[:, None] * second_p).sum(0) * num_rows
    assert p_value(torch.bincount(second, minlength=VOCAB + 1).float(), expected) > SMALLEST_P
    assert sum(one.num_accepted for result in results for one in result.rounds) > num_rows / 10
