"""A drafter saved in the published layout computes the same in the reference implementation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dflash2_train.export.hf import load_drafter
from dflash2_train.masks import context_masks
from dflash2_train.model.drafter import Drafter
from tests.drafters import random_drafter
from tests.foreign_drafters import HIDDEN, write_zlab

reference = pytest.importorskip("dflash.model")
safetensors = pytest.importorskip("safetensors.torch")

pytestmark = pytest.mark.filterwarnings("ignore")  # the reference's own warnings are not ours to fix

TOKENS = 14
ANCHORS = (2, 6, 13)
LAYER_TYPES = {
    "full": ("full_attention",) * 2,
    "sliding": ("sliding_attention",) * 2,
    "mixed": ("sliding_attention", "full_attention", "sliding_attention"),
}


def make_drafter(kinds: tuple[str, ...], **changes: Any) -> Drafter:
    window = 6 if "sliding_attention" in kinds else None
    return random_drafter(num_layers=len(kinds), layer_types=kinds, sliding_window=window, **changes)


def load_reference(drafter: Drafter, folder: Path) -> Any:
    """Write the published folder and load it as its users do."""
    ids = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    (folder / "config.json").write_text(json.dumps(drafter.shape.to_published("float32", **ids)))
    tensors = {name: drafter.state_dict()[name] for name in Drafter.expected_tensors(drafter.shape)}
    safetensors.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model, info = reference.DFlash2DraftModel.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    return model.eval()


def problem(drafter: Drafter) -> tuple[Tensor, Tensor, Tensor]:
    """Taps of one document, embedding, and one block an anchor."""
    shape = drafter.shape
    taps = torch.randn(1, TOKENS, shape.num_taps * shape.hidden_size)
    block_ids = torch.full((1, len(ANCHORS), shape.block_size), shape.mask_token_id)
    block_ids[..., 0] = torch.tensor([4, 9, 17])
    return taps, torch.randn(shape.vocab_size, shape.hidden_size), block_ids


def our_hidden(drafter: Drafter, taps: Tensor, embedded: Tensor) -> Tensor:
    anchors, width = torch.tensor([ANCHORS]), embedded.shape[2]
    positions = torch.arange(TOKENS)[None]
    visible = context_masks(
        drafter.shape.layer_types,
        drafter.shape.sliding_window,
        anchor_positions_local=anchors,
        block_document_ids=torch.zeros_like(anchors),
        block_valid=torch.ones_like(anchors, dtype=torch.bool),
        position_ids=positions,
        document_ids=torch.zeros_like(positions),
        block_size=width,
    )
    return drafter(embedded, drafter.encode_context(taps), anchors[..., None] + torch.arange(width), positions, visible)


def their_hidden(model: Any, taps: Tensor, embedded: Tensor, block: int) -> Tensor:
    anchor, width = ANCHORS[block], embedded.shape[2]
    return model(
        position_ids=torch.arange(anchor + width)[None],
        noise_embedding=embedded[:, block],
        target_hidden=taps[:, :anchor],
    )


@torch.no_grad()
@pytest.mark.parametrize("kinds", LAYER_TYPES.values(), ids=LAYER_TYPES.keys())
def test_training_blocks_equal_the_reference_run_on_the_context_before_each_anchor(
    kinds: tuple[str, ...], tmp_path: Path
) -> None:
    drafter = make_drafter(kinds)
    model = load_reference(drafter, tmp_path)
    taps, embedding, block_ids = problem(drafter)
    embedded = drafter.embed_blocks(block_ids, embedding)
    ours = our_hidden(drafter, taps, embedded)
    for block in range(len(ANCHORS)):
        theirs = their_hidden(model, taps, embedded, block)
        torch.testing.assert_close(ours[:, block], theirs, atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("sliding", [False, True])
def test_a_dflash_1_computes_what_the_reference_class_of_its_own_does(sliding: bool, tmp_path: Path) -> None:
    options = {"is_causal": False, "sliding_window": 6, "use_sliding_window": True} if sliding else {}
    folder = write_zlab(tmp_path, second=False, sliding=sliding, **options)
    torch.save(torch.randn(HIDDEN), folder / "mask_embedding.pt")
    drafter = load_drafter(folder, torch.float32)
    model = reference.DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).eval()
    taps, embedding, block_ids = problem(drafter)
    embedded = drafter.embed_blocks(block_ids, embedding)
    ours = our_hidden(drafter, taps, embedded)
    for block in range(len(ANCHORS)):
        torch.testing.assert_close(ours[:, block], their_hidden(model, taps, embedded, block), atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("kinds", LAYER_TYPES.values(), ids=LAYER_TYPES.keys())
def test_the_greedy_path_equals_the_references(kinds: tuple[str, ...], tmp_path: Path) -> None:
    drafter = make_drafter(kinds, output_multiplier=0.3, final_logit_softcapping=4.0)
    model = load_reference(drafter, tmp_path)
    taps, embedding, block_ids = problem(drafter)
    embedded = drafter.embed_blocks(block_ids, embedding)
    head = nn.Linear(drafter.shape.hidden_size, drafter.shape.vocab_size, bias=False)
    head.weight.normal_()
    hidden = our_hidden(drafter, taps, embedded)[0, :, 1:]  # [blocks, K, H]
    logits = 4.0 * torch.tanh(head(hidden) * 0.3 / 4.0)
    unary, candidates = logits.topk(drafter.shape.selector_top_k, -1)
    path, _ = drafter.candidate_selector.walk(hidden, unary, candidates, block_ids[0, :, 0])
    assert not torch.equal(path, logits.argmax(-1))  # the selector has a say
    for block in range(len(ANCHORS)):
        theirs = their_hidden(model, taps, embedded, block)[:, 1:]
        expected, _, _ = model.propose(theirs, block_ids[:, block, 0], head, 0.0)
        assert torch.equal(path[block], expected[0])


@torch.no_grad()
def test_selector_scores_and_sampling_distribution_equal_the_references(tmp_path: Path) -> None:
    drafter = make_drafter(LAYER_TYPES["full"])
    selector = load_reference(drafter, tmp_path).candidate_selector
    hidden, unary = torch.randn(1, 1, drafter.shape.hidden_size), torch.randn(1, 1, drafter.shape.vocab_size)
    anchor = torch.tensor([12])
    _, candidates, expected = selector.select(hidden, unary, anchor, 0.7)
    _, q = drafter.candidate_selector.walk(hidden, unary.gather(-1, candidates), candidates, anchor, temperature=0.7)
    torch.testing.assert_close(q, expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_decoding_over_kept_keys_equals_the_reference_over_its_cache(tmp_path: Path) -> None:
    drafter = make_drafter(LAYER_TYPES["full"])
    model = load_reference(drafter, tmp_path)
    taps, embedding, block_ids = problem(drafter)
    embedded = drafter.embed_blocks(block_ids, embedding)
    width = drafter.shape.block_size
    cache = reference._make_cache(model.config)
    kept: list[tuple[Tensor, Tensor]] = []
    start = 0
    for block, anchor in enumerate(ANCHORS):  # each round appends the newly committed taps
        fresh = drafter.project_context(
            drafter.encode_context(taps[:, start:anchor]), torch.arange(start, anchor)[None]
        )
        kept = (
            fresh
            if not kept
            else [
                (torch.cat([old[0], new[0]], 2), torch.cat([old[1], new[1]], 2))
                for old, new in zip(kept, fresh, strict=True)
            ]
        )
        ours = drafter.decode_block(embedded[:, block], anchor + torch.arange(width)[None], kept)
        theirs = model(
            position_ids=torch.arange(start, anchor + width)[None],
            noise_embedding=embedded[:, block],
            target_hidden=taps[:, start:anchor],
            past_key_values=cache,
            use_cache=True,
        )
        reference._crop_to(cache, anchor)
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
        start = anchor
