"""The assembled drafter: isolation, packing, decoding, start, gradients, tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

from dflash2_train.masks import context_masks
from dflash2_train.model import attend
from dflash2_train.model.drafter import Drafter
from dflash2_train.model.drafter_config import DrafterShape
from dflash2_train.model.initialise import fc_from_taps, initialise
from tests.drafters import random_drafter, tiny_shape

TOKENS = 20
WIDTH = 4
DOCUMENT_LENGTHS = (11, 7)  # and 2 of padding


@dataclass(frozen=True)
class Scene:
    """Everything that the forward pass takes."""

    block_ids: Tensor
    embedding: Tensor
    taps: Tensor
    anchors: Tensor  # in the document
    anchor_documents: Tensor
    valid: Tensor
    positions: Tensor
    documents: Tensor


def scene(drafter: Drafter) -> Scene:
    """One row, two documents. Blocks: document 0 at 0 (no context), 3 and 9; document 1 at 2 and 6; one of padding."""
    shape = drafter.shape
    generator = torch.Generator().manual_seed(7)
    first, second = DOCUMENT_LENGTHS
    block_ids = torch.full((1, 6, WIDTH), shape.mask_token_id)
    block_ids[..., 0] = torch.tensor([3, 5, 7, 9, 11, 0])
    return Scene(
        block_ids=block_ids,
        embedding=torch.randn(shape.vocab_size, shape.hidden_size, generator=generator),
        taps=torch.randn(1, TOKENS, shape.num_taps * shape.hidden_size, generator=generator),
        anchors=torch.tensor([[0, 3, 9, 2, 6, 0]]),
        anchor_documents=torch.tensor([[0, 0, 0, 1, 1, -1]]),
        valid=torch.tensor([[True] * 5 + [False]]),
        positions=torch.tensor([[*range(first), *range(second), 0, 0]]),
        documents=torch.tensor([[0] * first + [1] * second + [-1] * 2]),
    )


def run(drafter: Drafter, given: Scene, width: int = WIDTH) -> Tensor:
    dtype = drafter.mask_embedding.dtype
    visible = context_masks(
        drafter.shape.layer_types,
        drafter.shape.sliding_window,
        anchor_positions_local=given.anchors,
        block_document_ids=given.anchor_documents,
        block_valid=given.valid,
        position_ids=given.positions,
        document_ids=given.documents,
        block_size=width,
    )
    context = drafter.encode_context(given.taps.to(dtype))
    embedded = drafter.embed_blocks(given.block_ids[..., :width], given.embedding.to(dtype))
    block_positions = given.anchors.unsqueeze(-1) + torch.arange(width)
    return drafter(embedded, context, block_positions, given.positions, visible)


@pytest.fixture(params=["dense", "chunked", "chunks of one block"])
def attention(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every attention path that a CPU has."""
    if request.param == "chunks of one block":
        monkeypatch.setattr(attend, "CPU_CHUNK_BYTES", 1)
        return "chunked"
    return str(request.param)


def test_every_attention_path_gives_the_same_states_and_gradients(attention: str) -> None:
    drafter = random_drafter().double()  # fp32 gradients of large parts that cancel would show the order of additions
    given = scene(drafter)
    drafter.attention = "dense"
    expected = run(drafter, given)
    parameters = {name: value for name, value in drafter.named_parameters() if "selector" not in name}
    wanted = torch.autograd.grad(expected.sin().sum(), list(parameters.values()))
    drafter.attention = attention
    found = run(drafter, given)
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)
    for name, grad, other in zip(
        parameters, torch.autograd.grad(found.sin().sum(), list(parameters.values())), wanted, strict=True
    ):
        torch.testing.assert_close(grad, other, atol=1e-9, rtol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


@torch.no_grad()
def test_what_a_block_must_not_see_leaves_it_bit_equal_and_what_it_sees_changes_it(attention: str) -> None:
    drafter = random_drafter()
    drafter.attention = attention
    given = scene(drafter)
    base = run(drafter, given)
    assert base.isfinite().all()
    document = given.documents[0]
    for token in range(TOKENS):
        taps = given.taps.clone()
        taps[0, token] += 1.0
        changed = run(drafter, replace(given, taps=taps))
        for block in range(6):
            sees = bool(
                given.valid[0, block]
                and document[token] == given.anchor_documents[0, block]
                and given.positions[0, token] < given.anchors[0, block]
            )
            assert torch.equal(base[0, block], changed[0, block]) is not sees, (token, block)


@torch.no_grad()
def test_blocks_do_not_see_each_other(attention: str) -> None:
    drafter = random_drafter()
    drafter.attention = attention
    given = scene(drafter)
    base = run(drafter, given)
    for block in range(6):
        ids = given.block_ids.clone()
        ids[0, block, 0] = 20
        changed = run(drafter, replace(given, block_ids=ids))
        same = [torch.equal(base[0, other], changed[0, other]) for other in range(6)]
        assert same == [other != block for other in range(6)]


@torch.no_grad()
def test_inside_a_block_every_slot_sees_every_slot(attention: str) -> None:
    drafter = random_drafter(num_layers=1)
    drafter.attention = attention
    given = scene(drafter)
    base = run(drafter, given)
    for slot in range(WIDTH):
        ids = given.block_ids.clone()
        ids[0, 1, slot] = 20
        changed = run(drafter, replace(given, block_ids=ids))
        for other in range(WIDTH):
            assert not torch.equal(base[0, 1, other], changed[0, 1, other]), (slot, other)


@torch.no_grad()
def test_with_sliding_layers_alone_a_token_beyond_the_window_has_no_influence(attention: str) -> None:
    shape = {"num_layers": 2, "layer_types": ("sliding_attention",) * 2, "sliding_window": 5}
    drafter = random_drafter(**shape)
    drafter.attention = attention
    given = scene(drafter)
    base = run(drafter, given)
    for token, expected in ((4, True), (5, False)):  # block at 9: slot 0 sees 9 - j < 5, so 5 .. 8
        taps = given.taps.clone()
        taps[0, token] += 1.0
        changed = run(drafter, replace(given, taps=taps))
        assert torch.equal(base[0, 2], changed[0, 2]) is expected


@torch.no_grad()
def test_packed_rows_equal_single_documents() -> None:
    drafter = random_drafter()
    given = scene(drafter)
    packed = run(drafter, given)
    start = 0
    for document, length in enumerate(DOCUMENT_LENGTHS):
        blocks = (given.anchor_documents[0] == document).nonzero().squeeze(-1)
        alone = run(
            drafter,
            Scene(
                block_ids=given.block_ids[:, blocks],
                embedding=given.embedding,
                taps=given.taps[:, start : start + length],
                anchors=given.anchors[:, blocks],
                anchor_documents=torch.zeros(1, len(blocks), dtype=torch.long),
                valid=torch.ones(1, len(blocks), dtype=torch.bool),
                positions=torch.arange(length)[None],
                documents=torch.zeros(1, length, dtype=torch.long),
            ),
        )
        torch.testing.assert_close(packed[:, blocks], alone, atol=1e-5, rtol=1e-5)
        start += length


@torch.no_grad()
@pytest.mark.parametrize("width", [WIDTH, 2])
def test_decoding_one_block_equals_the_training_pass(width: int) -> None:
    drafter = random_drafter()
    given = scene(drafter)
    trained = run(drafter, given, width)
    context = drafter.encode_context(given.taps[:, : DOCUMENT_LENGTHS[0]])
    cached = drafter.project_context(context, given.positions[:, : DOCUMENT_LENGTHS[0]])
    for block, anchor in ((0, 0), (1, 3), (2, 9)):
        visible = context_masks(
            drafter.shape.layer_types,
            drafter.shape.sliding_window,
            anchor_positions_local=torch.tensor([[anchor]]),
            block_document_ids=torch.zeros(1, 1, dtype=torch.long),
            block_valid=torch.ones(1, 1, dtype=torch.bool),
            position_ids=torch.arange(anchor)[None],
            document_ids=torch.zeros(1, anchor, dtype=torch.long),
            block_size=width,
        )
        decoded = drafter.decode_block(
            drafter.embed_blocks(given.block_ids[:, block, :width], given.embedding),
            anchor + torch.arange(width)[None],
            [(keys[:, :, :anchor], values[:, :, :anchor]) for keys, values in cached],
            visible,
        )
        torch.testing.assert_close(decoded, trained[:, block], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_decoding_without_a_mask_sees_all_of_the_context_or_says_that_the_window_hides_some() -> None:
    full = random_drafter(num_layers=2)
    given = scene(full)
    context = full.encode_context(given.taps[:, :9])
    cached = full.project_context(context, torch.arange(9)[None])
    embedded = full.embed_blocks(given.block_ids[:, 2], given.embedding)
    decoded = full.decode_block(embedded, 9 + torch.arange(WIDTH)[None], cached)
    torch.testing.assert_close(decoded, run(full, given)[:, 2], atol=1e-5, rtol=1e-5)

    mixed = random_drafter()  # window 6
    cached = mixed.project_context(context, torch.arange(9)[None])
    with pytest.raises(ValueError, match="sliding_window=6"):
        mixed.decode_block(embedded, 9 + torch.arange(WIDTH)[None], cached)
    short = [(keys[:, :, :2], values[:, :, :2]) for keys, values in cached]
    assert mixed.decode_block(embedded, 2 + torch.arange(WIDTH)[None], short).isfinite().all()


class _NoConvolution(nn.Module):
    """What a DFlash drafter has in the place of the convolution."""

    def prepare(self, hidden: Tensor) -> tuple[Tensor, None]:
        return hidden, None

    def finish(self, output: Tensor, delta: None) -> Tensor:
        return output


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_untrained_drafter_equals_one_without_convolution_bit_for_bit(dtype: torch.dtype) -> None:
    drafter = Drafter(tiny_shape()).to(dtype)
    given = scene(drafter)
    drafter.reset_mask_embedding(given.embedding[drafter.shape.mask_token_id].to(dtype))
    second_generation = run(drafter, given)
    for layer in drafter.layers:
        layer.attention_conv = _NoConvolution()
        layer.mlp_conv = _NoConvolution()
    assert torch.equal(run(drafter, given), second_generation)


def test_gradient_reaches_every_parameter_but_not_the_embedding() -> None:
    drafter = random_drafter()
    given = scene(drafter)
    given.embedding.requires_grad_()
    hidden = run(drafter, given)
    scores = drafter.candidate_selector.scores(
        hidden, torch.zeros(*hidden.shape[:-1], 3), torch.randint(60, (*hidden.shape[:-1], 3)), given.block_ids
    )
    (hidden.sin().sum() + scores.logsumexp(-1).sum()).backward()
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
        assert parameter.grad.isfinite().all(), name
    assert given.embedding.grad is None


def test_mask_slots_hold_the_learned_vector_and_others_the_frozen_row() -> None:
    drafter = random_drafter()
    given = scene(drafter)
    embedded = drafter.embed_blocks(given.block_ids, given.embedding)
    assert torch.equal(embedded[:, :, 0], given.embedding[given.block_ids[..., 0]])
    assert torch.equal(embedded[:, :, 1:], drafter.mask_embedding.expand(1, 6, WIDTH - 1, -1))


def test_bf16_runs_forward_and_backward_close_to_fp32() -> None:
    drafter = random_drafter()
    given = scene(drafter)
    expected = run(drafter, given).detach()
    drafter = drafter.bfloat16()
    hidden = run(drafter, given)
    assert hidden.dtype == torch.bfloat16 and hidden.isfinite().all()
    assert (hidden.float() - expected).abs().mean() < 0.05 * expected.abs().mean()
    hidden.float().square().mean().backward()
    assert all(
        parameter.grad is not None and parameter.grad.isfinite().all()
        for name, parameter in drafter.named_parameters()
        if "candidate_selector" not in name
    )


def test_padding_blocks_are_finite_and_see_no_context() -> None:
    drafter = random_drafter()
    given = scene(drafter)
    assert run(drafter, given)[0, -1].isfinite().all()


def glm_shape(**changes: object) -> DrafterShape:
    numbers = {
        "hidden_size": 4096,
        "num_layers": 5,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
        "vocab_size": 154880,
        "target_layer_ids": (5, 14, 24, 33, 42),
        "num_target_layers": 45,
        "block_size": 8,
        "mask_token_id": 154856,
        "layer_types": ("sliding_attention",) * 5,
        "sliding_window": 2048,
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 256,
        "selector_top_k": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 1048576,
    }
    return DrafterShape(**(numbers | changes))  # type: ignore[arg-type]


EIGHT_LAYERS = {
    "num_layers": 8,
    "target_layer_ids": (5, 9, 14, 19, 24, 28, 33, 38, 42),
    "layer_types": ("full_attention",) * 8,
    "sliding_window": None,
}


@pytest.mark.parametrize(
    ("shape", "parameters", "tensors"),
    [(glm_shape(), 1_171_080_448, 81), (glm_shape(**EIGHT_LAYERS), 1_842_292_736, 126)],
)
def test_published_tensors_are_the_golden_list(shape: DrafterShape, parameters: int, tensors: int) -> None:
    with torch.device("meta"):
        drafter = Drafter(shape)
    state = {name: tuple(value.shape) for name, value in drafter.state_dict().items()}
    assert state.pop("mask_embedding") == (shape.hidden_size,)
    expected = Drafter.expected_tensors(shape)
    assert state == expected
    assert len(expected) == tensors
    assert sum(torch.Size(size).numel() for size in expected.values()) == parameters


def test_mask_embedding_starts_as_a_row_of_the_target() -> None:
    drafter = Drafter(tiny_shape())
    assert not drafter.mask_embedding.any()
    row = torch.randn(drafter.shape.hidden_size)
    drafter.reset_mask_embedding(row)
    assert torch.equal(drafter.mask_embedding, row)
    for wrong in (torch.zeros_like(row), row[:-1], row * torch.nan):
        with pytest.raises(ValueError, match="mask embedding"):
            drafter.reset_mask_embedding(wrong)


def target_state(drafter: Drafter, layers: int, with_head_norms: bool) -> dict[str, Tensor]:
    own = {name: value for name, value in drafter.state_dict().items() if name.startswith("layers.0.")}
    state = {"model.norm.weight": torch.randn(drafter.shape.hidden_size)}
    for layer in range(layers):
        for name, value in own.items():
            if "conv" not in name and (with_head_norms or "_norm." not in name):
                state["model." + name.replace("layers.0.", f"layers.{layer}.")] = torch.randn_like(value)
    return state


def test_initialising_copies_the_chosen_target_layers_and_the_final_norm() -> None:
    drafter = Drafter(tiny_shape())
    before = {name: value.clone() for name, value in drafter.state_dict().items()}
    state = target_state(drafter, 6, with_head_norms=True)
    report = initialise(drafter, state, {0: 5, 2: 1})
    for layer, source in ((0, 5), (2, 1)):
        for name in ("self_attn.q_proj", "mlp.down_proj", "input_layernorm", "self_attn.k_norm"):
            found = drafter.get_parameter(f"layers.{layer}.{name}.weight")
            assert torch.equal(found, state[f"model.layers.{source}.{name}.weight"])
    assert torch.equal(drafter.norm.weight, state["model.norm.weight"])
    assert len(report.copied) == 2 * 11 + 1 and not report.kept
    for name, value in drafter.state_dict().items():
        assert (name in report.copied) or torch.equal(value, before[name]), name


def test_initialising_keeps_and_reports_what_does_not_fit() -> None:
    drafter = Drafter(tiny_shape())
    state = target_state(drafter, 2, with_head_norms=False)
    state["model.layers.1.mlp.up_proj.weight"] = torch.zeros(7, 32)
    report = initialise(drafter, state.__getitem__, {1: 1})
    assert set(report.kept) == {
        "layers.1.mlp.up_proj.weight",
        "layers.1.self_attn.q_norm.weight",
        "layers.1.self_attn.k_norm.weight",
    }
    assert "(7, 32)" in report.kept["layers.1.mlp.up_proj.weight"]


def test_initialising_refuses_a_missing_tensor_another_norm_and_another_layer() -> None:
    drafter = Drafter(tiny_shape())
    state = target_state(drafter, 1, with_head_norms=True)
    with pytest.raises(ValueError, match="layer_map key 3"):
        initialise(drafter, state, {3: 0})
    with pytest.raises(KeyError, match=r"model\.layers\.4\.input_layernorm"):
        initialise(drafter, state, {0: 4})
    with pytest.raises(ValueError, match=r"norm\.weight"):
        initialise(drafter, state | {"model.norm.weight": torch.ones(3)}, {0: 0})


@torch.no_grad()
def test_fc_can_start_as_a_weighted_sum_of_the_taps() -> None:
    drafter = Drafter(tiny_shape())
    fc_from_taps(drafter, [0.5, 0.0, 2.0])
    taps = torch.randn(1, 4, 3, drafter.shape.hidden_size)
    torch.testing.assert_close(drafter.fc(taps.flatten(2)), 0.5 * taps[:, :, 0] + 2.0 * taps[:, :, 2])
    with pytest.raises(ValueError, match="one a tap"):
        fc_from_taps(drafter, [1.0])
