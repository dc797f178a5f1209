"""The reference implementation on an export of every experiment's shape family: states, logits and the selector's path.

Each family keeps its experiment's layers, taps, block, window pattern and head ratio; sizes are small and every
parameter is random. 1,000 blocks have a context of their own each, some shorter and some longer than the window.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash2_train.export.hf import export_hf, load_drafter
from dflash2_train.masks import context_masks
from dflash2_train.model.drafter import Drafter
from dflash2_train.model.drafter_config import DrafterShape
from tests.cases import RECORD, make_target_info
from tests.families import EXPERIMENTS, VOCAB, WINDOW, family, randomised

reference = pytest.importorskip("dflash.model")

pytestmark = pytest.mark.filterwarnings("ignore")  # the reference's own warnings are not ours to fix

CONTEXTS = (1, WINDOW - 3, WINDOW + 1, 2 * WINDOW)  # tokens before the anchor; a quarter of the blocks each
BLOCKS = 1000
TOLERANCE = 1e-5  # relative to the largest value of a slot
TIE = 1e-5  # two scores this close might swap on another machine, and equality of paths would say nothing


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Both sides of all blocks of one family."""

    shape: DrafterShape
    hidden: tuple[Tensor, Tensor]  # ours, theirs [N, W, H]
    logits: tuple[Tensor, Tensor]  # [N, K, V]
    path: tuple[Tensor, Tensor]  # [N, K]
    first_choice: Tensor  # [N, K]: what the unary logits alone would draft
    smallest_gap: float  # between the best and the second score along the paths


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference of a slot, relative to the slot's largest value."""
    return float(((ours - theirs).abs().amax(-1) / theirs.abs().amax(-1)).max())


def exported(experiment: str, root: Path, **changes: Any) -> tuple[Drafter, Any]:
    """A family's random drafter through the export: as this project loads it and as the reference does."""
    config = family(experiment, root)
    for key, value in changes.items():
        setattr(config.drafter, key, value)
    drafter = randomised(Drafter(DrafterShape.from_config(config)), seed=5)
    info = make_target_info(config)
    folder = export_hf(drafter, config, info, root / "out", run_record=RECORD, dtype="float32")
    model, loading = reference.DFlash2DraftModel.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), loading
    return load_drafter(folder, torch.float32).eval(), model.eval()


def our_hidden(drafter: Drafter, taps: Tensor, embedded: Tensor, anchors: Tensor) -> Tensor:
    """Taps [B, S, T*H], block inputs [B, A, W, H], anchors [B, A] -> [B, A, W, H]; every row is one document."""
    positions = torch.arange(taps.shape[1]).expand(taps.shape[0], -1)
    visible = context_masks(
        drafter.shape.layer_types,
        drafter.shape.sliding_window,
        anchor_positions_local=anchors,
        block_document_ids=torch.zeros_like(anchors),
        block_valid=torch.ones_like(anchors, dtype=torch.bool),
        position_ids=positions,
        document_ids=torch.zeros_like(positions),
        block_size=embedded.shape[2],
    )
    slots = anchors[..., None] + torch.arange(embedded.shape[2])
    return drafter(embedded, drafter.encode_context(taps), slots, positions, visible)


def their_hidden(model: Any, taps: Tensor, embedded: Tensor) -> Tensor:
    """Taps [B, S, T*H] of exactly the context and block inputs [B, W, H] -> [B, W, H]."""
    end = taps.shape[1] + embedded.shape[1]
    return model(target_hidden=taps, noise_embedding=embedded, position_ids=torch.arange(end)[None])


def unary_of(drafter: Drafter, logits: Tensor) -> tuple[Tensor, Tensor]:
    """The best C logits of every slot, scaled and capped, and their ids."""
    values, ids = logits.topk(drafter.shape.selector_top_k, -1)
    return values, ids


@cache
@torch.no_grad()
def compared(experiment: str) -> Compared:
    """Both implementations over all blocks; made once a family."""
    generator = torch.Generator().manual_seed(3)
    with TemporaryDirectory() as root:
        drafter, model = exported(experiment, Path(root))
    shape, count = drafter.shape, BLOCKS // len(CONTEXTS)
    embedding = torch.randn(VOCAB, shape.hidden_size, generator=generator)
    head = torch.nn.Linear(shape.hidden_size, VOCAB, bias=False)
    head.weight.copy_(torch.randn(head.weight.shape, generator=generator) * 0.3)
    parts: dict[str, list[Tensor]] = {name: [] for name in ("h", "h2", "l", "l2", "p", "p2", "first")}
    gaps = []
    for length in CONTEXTS:
        taps = torch.randn(count, length, shape.num_taps * shape.hidden_size, generator=generator)
        ids = torch.full((count, 1, shape.block_size), shape.mask_token_id)
        ids[..., 0] = torch.randint(VOCAB - 1, (count, 1), generator=generator)
        embedded, anchor = drafter.embed_blocks(ids, embedding), ids[:, 0, 0]
        hidden = our_hidden(drafter, taps, embedded, torch.full((count, 1), length))[:, 0]
        theirs = their_hidden(model, taps, embedded[:, 0])
        logits, their_logits = head(hidden[:, 1:]), model.compute_logits(theirs[:, 1:], head)
        unary, candidates = unary_of(drafter, logits)
        selector = drafter.candidate_selector
        path, _ = selector.walk(hidden[:, 1:], unary, candidates, anchor)
        their_path, _, _ = model.propose(theirs[:, 1:], anchor, head, 0.0)
        before = torch.cat([anchor[:, None], path[:, :-1]], 1)
        best = selector.scores(hidden[:, 1:], unary, candidates, before).topk(2, -1).values
        gaps.append(float((best[..., 0] - best[..., 1]).min()))
        values = (hidden, theirs, logits, their_logits, path, their_path, candidates[..., 0])
        for name, value in zip(parts, values, strict=True):
            parts[name].append(value)
    whole = {name: torch.cat(values) for name, values in parts.items()}
    return Compared(
        shape=shape,
        hidden=(whole["h"], whole["h2"]),
        logits=(whole["l"], whole["l2"]),
        path=(whole["p"], whole["p2"]),
        first_choice=whole["first"],
        smallest_gap=min(gaps),
    )


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_hidden_states_and_unary_logits_of_1000_blocks_agree_to_1e_5(experiment: str) -> None:
    case = compared(experiment)
    assert case.hidden[0].shape == (BLOCKS, case.shape.block_size, case.shape.hidden_size)
    assert relative_error(*case.hidden) < TOLERANCE
    assert relative_error(*case.logits) < TOLERANCE


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_the_selector_walks_the_same_path_through_1000_blocks(experiment: str) -> None:
    case = compared(experiment)
    ours, theirs = case.path
    assert case.smallest_gap > TIE, "a tie: take another seed"
    assert ours.shape == (BLOCKS, case.shape.num_drafted)
    assert torch.equal(ours, theirs)
    swayed = (ours != case.first_choice).any(-1).float().mean()
    assert swayed > 0.5, "the selector must matter here, or the test shows nothing"


@torch.no_grad()
@pytest.mark.parametrize(("experiment", "kernel"), [*((name, 2) for name in EXPERIMENTS), ("glm53", 3)])
def test_blocks_side_by_side_equal_the_reference_on_each_alone(experiment: str, kernel: int, tmp_path: Path) -> None:
    """Convolutions end at block edges and windows at each block's own anchor, though blocks of a row overlap."""
    drafter, model = exported(experiment, tmp_path, conv_kernel_size=kernel)
    shape, generator = drafter.shape, torch.Generator().manual_seed(8)
    anchors = torch.arange(1, 2 * WINDOW, 4)[None]  # [1, A], closer than a block is long
    taps = torch.randn(1, 2 * WINDOW, shape.num_taps * shape.hidden_size, generator=generator)
    ids = torch.full((1, anchors.shape[1], shape.block_size), shape.mask_token_id)
    ids[..., 0] = torch.randint(VOCAB - 1, anchors.shape, generator=generator)
    embedded = drafter.embed_blocks(ids, torch.randn(VOCAB, shape.hidden_size, generator=generator))
    ours = our_hidden(drafter, taps, embedded, anchors)[0]
    for block, anchor in enumerate(anchors[0].tolist()):
        theirs = their_hidden(model, taps[:, :anchor], embedded[:, block])
        assert relative_error(ours[block], theirs[0]) < TOLERANCE, f"block at {anchor}"


@torch.no_grad()
def test_a_window_one_token_wider_would_be_noticed() -> None:
    """The comparison above can fail: the window is what it says, to the token."""
    with TemporaryDirectory() as root:
        drafter, model = exported("glm53_flash_swa", Path(root))
    for layer in model.layers:
        layer.self_attn.sliding_window += 1
    shape, length = drafter.shape, 2 * WINDOW
    taps = torch.randn(1, length, shape.num_taps * shape.hidden_size)
    ids = torch.full((1, 1, shape.block_size), shape.mask_token_id)
    embedded = drafter.embed_blocks(ids, torch.randn(VOCAB, shape.hidden_size))
    ours = our_hidden(drafter, taps, embedded, torch.tensor([[length]]))[:, 0]
    assert relative_error(ours, their_hidden(model, taps, embedded[:, 0])) > 1000 * TOLERANCE
