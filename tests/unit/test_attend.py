"""The attention paths: one result, one mask rule, and memory and work that grow with what is seen."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dflash2_train.config import ConfigError
from dflash2_train.masks import ContextSpans, context_masks
from dflash2_train.model import attend_chunked, attend_flex
from dflash2_train.model.attend import choose_attend
from dflash2_train.model.attend_chunked import COLUMNS_MULTIPLE, MAX_WASTE, ChunkedAttend
from dflash2_train.model.attend_dense import Attend, DenseAttend, KeysValues, attend_dense, score_bias
from dflash2_train.model.attend_flex import TILE, FlexAttend
from tests.drafters import tiny_shape

KEY_HEADS, PER_KEY, SIZE = 2, 3, 8
ONE_BLOCK, SOME_BLOCKS, ALL_BLOCKS = 1, 8000, 1 << 24  # bytes of a chunk
WINDOWS = [None, 6, 40]
unfused = pytest.mark.filterwarnings("ignore:flex_attention called without")


@dataclass(frozen=True)
class Scene:
    """What one attention call takes."""

    spans: ContextSpans
    queries: Tensor  # [B, M, A, W, R, D]
    context: KeysValues
    block: KeysValues

    @property
    def width(self) -> int:
        return self.queries.shape[3]

    def to(self, dtype: torch.dtype) -> Scene:
        def cast(pair: KeysValues) -> KeysValues:
            return pair[0].to(dtype), pair[1].to(dtype)

        return replace(self, queries=self.queries.to(dtype), context=cast(self.context), block=cast(self.block))


def tensors(spans: ContextSpans, width: int, size: int = SIZE) -> Scene:
    (rows, blocks), generator = spans.stop.shape, torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    context = (draw(rows, KEY_HEADS, spans.num_keys, size), draw(rows, KEY_HEADS, spans.num_keys, size))
    own = (rows, KEY_HEADS, blocks, width, size)
    queries = draw(rows, KEY_HEADS, blocks, width, PER_KEY, size) * size**-0.5
    return Scene(spans, queries, context, (draw(*own), draw(*own)))


def packed(window: int | None, width: int = 4) -> Scene:
    """Two rows: documents of 17, 9 and 11 tokens with 3 of padding; one of 40. Anchors out of order, padding blocks."""
    lengths = (17, 9, 11)
    spans = context_masks(
        ["full_attention" if window is None else "sliding_attention"],
        window,
        anchor_positions_local=torch.tensor([[0, 3, 16, 9, 1, 8, 5, 10, 4], [39, 1, 12, 13, 20, 33, 33, 0, 0]]),
        block_document_ids=torch.tensor([[0, 0, 0, 0, 1, 1, 2, 2, -1], [0, 0, 0, 0, 0, 0, 0, 0, 0]]),
        block_valid=torch.tensor([[True] * 8 + [False], [True] * 7 + [False] * 2]),
        position_ids=torch.tensor([[n for length in lengths for n in range(length)] + [0] * 3, [*range(40)]]),
        document_ids=torch.tensor([[0] * 17 + [1] * 9 + [2] * 11 + [-1] * 3, [0] * 40]),
        block_size=width,
    )
    return tensors(next(iter(spans.values())), width)


def long_row(anchors: int, tokens: int, width: int = 4) -> ContextSpans:
    """One document with evenly spread anchors."""
    stop = torch.arange(1, anchors + 1)[None] * tokens // anchors
    return ContextSpans(first=torch.zeros(1, anchors, 1, dtype=torch.int64), stop=stop, num_keys=tokens)


def chunked(scene: Scene, chunk_bytes: int) -> ChunkedAttend:
    return ChunkedAttend(
        scene.spans,
        block_size=scene.width,
        rows_per_block=KEY_HEADS * scene.width * PER_KEY,
        chunk_bytes=chunk_bytes,
        dtype=scene.queries.dtype,
    )


def flex(scene: Scene, *, compiled: bool = False) -> FlexAttend:
    return FlexAttend(scene.spans, block_size=scene.width, heads_per_key=PER_KEY, compiled=compiled)


def gradients(attend: Attend, scene: Scene) -> tuple[Tensor, ...]:
    """The output and the gradient by every input."""
    inputs = [part.clone().requires_grad_() for part in (scene.queries, *scene.context, *scene.block)]
    out = attend(inputs[0], (inputs[1], inputs[2]), (inputs[3], inputs[4]))
    return out.detach(), *torch.autograd.grad((out * torch.linspace(-1, 1, SIZE, device=out.device)).sum(), inputs)


@pytest.mark.parametrize("slots", [1, 4])
def test_the_reference_equals_one_softmax_over_context_and_own_block(slots: int) -> None:
    scene = packed(None)
    visible = torch.rand(2, 9, slots, 40) > 0.5
    visible[0, 0] = False  # a block without context
    out = attend_dense(scene.queries, scene.context, scene.block, score_bias(visible, torch.float32))
    for row in range(2):
        for index in range(9):
            keys, values = (
                torch.cat([scene.context[part][row], scene.block[part][row, :, index]], 1).repeat_interleave(PER_KEY, 0)
                for part in range(2)
            )
            own = scene.queries[row, :, index].transpose(1, 2).flatten(0, 1)  # [heads, W, D]
            mask = torch.cat([visible[row, index].expand(4, -1), torch.ones(4, 4, dtype=torch.bool)], 1)
            expected = F.scaled_dot_product_attention(own, keys, values, attn_mask=mask, scale=1.0)
            found = out[row, :, index].transpose(1, 2).flatten(0, 1)
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("chunk_bytes", [ONE_BLOCK, SOME_BLOCKS, ALL_BLOCKS])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_chunks_equal_the_reference_in_values_and_gradients(
    window: int | None, chunk_bytes: int, dtype: torch.dtype, tolerance: float
) -> None:
    scene = packed(window).to(dtype)
    expected = gradients(DenseAttend(scene.spans.dense()), scene)
    for found, wanted in zip(gradients(chunked(scene, chunk_bytes), scene), expected, strict=True):
        assert found.dtype == dtype
        torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)


def test_chunks_in_bf16_are_as_near_to_fp32_as_the_reference_is() -> None:
    scene = packed(None)
    exact = gradients(DenseAttend(scene.spans.dense()), scene.to(torch.bfloat16).to(torch.float32))
    half = scene.to(torch.bfloat16)
    dense = gradients(DenseAttend(scene.spans.dense()), half)
    for found, reference, wanted in zip(gradients(chunked(half, SOME_BLOCKS), half), dense, exact, strict=True):
        error, allowed = ((value.float() - wanted).norm() / wanted.norm() for value in (found, reference))
        assert error <= 1.2 * allowed + 1e-3 and allowed < 0.02


@unfused
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("width", [4, 5])
def test_flex_attention_equals_the_reference(window: int | None, width: int) -> None:
    scene = packed(window, width)
    expected = DenseAttend(scene.spans.dense())(scene.queries, scene.context, scene.block)
    found = flex(scene)(scene.queries, scene.context, scene.block)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@unfused
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("path", ["dense", "one block", "some blocks", "all blocks", "flex"])
def test_what_a_block_must_not_see_leaves_it_bit_equal_and_what_it_sees_changes_it(
    window: int | None, path: str
) -> None:
    scene = packed(window)
    sizes = {"one block": ONE_BLOCK, "some blocks": SOME_BLOCKS, "all blocks": ALL_BLOCKS}
    attends: dict[str, Attend] = {"dense": DenseAttend(scene.spans.dense()), "flex": flex(scene)}
    attend = attends[path] if path in attends else chunked(scene, sizes[path])
    visible = scene.spans.dense().expand(-1, -1, scene.width, -1)
    base = attend(scene.queries, scene.context, scene.block)
    for key in range(scene.spans.num_keys):
        keys, values = (part.clone() for part in scene.context)
        keys[:, :, key], values[:, :, key] = 50.0, -1e4
        out = attend(scene.queries, (keys, values), scene.block)
        for row in range(2):
            changed = (out[row] != base[row]).any(-1).any(-1)  # [M, A, W]
            assert torch.equal(changed, visible[row, ..., key].expand_as(changed)), (row, key)
    for block in range(9):
        own_keys, own_values = (part.clone() for part in scene.block)
        own_keys[:, :, block], own_values[:, :, block] = 50.0, -1e4
        out = attend(scene.queries, scene.context, (own_keys, own_values))
        changed = (out != base).flatten(3).any(-1).any(1)  # [B, A]
        assert torch.equal(changed, (torch.arange(9) == block).expand(2, -1)), block


@pytest.mark.parametrize("chunk_bytes", [ONE_BLOCK, ALL_BLOCKS])
def test_a_hidden_key_gets_exactly_no_gradient(chunk_bytes: int) -> None:
    scene = packed(6)
    _, _, grad_keys, grad_values, *_ = gradients(chunked(scene, chunk_bytes), scene)
    seen = scene.spans.dense().flatten(1, 2).any(1)  # [B, S]
    assert seen.any() and not seen.all()
    for grad in (grad_keys, grad_values):
        assert torch.equal((grad != 0).any(-1), seen.unsqueeze(1).expand(-1, KEY_HEADS, -1))


def test_chunks_stay_within_their_budget_and_compute_little_that_nobody_sees() -> None:
    for scene in (packed(None), packed(6), tensors(long_row(64, 512), 4)):
        for chunk_bytes in (SOME_BLOCKS, ALL_BLOCKS):
            plan = chunked(scene, chunk_bytes)
            rows = KEY_HEADS * PER_KEY * scene.width
            needed = (scene.spans.stop - scene.spans.first[..., 0] + scene.width).sum() * rows
            assert plan.score_elements <= MAX_WASTE * needed
            single = rows * (scene.spans.num_keys + scene.width)  # the least that a block may need
            assert plan.buffer_elements * 4 <= max(chunk_bytes, single * 4)
    apart = chunked(tensors(long_row(64, 512), 4), ONE_BLOCK)
    assert len(apart.chunks) == 64


def test_work_grows_at_most_linearly_in_anchors_and_in_tokens() -> None:
    def scores(anchors: int, tokens: int) -> int:
        return chunked(tensors(long_row(anchors, tokens), 4, size=1), 1 << 20).score_elements

    def tiles(anchors: int, tokens: int) -> int:
        mask = FlexAttend(long_row(anchors, tokens), block_size=4, heads_per_key=8, compiled=False).block_mask
        assert mask.full_kv_num_blocks is not None
        return int(mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum())

    for count in (scores, tiles):
        base = count(64, 2048)
        assert base < count(128, 2048) <= 2.1 * base
        assert base < count(64, 4096) <= 2.1 * base


def test_a_row_of_many_documents_costs_little_more_than_its_documents_alone() -> None:
    lengths = [32] * 16
    ids = torch.arange(16).repeat_interleave(32)[None]
    spans = context_masks(
        ["full_attention"],
        None,
        anchor_positions_local=torch.tensor([[8, 16, 24] * 16]),
        block_document_ids=torch.arange(16).repeat_interleave(3)[None],
        block_valid=torch.ones(1, 48, dtype=torch.bool),
        position_ids=torch.arange(32).repeat(16)[None],
        document_ids=ids,
        block_size=4,
    )["full_attention"]
    plan = chunked(tensors(spans, 4), ALL_BLOCKS)
    assert plan.score_elements < 0.1 * 48 * sum(lengths) * KEY_HEADS * PER_KEY * 4


@pytest.mark.parametrize("budget", [1 << 20, 1 << 24])
def test_weights_are_kept_for_the_backward_pass_within_their_budget_and_else_nothing_of_their_size(
    budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attend_chunked, "KEPT_WEIGHT_BYTES", budget)
    scene = tensors(long_row(64, 512), 4)
    inputs = [part.clone().requires_grad_() for part in (scene.queries, *scene.context, *scene.block)]
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    attend = chunked(scene, SOME_BLOCKS)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        attend(inputs[0], (inputs[1], inputs[2]), (inputs[3], inputs[4]))
    weights = [attend.score_elements, 64 * KEY_HEADS * 4 * PER_KEY * 4]  # of the context, and of the own blocks
    assert 1 << 20 < 4 * sum(weights) < 1 << 24
    assert kept == [part.numel() for part in inputs] + (weights if budget > 1 << 20 else [])


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kept_weights_and_those_made_again_give_the_same_bits(
    window: int | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = packed(window).to(dtype)
    kept = gradients(chunked(scene, SOME_BLOCKS), scene)
    monkeypatch.setattr(attend_chunked, "KEPT_WEIGHT_BYTES", 0)
    made_again = gradients(chunked(scene, SOME_BLOCKS), scene)
    assert all(torch.equal(left, right) for left, right in zip(kept, made_again, strict=True))


@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize("tokens", [500, 512])
def test_columns_are_rounded_up_by_keys_that_stay_hidden(window: int | None, tokens: int) -> None:
    stop = torch.tensor([[7, 131, 245, 246, 247, 400, tokens - 1]])
    first = torch.zeros(1, 7, 1, dtype=torch.int64)
    if window is not None:
        first = (stop.unsqueeze(-1) + torch.arange(4) - window).clamp_min(0).minimum(stop.unsqueeze(-1))
    scene = tensors(ContextSpans(first=first, stop=stop, num_keys=tokens), 4).to(torch.float64)
    plan = chunked(scene, ONE_BLOCK)
    columns = [chunk.num_keys + 4 for chunk in plan.chunks]
    assert any(chunk.num_keys > int(stop.flatten()[index]) for index, chunk in enumerate(plan.chunks))
    limits = [chunk.keys.stop == tokens for chunk in plan.chunks]
    assert all(count % COLUMNS_MULTIPLE == 0 or count < 128 or at for count, at in zip(columns, limits, strict=True))
    expected = gradients(DenseAttend(scene.spans.dense()), scene)
    for found, wanted in zip(gradients(plan, scene), expected, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(("blocks", "width"), [(3, 5), (40, 4), (70, 12)])
@pytest.mark.parametrize("window", [None, 150])
def test_the_listed_tiles_hold_all_that_is_seen_and_full_ones_nothing_else(
    blocks: int, width: int, window: int | None
) -> None:
    heads = 3
    anchors = torch.arange(blocks)[None] * (300 // blocks) + 1
    spans = context_masks(
        ["full_attention" if window is None else "sliding_attention"],
        window,
        anchor_positions_local=torch.cat([anchors, anchors], 1),
        block_document_ids=torch.tensor([[0] * blocks + [1] * blocks]),
        block_valid=torch.ones(1, 2 * blocks, dtype=torch.bool),
        position_ids=torch.cat([torch.arange(310), torch.arange(390)])[None],
        document_ids=torch.tensor([[0] * 310 + [1] * 390]),
        block_size=width,
    ).popitem()[1]
    mask = FlexAttend(spans, block_size=width, heads_per_key=heads, compiled=False).block_mask
    rows = 2 * blocks * width * heads
    seen = seen_by(spans, width, heads)  # [rows, keys up to whole tiles]
    query, key = torch.arange(rows)[:, None], torch.arange(seen.shape[1])[None]
    assert torch.equal(mask.mask_mod(torch.tensor(0), torch.tensor(0), query, key), seen)
    partial, full = (listed(*lists) for lists in tile_lists(mask))
    assert not (partial & full).any()
    spread = partial | full
    covered = spread.repeat_interleave(TILE, 0).repeat_interleave(TILE, 1)[:rows]
    assert (covered | ~seen).all()
    assert seen[full.repeat_interleave(TILE, 0).repeat_interleave(TILE, 1)[:rows]].all()
    assert full.any() or window is not None or blocks == 3
    tiles = F.pad(seen, (0, 0, 0, -rows % TILE)).unflatten(0, (-1, TILE)).unflatten(2, (-1, TILE)).any(3).any(1)
    assert (spread == tiles).float().mean() > 0.9  # hardly a tile that nobody needs


def seen_by(spans: ContextSpans, width: int, heads: int) -> Tensor:
    """[A * W * heads, context and own keys up to whole tiles], from the dense mask."""
    blocks = spans.stop.shape[1]
    context = F.pad(spans.dense()[0].expand(-1, width, -1), (0, -spans.num_keys % TILE))  # [A, W, S']
    own = torch.eye(blocks, dtype=torch.bool).repeat_interleave(width, 1)  # [A, A * W]
    own = F.pad(own, (0, -own.shape[1] % TILE)).unsqueeze(1).expand(-1, width, -1)
    return torch.cat([context, own], -1).flatten(0, 1).repeat_interleave(heads, 0)


def tile_lists(mask: object) -> list[tuple[Tensor, Tensor]]:
    names = (("kv_num_blocks", "kv_indices"), ("full_kv_num_blocks", "full_kv_indices"))
    return [tuple(getattr(mask, name)[0, 0] for name in pair) for pair in names]  # type: ignore[misc]


def listed(counts: Tensor, indices: Tensor) -> Tensor:
    """Flags [query tiles, key tiles] of the tiles that a list names."""
    flags = torch.zeros(indices.shape, dtype=torch.bool)
    for tile, count in enumerate(counts.tolist()):
        flags[tile, indices[tile, :count].long()] = True
    return flags


def test_tile_lists_are_small_and_their_size_is_checked_before_they_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    # 3,072 blocks of 8 over 8,192 tokens: a dense mask has 0.8 GB for each head of a group.
    assert attend_flex.table_bytes(1, 3072 * 8 * 4, 8192, 3072 * 8) < 16 << 20
    scene = packed(None)
    monkeypatch.setattr(attend_flex, "MAX_TABLE_BYTES", 100)
    with pytest.raises(ConfigError, match=r"train\.attention='flex'.*chunked"):
        flex(scene)


def test_the_path_follows_the_device_and_a_wrong_one_is_refused() -> None:
    scene, shape = packed(None), tiny_shape()
    blocks = torch.zeros(2, 9, 4, shape.hidden_size)
    assert isinstance(choose_attend("auto", scene.spans, shape, blocks), ChunkedAttend)
    assert isinstance(choose_attend("chunked", scene.spans, shape, blocks), ChunkedAttend)
    assert isinstance(choose_attend("dense", scene.spans, shape, blocks), DenseAttend)
    with pytest.raises(ConfigError, match=r"train\.attention='flex'.*CUDA"):
        choose_attend("flex", scene.spans, shape, blocks)
    with pytest.raises(ConfigError, match=r"train\.attention='sdpa'"):
        choose_attend("sdpa", scene.spans, shape, blocks)


def test_softmax_of_bf16_scores_computes_in_fp32() -> None:
    scores = (torch.randn(16, 500) * 3).bfloat16()
    assert torch.equal(scores.softmax(-1), scores.float().softmax(-1).bfloat16())


@pytest.mark.gpu
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("path", ["chunked", "flex"])
def test_on_a_gpu_every_path_equals_the_reference_in_values_and_gradients(window: int | None, path: str) -> None:
    scene = tensors(packed(window).spans, 4, size=64)
    spans = ContextSpans(first=scene.spans.first.cuda(), stop=scene.spans.stop.cuda(), num_keys=scene.spans.num_keys)
    scene = replace(
        scene,
        spans=spans,
        queries=scene.queries.cuda(),
        context=(scene.context[0].cuda(), scene.context[1].cuda()),
        block=(scene.block[0].cuda(), scene.block[1].cuda()),
    )
    attend: Attend = chunked(scene, SOME_BLOCKS) if path == "chunked" else flex(scene, compiled=True)

    def run(attend: Attend) -> list[Tensor]:
        inputs = [part.clone().requires_grad_() for part in (scene.queries, *scene.context, *scene.block)]
        out = attend(inputs[0], (inputs[1], inputs[2]), (inputs[3], inputs[4]))
        return [out.detach(), *torch.autograd.grad(out.square().sum(), inputs)]

    for found, wanted in zip(run(attend), run(DenseAttend(spans.dense())), strict=True):
        torch.testing.assert_close(found, wanted, atol=2e-3, rtol=2e-3)
