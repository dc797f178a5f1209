"""A drafter that starts from another computes at first exactly what that one computed, and what was added can learn."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash2_train.checkpoint import save_checkpoint
from dflash2_train.config import ConfigError
from dflash2_train.model.drafter import Drafter
from dflash2_train.model.drafter_config import DrafterShape
from dflash2_train.warm_start import warm_drafter
from tests.cases import edit_json
from tests.drafters import random_drafter, randomise, tiny_shape
from tests.engines import still

LAYERS, CONTEXT = 2, 7
SHAPE = tiny_shape(num_layers=LAYERS)
EMBEDDING = torch.randn(SHAPE.vocab_size, SHAPE.hidden_size, generator=torch.Generator().manual_seed(5))
NEW_PARTS = ("candidate_selector", "_conv.")


def states(drafter: Drafter, taps: Tensor) -> Tensor:
    """Block states [1, W, H] over a context given as tap states by their ids' order [S, T, H]."""
    shape = drafter.shape
    context = drafter.encode_context(taps.flatten(1).unsqueeze(0))
    cached = drafter.project_context(context, torch.arange(CONTEXT).unsqueeze(0))
    ids = torch.tensor([[3, *[shape.mask_token_id] * (shape.block_size - 1)]])
    positions = torch.arange(CONTEXT, CONTEXT + shape.block_size).unsqueeze(0)
    return drafter.decode_block(drafter.embed_blocks(ids, EMBEDDING), positions, cached)


def random_taps(count: int = SHAPE.num_taps) -> Tensor:
    return torch.randn(CONTEXT, count, SHAPE.hidden_size, generator=torch.Generator().manual_seed(6))


def selector_scores(drafter: Drafter, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """(unary, scores) [W, C] of random candidates."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, SHAPE.vocab_size, (SHAPE.block_size, SHAPE.selector_top_k), generator=generator)
    unary = torch.randn(ids.shape, generator=generator)
    return unary, drafter.candidate_selector.scores(hidden[0], unary, ids, ids[:, 0])


def publish(folder: Path, drafter: Drafter, *, mask: bool = True) -> Path:
    folder.mkdir(parents=True)
    tensors = dict(drafter.state_dict())
    vector = tensors.pop("mask_embedding")
    save_file(tensors, folder / "model.safetensors")
    if mask:
        torch.save(vector, folder / "mask_embedding.pt")
    published = drafter.shape.to_published("float32", bos_token_id=0, eos_token_id=1, pad_token_id=None)
    (folder / "config.json").write_text(json.dumps(published))
    return folder


def publish_first_generation(folder: Path, **top: Any) -> tuple[Path, Drafter]:
    """A folder as DFlash 1 drafters are published, and the DFlash 2 with neutral conv and selector that equals it."""
    drafter = Drafter(SHAPE)
    neutral = {name: p.clone() for name, p in drafter.state_dict().items() if any(part in name for part in NEW_PARTS)}
    randomise(drafter).load_state_dict(neutral, strict=False)
    with torch.no_grad():
        drafter.mask_embedding.copy_(EMBEDDING[SHAPE.mask_token_id])
    publish(folder, drafter, mask=False)
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not any(part in name for part in NEW_PARTS)}
    save_file(kept, folder / "model.safetensors")
    edit_json(
        folder / "config.json",
        architectures=["DFlashDraftModel"],
        dflash_config={"mask_token_id": SHAPE.mask_token_id, "target_layer_ids": list(SHAPE.target_layer_ids)},
        is_causal=...,
        rope_parameters=...,
        rope_scaling=None,
        sliding_window=None,
        tie_word_embeddings=True,
        **top,
    )
    return folder, drafter


def test_a_published_drafter_is_taken_over_bit_for_bit(tmp_path: Path) -> None:
    source = random_drafter(num_layers=LAYERS)
    found = warm_drafter(str(publish(tmp_path / "x", source)), SHAPE, EMBEDDING)
    assert all(torch.equal(found.state_dict()[name], tensor) for name, tensor in source.state_dict().items())
    assert torch.equal(states(found, random_taps()), states(source, random_taps()))


def test_other_writers_names_shards_and_own_heads_make_no_difference(tmp_path: Path) -> None:
    source = random_drafter(num_layers=LAYERS)
    folder = publish(tmp_path / "x", source)
    tensors = {
        f"model.{name}".replace("_codebook", "_codebook.weight"): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    tensors["lm_head.weight"] = EMBEDDING.clone()
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, members in parts.items():
        save_file({name: tensors[name] for name in members}, folder / file)
    weight_map = {name: file for file, members in parts.items() for name in members}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    found = warm_drafter(str(folder), SHAPE, EMBEDDING)
    assert all(torch.equal(found.state_dict()[name], tensor) for name, tensor in source.state_dict().items())


def test_a_dflash_1_gains_conv_and_selector_without_a_change_to_the_last_bit(tmp_path: Path) -> None:
    folder, source = publish_first_generation(tmp_path / "x")
    found = warm_drafter(str(folder), SHAPE, EMBEDDING)
    hidden = states(found, random_taps())
    assert torch.equal(hidden, states(source, random_taps()))
    unary, scores = selector_scores(found, hidden)
    assert torch.equal(unary, scores)
    loss = selector_scores(found, hidden)[1].square().sum() + hidden.square().sum()
    loss.backward()
    for part in ("candidate_selector.successor_codebook", "layers.0.attention_conv.kernel_projection.weight"):
        gradient = found.get_parameter(part).grad
        assert gradient is not None
        assert float(gradient.abs().max()) > 0


def test_a_drafter_without_a_mask_vector_gets_the_row_that_servers_use(tmp_path: Path) -> None:
    folder = publish(tmp_path / "x", random_drafter(num_layers=LAYERS), mask=False)
    found = warm_drafter(str(folder), SHAPE, EMBEDDING)
    assert torch.equal(found.mask_embedding.detach(), EMBEDDING[SHAPE.mask_token_id])


def test_added_layers_change_nothing_to_the_last_bit_and_can_learn(tmp_path: Path) -> None:
    source = random_drafter(num_layers=LAYERS)
    wanted = tiny_shape(num_layers=LAYERS + 2)
    found = warm_drafter(str(publish(tmp_path / "x", source)), wanted, EMBEDDING)
    hidden = states(found, random_taps())
    assert torch.equal(hidden, states(source, random_taps()))
    hidden[..., 0].sum().backward()
    for layer in (LAYERS, LAYERS + 1):
        for output in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
            gradient = found.get_parameter(f"layers.{layer}.{output}").grad
            assert gradient is not None
            assert float(gradient.abs().max()) > 0


def test_added_taps_change_nothing_but_the_rounding_of_one_sum_and_can_learn(tmp_path: Path) -> None:
    source = random_drafter(num_layers=LAYERS)
    wanted = tiny_shape(num_layers=LAYERS, target_layer_ids=(0, 1, 2, 4, 5))
    found = warm_drafter(str(publish(tmp_path / "x", source)), wanted, EMBEDDING)
    taps = random_taps(5)
    hidden = states(found, taps)
    torch.testing.assert_close(hidden, states(source, taps[:, [0, 2, 3]]), rtol=2e-5, atol=2e-6)
    assert torch.equal(hidden, states(found, taps * torch.tensor([1.0, -7.0, 1.0, 1.0, 3.0])[:, None]))
    hidden[..., 0].sum().backward()
    assert found.fc.weight.grad is not None
    columns = found.fc.weight.grad.unflatten(1, (5, -1))  # [H, T, H]
    assert bool((columns.abs().amax((0, 2)) > 0).all())


def test_a_dflash_1_can_grow_in_every_way_at_once(tmp_path: Path) -> None:
    folder, source = publish_first_generation(tmp_path / "x")
    wanted = tiny_shape(num_layers=LAYERS + 1, target_layer_ids=(0, 1, 2, 4))
    found = warm_drafter(str(folder), wanted, EMBEDDING)
    taps = random_taps(4)
    torch.testing.assert_close(states(found, taps), states(source, taps[:, [0, 2, 3]]), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("as_run", [True, False])
def test_a_checkpoint_or_its_run_folder_gives_the_fp32_masters(tmp_path: Path, as_run: bool) -> None:
    source = random_drafter(num_layers=LAYERS)
    live = random_drafter(num_layers=LAYERS).bfloat16()
    engine = still()
    engine.gather = lambda _kind, _named: {name: p.detach().clone() for name, p in source.named_parameters()}
    folder = save_checkpoint(engine, live, tmp_path, step=4, state={}, fingerprint={}, keep=1)
    found = warm_drafter(str(tmp_path if as_run else folder), SHAPE, EMBEDDING)
    assert all(torch.equal(found.state_dict()[name], tensor) for name, tensor in source.state_dict().items())


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    folder = save_checkpoint(
        still(), random_drafter(num_layers=LAYERS), tmp_path, step=4, state={}, fingerprint={}, keep=1
    )
    path = folder / "masters.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(ConfigError, match="missing or changed"):
        warm_drafter(str(folder), SHAPE, EMBEDDING)


def refusal(folder: Path, shape: DrafterShape = SHAPE) -> str:
    with pytest.raises(ConfigError) as caught:
        warm_drafter(str(folder), shape, EMBEDDING)
    text = str(caught.value)
    assert text.startswith(f"train.warm_start={folder}: ")
    return text


def test_an_empty_folder_is_refused_with_what_would_do(tmp_path: Path) -> None:
    assert "run folder" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_layers": LAYERS - 1, "layer_types": ("full_attention",)}, "must begin with the source's"),
        ({"target_layer_ids": (0, 2, 5)}, "must hold the source's"),
        ({"rope_theta": 5e5}, "rope_theta: 10000.0 -> 500000.0"),
        ({"intermediate_size": 64}, "intermediate_size: 48 -> 64"),
        ({"selector_rank": 6}, "selector_rank: 5 -> 6"),
        ({"num_target_layers": 8}, "num_target_layers: 6 -> 8"),
    ],
)
def test_a_config_that_cannot_continue_the_source_is_refused_with_the_difference(
    tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    folder = publish(tmp_path / "x", random_drafter(num_layers=LAYERS))
    assert told in refusal(folder, replace(SHAPE, **changes))


def test_what_only_steers_may_change(tmp_path: Path) -> None:
    folder = publish(tmp_path / "x", random_drafter(num_layers=LAYERS))
    wanted = replace(SHAPE, block_size=3, selector_top_k=4, max_position_embeddings=64)
    assert warm_drafter(str(folder), wanted, EMBEDDING).shape == wanted


def test_wrong_missing_and_foreign_tensors_are_named_with_their_shapes(tmp_path: Path) -> None:
    folder = publish(tmp_path / "x", random_drafter(num_layers=LAYERS))
    tensors = load_file(folder / "model.safetensors")
    del tensors["layers.1.mlp.down_proj.weight"]
    tensors["fc.weight"] = tensors["fc.weight"][:, :-1].contiguous()
    tensors["layers.0.self_attn.q_proj.bias"] = torch.zeros(2)
    save_file(tensors, folder / "model.safetensors")
    text = refusal(folder)
    assert "layers.1.mlp.down_proj.weight: missing, expected shape [32, 48]" in text
    assert "fc.weight: shape [32, 95], expected [32, 96]" in text
    assert "layers.0.self_attn.q_proj.bias: unexpected" in text


def test_a_dflash_1_with_sliding_layers_must_say_how_they_look(tmp_path: Path) -> None:
    folder, _ = publish_first_generation(tmp_path / "x", layer_types=["sliding_attention", "full_attention"])
    assert "is_causal" in refusal(folder)


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    folder = publish(tmp_path / "x", random_drafter(num_layers=LAYERS))
    tensors = load_file(folder / "model.safetensors")
    tensors["norm.weight"] = tensors["norm.weight"].to(torch.int8)
    save_file(tensors, folder / "model.safetensors")
    assert "norm.weight: dtype I8" in refusal(folder)
