"""Drafting a block: what the drafter is shown, and that decoding step by step equals the training path."""

from __future__ import annotations

import pytest
import torch

from dflash2_train.config import ConfigError, RunConfig
from dflash2_train.masks import context_masks
from dflash2_train.model.drafter import Drafter
from dflash2_train.model.drafter_config import DrafterShape
from dflash2_train.runner.propose import DraftProposer
from tests.drafters import as_head

CONTEXT = 20  # beyond the window of 6
ANCHOR_ID = 7
TOLERANCE = 1e-5


@pytest.fixture
def drafter(tiny_config: RunConfig) -> Drafter:
    """A random drafter whose conv and selector do something."""
    torch.manual_seed(11)
    drafter = Drafter(DrafterShape.from_config(tiny_config)).eval()
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return drafter


@pytest.fixture
def weights(drafter: Drafter) -> tuple[torch.Tensor, torch.Tensor]:
    """Embedding and head of a target, [V, H] each."""
    size = (drafter.shape.vocab_size, drafter.shape.hidden_size)
    return torch.randn(size), torch.randn(size)


def make_proposer(
    drafter: Drafter, weights: tuple[torch.Tensor, torch.Tensor], *, num_drafted: int = 3, temperature: float = 0.0
) -> DraftProposer:
    return DraftProposer(
        drafter,
        embedding_weight=weights[0],
        head=as_head(weights[1]),
        num_drafted=num_drafted,
        capacity=CONTEXT + 4,
        temperature=temperature,
        generator=torch.Generator().manual_seed(5),
    )


@torch.inference_mode()
@pytest.mark.parametrize("num_drafted", [1, 2, 3])
def test_feeding_the_context_in_pieces_drafts_what_the_training_path_drafts(
    drafter: Drafter, weights: tuple[torch.Tensor, torch.Tensor], num_drafted: int
) -> None:
    shape = drafter.shape
    taps = torch.randn(CONTEXT, shape.num_taps * shape.hidden_size)
    proposer = make_proposer(drafter, weights, num_drafted=num_drafted)
    first, *rest = taps.split([7, 1, 4, 8])
    proposer.start(0, first)
    for piece in rest:
        rejected = torch.full((3, piece.shape[1]), 9.0)  # stored, never seen, written over
        proposer.observe(torch.cat([piece, rejected])[None], [len(piece)])
    proposal = proposer.propose([ANCHOR_ID], [CONTEXT])

    block = torch.tensor([[[ANCHOR_ID] + [shape.mask_token_id] * num_drafted]])  # [B, A, W]
    positions = torch.arange(CONTEXT)[None]
    one = torch.zeros(1, 1, dtype=torch.long)
    visible = context_masks(
        shape.layer_types,
        shape.sliding_window,
        anchor_positions_local=one + CONTEXT,
        block_document_ids=one,
        block_valid=one == 0,
        position_ids=positions,
        document_ids=torch.zeros_like(positions),
        block_size=num_drafted + 1,
    )
    hidden = drafter(
        drafter.embed_blocks(block, weights[0]),
        drafter.encode_context(taps[None]),
        CONTEXT + torch.arange(num_drafted + 1)[None, None],
        positions,
        visible,
    )[:, 0, 1:]
    assert torch.allclose(proposer._block_hidden([ANCHOR_ID], [CONTEXT])[:, 1:], hidden, atol=TOLERANCE)
    unary, candidate_ids = (hidden @ weights[1].T).topk(shape.selector_top_k)
    path, _ = drafter.candidate_selector.walk(hidden, unary, candidate_ids, torch.tensor([ANCHOR_ID]))
    assert torch.equal(proposal.draft_ids, path)
    assert proposal.distribution is None


@torch.inference_mode()
def test_rows_of_unequal_length_are_drafted_as_each_is_alone(
    drafter: Drafter, weights: tuple[torch.Tensor, torch.Tensor]
) -> None:
    lengths, anchors = [3, CONTEXT, 9], [7, 8, 9]
    taps = [torch.randn(length, drafter.fc.in_features) for length in lengths]
    together = DraftProposer(
        drafter, embedding_weight=weights[0], head=as_head(weights[1]), num_drafted=3, num_rows=3, capacity=CONTEXT + 4
    )
    for row, piece in enumerate(taps):
        together.start(row, piece)
    drafted = together.propose(anchors, lengths).draft_ids
    together.keep_rows([0, 2])
    kept = together.propose([7, 9], [3, 9]).draft_ids
    for row, piece in enumerate(taps):
        alone = make_proposer(drafter, weights)
        alone.start(0, piece)
        assert torch.equal(alone.propose([anchors[row]], [lengths[row]]).draft_ids[0], drafted[row])
    assert torch.equal(kept, drafted[[0, 2]])
    assert len({tuple(row.tolist()) for row in drafted}) == 3, "rows that draft the same would hide a mix-up"


@torch.inference_mode()
def test_an_anchor_that_is_the_mask_token_is_embedded_as_in_training(
    drafter: Drafter, weights: tuple[torch.Tensor, torch.Tensor]
) -> None:
    mask_id = drafter.shape.mask_token_id
    for anchor in (ANCHOR_ID, mask_id):
        expected = drafter.embed_blocks(torch.tensor([[anchor, mask_id, mask_id, mask_id]]), weights[0])
        assert torch.equal(make_proposer(drafter, weights)._block_embeddings([anchor]), expected)


@torch.inference_mode()
def test_sampled_proposals_report_a_distribution_that_contains_them(
    drafter: Drafter, weights: tuple[torch.Tensor, torch.Tensor]
) -> None:
    proposer = make_proposer(drafter, weights, temperature=1.0)
    proposer.start(0, torch.randn(CONTEXT, drafter.fc.in_features))
    drafts = set()
    for _ in range(20):
        proposal = proposer.propose([ANCHOR_ID], [CONTEXT])
        assert proposal.distribution is not None
        ids, q = proposal.distribution
        assert torch.allclose(q.sum(-1), torch.ones(1, 3))
        assert bool(((ids == proposal.draft_ids[..., None]) & (q > 0)).any(-1).all())
        drafts.add(tuple(proposal.draft_ids[0].tolist()))
    assert len(drafts) > 1


@torch.inference_mode()
@pytest.mark.parametrize("observed", [0, CONTEXT - 1])
def test_a_context_that_lacks_committed_tokens_is_an_assertion_and_not_a_worse_draft(
    drafter: Drafter, weights: tuple[torch.Tensor, torch.Tensor], observed: int
) -> None:
    proposer = make_proposer(drafter, weights)
    if observed:
        proposer.start(0, torch.randn(observed, drafter.fc.in_features))
    with pytest.raises(AssertionError, match=rf"covers \[{observed}\] tokens"):
        proposer.propose([ANCHOR_ID], [CONTEXT])


@pytest.mark.parametrize("num_drafted", [0, 4])
def test_more_drafts_than_the_block_was_trained_for_are_refused(
    drafter: Drafter, weights: tuple[torch.Tensor, torch.Tensor], num_drafted: int
) -> None:
    with pytest.raises(ConfigError, match="block_size 4"):
        make_proposer(drafter, weights, num_drafted=num_drafted)


def test_models_of_different_dtypes_are_refused(drafter: Drafter, weights: tuple[torch.Tensor, torch.Tensor]) -> None:
    with pytest.raises(ConfigError, match="bfloat16"):
        make_proposer(drafter, (weights[0], weights[1].bfloat16()))


@torch.inference_mode()
def test_scale_and_soft_cap_shape_the_unary_logits(
    tiny_config: RunConfig, weights: tuple[torch.Tensor, torch.Tensor]
) -> None:
    tiny_config.drafter.output_multiplier = 0.5
    tiny_config.drafter.final_logit_softcapping = 2.0
    drafter = Drafter(DrafterShape.from_config(tiny_config)).eval()
    hidden = torch.randn(1, 3, drafter.shape.hidden_size)
    unary, candidate_ids = make_proposer(drafter, weights)._candidates(hidden)
    expected = 2.0 * torch.tanh((hidden @ weights[1].T) * 0.5 / 2.0)
    assert torch.allclose(unary, expected.gather(-1, candidate_ids), atol=TOLERANCE)
    assert torch.allclose(unary, expected.topk(drafter.shape.selector_top_k).values, atol=TOLERANCE)
