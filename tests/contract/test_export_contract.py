"""What other programs read from an export: the reference implementation, transformers, and the file's own header."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch

from dflash2_train.config import RunConfig
from dflash2_train.export.hf import export_hf, load_drafter
from dflash2_train.masks import context_masks
from tests.cases import RECORD, make_drafter, make_target_info

CONTEXT = 11  # longer than the tiny window of 6, so that the sliding layer hides something
HIDDEN, VOCAB, TAPS, BLOCK = 32, 96, 3, 4


@pytest.fixture
def folder(tiny_config: RunConfig, tmp_path: Path) -> Path:
    return export_hf(
        make_drafter(tiny_config),
        tiny_config,
        make_target_info(tiny_config),
        tmp_path / "out",
        run_record=RECORD,
        dtype="float32",
    )


def contract_tensors(config: RunConfig) -> dict[str, tuple[int, ...]]:
    """The published list, written down a second time from the layout's description."""
    d, hidden, vocab = config.drafter, config.target.hidden_size, config.target.vocab_size
    names: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(d.target_layer_ids) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        "candidate_selector.hidden_projection.weight": (d.selector_rank, hidden),
        "candidate_selector.predecessor_codebook": (vocab, d.selector_rank),
        "candidate_selector.successor_codebook": (vocab, d.selector_rank),
    }
    for i in range(d.num_layers):
        at = f"layers.{i}."
        names |= {at + "input_layernorm.weight": (hidden,), at + "post_attention_layernorm.weight": (hidden,)}
        names |= {at + f"self_attn.{side}_norm.weight": (d.head_dim,) for side in "qk"}
        names |= {at + f"self_attn.{side}_proj.weight": (d.num_kv_heads * d.head_dim, hidden) for side in "kv"}
        names[at + "self_attn.q_proj.weight"] = (d.num_heads * d.head_dim, hidden)
        names[at + "self_attn.o_proj.weight"] = (hidden, d.num_heads * d.head_dim)
        names |= {at + f"mlp.{side}_proj.weight": (d.intermediate_size, hidden) for side in ("gate", "up")}
        names[at + "mlp.down_proj.weight"] = (hidden, d.intermediate_size)
        for conv in ("attention_conv", "mlp_conv"):
            groups = hidden // d.conv_group_size
            names[at + conv + ".base_kernel"] = (2, d.conv_kernel_size, hidden)
            names[at + conv + ".kernel_projection.weight"] = (2 * d.conv_kernel_size * groups, hidden)
    assert len(names) == 6 + 15 * d.num_layers
    return names


def test_the_file_is_its_header_and_two_bytes_a_parameter(tiny_config: RunConfig, tmp_path: Path) -> None:
    out = export_hf(
        make_drafter(tiny_config), tiny_config, make_target_info(tiny_config), tmp_path / "out", run_record=RECORD
    )
    raw = (out / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    expected = contract_tensors(tiny_config)
    assert {name: tuple(entry["shape"]) for name, entry in header.items()} == expected
    assert {entry["dtype"] for entry in header.values()} == {"BF16"}
    parameters = sum(torch.Size(shape).numel() for shape in expected.values())
    assert len(raw) - 8 - length == 2 * parameters


def test_transformers_keeps_window_and_layer_types(folder: Path, tiny_config: RunConfig) -> None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    assert config.model_type == "qwen3"
    assert config.layer_types == ["sliding_attention", "full_attention"]
    assert config.sliding_window == 6
    assert config.is_causal is False
    assert config.rope_parameters["rope_theta"] == tiny_config.drafter.rope_theta
    assert config.dflash_config["target_layer_ids"] == [0, 2, 4]
    config.save_pretrained(folder.parent / "again")
    again = AutoConfig.from_pretrained(folder.parent / "again")
    assert (again.layer_types, again.sliding_window) == (config.layer_types, config.sliding_window)


def test_a_reader_of_the_mask_file_gets_the_training_vector_bit_for_bit(folder: Path, tiny_config: RunConfig) -> None:
    """As servers read it: a weights-only load, flattened, H elements."""
    vector = torch.load(folder / "mask_embedding.pt", weights_only=True).flatten()
    assert torch.equal(vector, make_drafter(tiny_config).mask_embedding.detach())


def test_the_reference_implementation_drafts_the_same_from_the_exported_folder(folder: Path) -> None:
    """Hidden states, unary candidates and the selector's path of one block, context beyond the window."""
    reference_module = pytest.importorskip("dflash.model")
    reference = reference_module.DFlash2DraftModel.from_pretrained(folder, dtype=torch.float32).eval()
    drafter = load_drafter(folder, torch.float32).eval()
    generator = torch.Generator().manual_seed(3)
    taps = torch.randn(1, CONTEXT, TAPS * HIDDEN, generator=generator)
    embedding = torch.randn(VOCAB, HIDDEN, generator=generator)
    head = torch.nn.Linear(HIDDEN, VOCAB, bias=False)
    ids = torch.full((1, 1, BLOCK), drafter.shape.mask_token_id)
    ids[..., 0] = 7
    positions, block_positions = torch.arange(CONTEXT)[None], torch.arange(CONTEXT, CONTEXT + BLOCK)[None, None]

    with torch.no_grad():
        blocks = drafter.embed_blocks(ids, embedding)
        visible = context_masks(
            drafter.shape.layer_types,
            drafter.shape.sliding_window,
            anchor_positions_local=block_positions[:, :, 0],
            block_document_ids=torch.zeros(1, 1, dtype=torch.long),
            block_valid=torch.ones(1, 1, dtype=torch.bool),
            position_ids=positions,
            document_ids=torch.zeros_like(positions),
            block_size=BLOCK,
        )
        hidden = drafter(blocks, drafter.encode_context(taps), block_positions, positions, visible)[:, 0]
        theirs = reference(
            target_hidden=taps, noise_embedding=blocks[:, 0], position_ids=torch.arange(CONTEXT + BLOCK)[None]
        )
        torch.testing.assert_close(hidden, theirs, atol=1e-5, rtol=1e-5)

        anchor = ids[:, 0, 0]
        unary, candidates = head(hidden[:, 1:]).topk(drafter.shape.selector_top_k, dim=-1)
        path, _ = drafter.candidate_selector.walk(hidden[:, 1:], unary.float(), candidates, anchor)
        their_path, _, _ = reference.propose(theirs[:, 1:], anchor, head, 0.0)
    assert path.tolist() == their_path.tolist()
    assert path.tolist() != candidates[..., 0].tolist(), "the selector must matter here, or the test shows nothing"
