"""Drafting a block: what the drafter is shown, and that decoding step by step equals the training path."""

from __future__ import annotations

import pytest
import torch

from dflash2_train.config import ConfigError, RunConfig
from dflash2_train.masks import context_masks
from dflash2_train.model.drafter import Drafter
from dflash2_train.model.drafter_config import DrafterShape
from dflash2_train.runner.propose import DraftProposer

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
        head_weight=weights[1],
        num_drafted=num_drafted,
        capacity=CONTEXT,
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
    for piece in taps.split([7, 1, 4, 8]):
        proposer.observe(piece)
    proposal = proposer.propose(ANCHOR_ID, CONTEXT)

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
    assert torch.allclose(proposer._block_hidden(ANCHOR_ID, CONTEXT)[:, 1:], hidden, atol=TOLERANCE)
    unary, candidate_ids = (hidden @ weights[1].T).topk(shape.selector_top_k)
    path, _ = drafter.candidate_selector.walk(hidden, unary, candidate_ids, torch.tensor([ANCHOR_ID]))
    assert torch.equal(proposal.draft_ids, path[0])
    assert proposal.distribution is None


@torch.inference_mode()
def test_sampled_proposals_report_a_distribution_that_contains_them(
    drafter: Drafter, weights: tuple[torch.Tensor, torch.Tensor]
) -> None:
    proposer = make_proposer(drafter, weights, temperature=1.0)
    proposer.observe(torch.randn(CONTEXT, drafter.fc.in_features))
    drafts = set()
    for _ in range(20):
        proposal = proposer.propose(ANCHOR_ID, CONTEXT)
        assert proposal.distribution is not None
        ids, q = proposal.distribution
        assert torch.allclose(q.sum(-1), torch.ones(3))
        assert bool(((ids == proposal.draft_ids[:, None]) & (q > 0)).any(-1).all())
        drafts.add(tuple(proposal.draft_ids.tolist()))
    assert len(drafts) > 1


@torch.inference_mode()
@pytest.mark.parametrize("observed", [0, CONTEXT - 1])
def test_a_context_that_lacks_committed_tokens_is_an_assertion_and_not_a_worse_draft(
    drafter: Drafter, weights: tuple[torch.Tensor, torch.Tensor], observed: int
) -> None:
    proposer = make_proposer(drafter, weights)
    if observed:
        proposer.observe(torch.randn(observed, drafter.fc.in_features))
    with pytest.raises(AssertionError, match=f"covers {observed} tokens"):
        proposer.propose(ANCHOR_ID, CONTEXT)


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
