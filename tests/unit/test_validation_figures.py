"""Figures of a validation are those of a loop that drafts block by block, however rows are packed or shared out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from data_gen.cache.format import CapturedSample
from dflash2_train.blocks import build_blocks
from dflash2_train.metrics import MetricSums
from dflash2_train.objective import Objective
from dflash2_train.runner.propose import DraftProposer
from dflash2_train.validation import slots
from dflash2_train.validation.chain import served_blocks
from dflash2_train.validation.figures import LOSSES, no_rows, row_figures
from dflash2_train.validation.slots import BlockTable, coarse_overlap, read_blocks
from tests.drafters import as_head
from tests.objective_case import BLOCK_SIZE, make_objective, pack

K, PROMPT = BLOCK_SIZE - 1, 3


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> tuple[Objective, list[CapturedSample]]:
    """A random drafter, and documents of which it knows some of the text: parts are what it drafts itself."""
    _, objective, samples = make_objective(tmp_path_factory.mktemp("validation"))
    return objective, [flattered(objective, sample, seed) for seed, sample in enumerate(samples)]


@pytest.fixture
def objective(case: tuple[Objective, list[CapturedSample]]) -> Iterator[Objective]:
    yield case[0]


@pytest.fixture
def samples(case: tuple[Objective, list[CapturedSample]]) -> list[CapturedSample]:
    return case[1]


def draft(objective: Objective, sample: CapturedSample, anchor: int) -> list[int]:
    """What the runner drafts behind a token of a document."""
    proposer = DraftProposer(
        objective.drafter,
        embedding_weight=objective.frozen.embedding,
        head=as_head(objective.frozen.head),
        num_drafted=K,
        capacity=len(sample) + BLOCK_SIZE,
    )
    with torch.no_grad():
        proposer.start(0, sample.tap_hidden[:anchor].float())
        return proposer.propose([int(sample.input_ids[anchor])], [anchor]).draft_ids[0].tolist()


def flattered(objective: Objective, sample: CapturedSample, seed: int) -> CapturedSample:
    """The document with some runs of text replaced by the drafter's own drafts."""
    sample = replace(sample, input_ids=sample.input_ids.clone())
    generator = torch.Generator().manual_seed(seed)
    anchor = PROMPT
    while anchor + 1 < len(sample):
        known = int(torch.randint(0, BLOCK_SIZE, (1,), generator=generator))
        for offset, token in enumerate(draft(objective, sample, anchor)[:known], start=1):
            if anchor + offset < len(sample):
                sample.input_ids[anchor + offset] = token
        anchor += known + 1
    return sample


def accepted(drafts: list[int], sample: CapturedSample, anchor: int) -> int:
    text = sample.input_ids[anchor + 1 : anchor + 1 + K].tolist()
    count = 0
    while count < len(text) and drafts[count] == text[count]:
        count += 1
    return count


def naive(objective: Objective, samples: list[CapturedSample]) -> tuple[list[int], list[int]]:
    """Accepted drafts of the rounds that a server would do, and of a block at every position."""
    served, everywhere = [], []
    for sample in samples:
        counts = {
            anchor: accepted(draft(objective, sample, anchor), sample, anchor)
            for anchor in range(PROMPT, len(sample) - 1)
        }
        everywhere += counts.values()
        anchor = PROMPT
        while anchor in counts:
            served.append(counts[anchor])
            anchor += counts[anchor] + 1
    return served, everywhere


def figures(objective: Objective, rows: list[list[CapturedSample]]) -> MetricSums:
    sums = MetricSums()
    for row in rows:
        sums = sums + row_figures(read_blocks(objective, pack([row], anchors=1000)))[0]
    return sums


def test_the_forecast_is_what_a_loop_of_single_drafts_accepts(
    objective: Objective, samples: list[CapturedSample]
) -> None:
    served, everywhere = naive(objective, samples)
    assert len(set(served)) > 2, "a case in which nothing or everything is accepted shows little"
    sums = figures(objective, [samples]).sums()
    assert sums["acceptance_length"] == (sum(served) + len(served), len(served))
    assert sums["acceptance_length_uniform"] == (sum(everywhere) + len(everywhere), len(everywhere))
    for k in range(1, K + 1):
        assert sums[f"accepted/slot{k}"] == (sum(m >= k for m in served), len(served))


def test_the_unary_path_is_that_of_a_selector_without_a_say(
    objective: Objective, samples: list[CapturedSample]
) -> None:
    codebook = objective.drafter.candidate_selector.successor_codebook
    kept = codebook.detach().clone()
    unary = figures(objective, [samples]).sums()["acceptance_length_unary"]
    with torch.no_grad():
        codebook.zero_()
    try:
        served, _ = naive(objective, samples)
    finally:
        with torch.no_grad():
            codebook.copy_(kept)
    assert unary == (sum(served) + len(served), len(served))


def test_recall_oracle_and_overlap_are_those_of_whole_logits(
    objective: Objective, samples: list[CapturedSample]
) -> None:
    batch = pack([[samples[0]]], anchors=1000)
    table = read_blocks(objective, batch)
    blocks = build_blocks(batch, block_size=BLOCK_SIZE, mask_token_id=objective.drafter.shape.mask_token_id)
    mask = blocks.supervised[0]
    rows = mask[mask[:, 0]]  # padding blocks are left out of the table
    hidden, _ = objective.read_slots(batch, blocks)
    logits = hidden.float() @ objective.frozen.head.float().T  # [N, V]
    best = logits.topk(objective.drafter.shape.selector_top_k).indices
    inside = (best == blocks.target_ids[0][mask][:, None]).any(-1)
    assert table.oracle[rows].tolist() == inside.tolist()
    assert table.unary[rows].tolist() == (logits.argmax(-1) == blocks.target_ids[0][mask]).tolist()
    q = logits.softmax(-1)
    torch.testing.assert_close(table.confidence[rows], q.amax(-1))
    p, ids = blocks.teacher_logprobs[0][mask].exp(), blocks.teacher_ids[0][mask]
    torch.testing.assert_close(table.overlap[rows], torch.minimum(p, q.gather(1, ids)).sum(-1), rtol=1e-4, atol=1e-4)


def test_figures_do_not_depend_on_how_answers_are_packed_or_how_many_blocks_run_at_once(
    objective: Objective, samples: list[CapturedSample], monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = figures(objective, [samples]).sums()
    apart = figures(objective, [[sample] for sample in reversed(samples)]).sums()
    monkeypatch.setattr(slots, "BLOCKS_AT_ONCE", 4)
    pieces = figures(objective, [samples]).sums()
    for name, pair in packed.items():
        assert apart[name] == pytest.approx(pair, abs=1e-4)
        assert pieces[name] == pytest.approx(pair, abs=1e-4)


def test_what_is_accepted_and_what_is_lost_at_a_slot_are_all_that_reached_it(
    objective: Objective, samples: list[CapturedSample]
) -> None:
    rates = figures(objective, [samples]).rates()
    for k in range(1, K + 1):
        lost = sum(rates[f"{name}/slot{k}"] for name in LOSSES)
        assert rates[f"conditional/slot{k}"] + lost == pytest.approx(1.0)
    assert sum(rates[name] for name in LOSSES) == pytest.approx(1.0)
    assert rates["acceptance_length_oracle"] >= max(rates["acceptance_length"], rates["acceptance_length_unary"])


def test_a_lost_token_is_blamed_on_the_selector_the_ranking_or_the_recall() -> None:
    flags = {  # one round each; the first slot alone is supervised
        "selector": [True, False, False, False],
        "unary": [True, True, False, False],
        "oracle": [True, True, True, False],
    }
    one = {name: torch.tensor(values)[:, None] for name, values in flags.items()}
    yes = torch.ones(4, 1, dtype=torch.bool)
    numbers = torch.full((4, 1), 0.75)
    table = BlockTable(
        anchors=torch.tensor([0, 5, 9, 13]),
        supervised=yes,
        confidence=numbers,
        judged=yes,
        overlap=numbers,
        overlap_bound=numbers,
        **one,
    )
    rates = row_figures(table)[0].rates()
    assert [rates[name] for name in LOSSES] == pytest.approx([1 / 3] * 3)
    assert [rates[f"{name}/slot1"] for name in LOSSES] == [0.25] * 3
    assert rates["confidence_gap/slot1"] == pytest.approx(0.25)
    assert rates["recall"] == 0.75


def test_a_rank_without_rows_has_the_same_names_with_nothing_in_them(
    objective: Objective, samples: list[CapturedSample]
) -> None:
    empty, some = no_rows(K), figures(objective, [samples])
    assert empty.names() == some.names()
    assert set(empty.sums().values()) == {(0.0, 0.0)}
    assert empty.rate_names == some.rate_names


def test_the_chain_of_a_row_is_that_of_a_loop_over_its_documents() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        anchors: list[int] = []
        accepts: list[int] = []
        expected: list[int] = []
        start = 0
        for size in torch.randint(1, 12, (4,), generator=generator).tolist():
            own = range(start, start + size)  # anchors of a document whose last label stands behind them
            room = {a: own.stop - a for a in own}
            counts = {a: min(int(torch.randint(0, 5, (1,), generator=generator)), room[a]) for a in own}
            anchors += own
            accepts += counts.values()
            place = start
            while place in counts:
                expected.append(place)
                place += counts[place] + 1
            start += size + 1 + int(torch.randint(0, 3, (1,), generator=generator))  # a prompt may follow
        found = served_blocks(torch.tensor(anchors), torch.tensor(accepts))
        assert torch.tensor(anchors)[found].tolist() == expected


def test_the_overlap_lies_between_its_bounds_and_equals_them_where_the_teacher_is_whole() -> None:
    generator = torch.Generator().manual_seed(1)
    p, q = (torch.randn(40, 30, generator=generator, dtype=torch.float64).mul(2).softmax(-1) for _ in range(2))
    exact = torch.minimum(p, q).sum(-1)
    values, ids = p.topk(7)
    low, high = coarse_overlap(q.gather(1, ids).log(), values.log())
    assert bool((low <= exact + 1e-12).all()) and bool((exact <= high + 1e-12).all())
    assert bool((low < exact - 1e-3).any()) and bool((high > exact + 1e-3).any())
    for whole in coarse_overlap(q.log(), p.log()):
        torch.testing.assert_close(whole, exact)
    absent = values.log()
    absent[:, 4:] = -torch.inf
    torch.testing.assert_close(
        coarse_overlap(q.gather(1, ids).log(), absent)[0],
        coarse_overlap(q.gather(1, ids[:, :4]).log(), values[:, :4].log())[0],
    )


def test_a_position_counts_once_a_block_and_a_short_end_by_the_labels_it_has() -> None:
    lengths = Counter[int]()
    generator = torch.Generator().manual_seed(2)
    supervised = torch.arange(K)[None] < torch.randint(1, K + 1, (30, 1), generator=generator)
    hits = (torch.rand(30, K, generator=generator) < 0.7) & supervised
    anchors = torch.arange(30) * 10  # far apart: every block is a round
    zeros = torch.zeros(30, K)
    table = BlockTable(
        anchors=anchors,
        supervised=supervised,
        selector=hits,
        unary=hits,
        oracle=supervised,
        confidence=zeros,
        judged=supervised,
        overlap=zeros,
        overlap_bound=zeros,
    )
    for row in range(30):
        lengths[first_run(hits[row])] += 1
    sums = row_figures(table)[0].sums()
    assert sums["acceptance_length"] == (sum(m * n for m, n in lengths.items()) + 30, 30)
    for k in range(1, K + 1):
        reached = sum(bool(supervised[row, k - 1]) and first_run(hits[row]) >= k - 1 for row in range(30))
        assert sums[f"conditional/slot{k}"][1] == reached


def first_run(row: Tensor) -> int:
    return next((place for place, hit in enumerate(row.tolist()) if not hit), len(row))
