"""Opening toy targets: facts, refusals, and the tensors that training takes from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import Gemma3Config, Gemma3TextConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

from dflash2_train.config import ConfigError, TargetConfig
from dflash2_train.pretrained import model_class
from dflash2_train.target import (
    FrozenHead,
    TargetTensors,
    load_target_model,
    load_tokenizer,
    open_target_config,
)
from tests.architectures import HIDDEN, write_architecture
from tests.architectures import LAYERS as NUM_LAYERS
from tests.toy_target import WORDS

H, LAYERS, V = 8, 2, 24
THETA = 54_321.0


def declared(folder: Path, **changes: Any) -> TargetConfig:
    values = {"hidden_size": H, "num_layers": LAYERS, "vocab_size": V, "license": "mit", **changes}
    return TargetConfig(name=str(folder), **values)


def save_target(folder: Path, *, tied: bool = False, shard_size: str = "5GB") -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=H,
        num_hidden_layers=LAYERS,
        vocab_size=V,
        intermediate_size=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        rms_norm_eps=1e-4,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
        max_position_embeddings=77,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=[5, 2], pad_token_id=0)
    model.save_pretrained(folder, max_shard_size=shard_size)
    return model


def edit(path: Path, **changes: Any) -> None:
    """Set keys; ``...`` removes one."""
    value = json.loads(path.read_text())
    value.update(changes)
    path.write_text(json.dumps({key: item for key, item in value.items() if item is not ...}))


def rewrite_tensors(folder: Path, changes: dict[str, torch.Tensor | None]) -> None:
    tensors = {**load_file(folder / "model.safetensors"), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")


def test_the_facts_come_from_the_files(tmp_path: Path) -> None:
    save_target(tmp_path)
    info = open_target_config(declared(tmp_path))
    assert (info.hidden_size, info.num_layers, info.vocab_size) == (H, LAYERS, V)
    assert info.eos_token_ids == (5, 2)
    assert (info.bos_token_id, info.pad_token_id, info.max_position_embeddings) == (1, 0, 77)
    assert (info.rope_theta, info.final_norm_eps, info.license) == (THETA, 1e-4, "mit")
    assert not info.tie_word_embeddings
    assert info.revision is None


@pytest.mark.parametrize("key", ["hidden_size", "num_layers", "vocab_size"])
def test_a_declared_shape_that_differs_is_refused_with_both_values(tmp_path: Path, key: str) -> None:
    save_target(tmp_path)
    stated = getattr(declared(tmp_path), key)
    with pytest.raises(ConfigError, match=rf"target\.{key}=99: .* states {stated}"):
        open_target_config(declared(tmp_path, **{key: 99}))


def test_a_missing_folder_is_refused_with_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Make it with: make-the-target here"):
        open_target_config(declared(tmp_path / "absent", setup="make-the-target here"))
    with pytest.raises(ConfigError, match="owner/name"):
        open_target_config(declared(tmp_path / "absent"))


def test_a_relative_name_with_a_setup_command_is_a_folder_and_not_a_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="Make it with: fetch-it"):
        open_target_config(declared(Path("targets/absent"), setup="fetch-it"))


def test_a_hub_id_that_cannot_be_had_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="the Hub did not give it"):
        open_target_config(declared(Path("no-such-owner/no-such-model")))


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        open_target_config(declared(tmp_path))


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    save_target(tmp_path)
    edit(tmp_path / "config.json", model_type="never_heard_of")
    with pytest.raises(ConfigError, match="trust_remote_code"):
        open_target_config(declared(tmp_path))


def test_the_text_part_of_a_multimodal_configuration_is_taken(tmp_path: Path) -> None:
    text = Gemma3TextConfig(
        hidden_size=H,
        num_hidden_layers=LAYERS,
        vocab_size=V,
        rms_norm_eps=1e-3,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
            "full_attention": {"rope_type": "default", "rope_theta": THETA},
        },
    )
    Gemma3Config(text_config=text).save_pretrained(tmp_path)
    info = open_target_config(declared(tmp_path))
    assert (info.hidden_size, info.rope_theta, info.final_norm_eps) == (H, THETA, 1e-3)
    assert info.tie_word_embeddings


def test_a_legacy_rope_theta_is_read(tmp_path: Path) -> None:
    save_target(tmp_path)
    edit(tmp_path / "config.json", rope_parameters=..., rope_theta=777.0)
    assert open_target_config(declared(tmp_path)).rope_theta == 777.0


def test_a_target_without_rotation_needs_no_rope_theta(tmp_path: Path) -> None:
    """GLM-5.3-Flash rotates nothing and is built by a multimodal class; both must not stand in its way."""
    write_architecture(tmp_path, "glm5_next")
    target = declared(tmp_path, hidden_size=HIDDEN, num_layers=NUM_LAYERS, vocab_size=len(WORDS))
    info = open_target_config(target)
    assert (info.rope_theta, info.num_layers, info.tie_word_embeddings) == (None, NUM_LAYERS, False)
    model = load_target_model(target, "float32")
    assert model(torch.tensor([[5, 6, 7]])).logits.shape == (1, 3, len(WORDS))
    frozen = FrozenHead.load(target, dtype="float32")
    assert frozen.head.shape == (len(WORDS), HIDDEN) and frozen.final_norm_weight is not None


def test_a_model_type_that_transformers_cannot_build_is_refused() -> None:
    from transformers import T5Config

    with pytest.raises(ConfigError, match="model_type='t5'"):
        model_class(T5Config())


def test_a_missing_or_contradictory_rope_theta_is_refused(tmp_path: Path) -> None:
    save_target(tmp_path)
    edit(tmp_path / "config.json", rope_theta=THETA)
    assert open_target_config(declared(tmp_path)).rope_theta == THETA
    edit(tmp_path / "config.json", rope_theta=777.0)
    with pytest.raises(ConfigError, match="rope_theta is stated in different ways"):
        open_target_config(declared(tmp_path))
    edit(tmp_path / "config.json", rope_theta=..., rope_parameters=...)
    with pytest.raises(ConfigError, match="no rope_theta"):
        open_target_config(declared(tmp_path))


def test_a_target_without_end_token_is_refused(tmp_path: Path) -> None:
    save_target(tmp_path)
    edit(tmp_path / "generation_config.json", eos_token_id=...)
    assert open_target_config(declared(tmp_path)).eos_token_ids == (2,)
    edit(tmp_path / "config.json", eos_token_id=...)
    with pytest.raises(ConfigError, match="eos_token_id"):
        open_target_config(declared(tmp_path))


def test_the_hash_follows_configuration_and_tensor_layout(tmp_path: Path) -> None:
    save_target(tmp_path / "a")
    save_target(tmp_path / "b")
    first = open_target_config(declared(tmp_path / "a")).target_hash
    assert open_target_config(declared(tmp_path / "b")).target_hash == first
    edit(tmp_path / "b" / "config.json", rms_norm_eps=0.5)
    changed = open_target_config(declared(tmp_path / "b")).target_hash
    rewrite_tensors(tmp_path / "a", {"extra": torch.zeros(1)})
    assert len({first, changed, open_target_config(declared(tmp_path / "a")).target_hash}) == 3


@pytest.mark.parametrize("shard_size", ["5GB", "1KB"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_frozen_head_equals_the_model_in_one_file_and_in_shards(
    tmp_path: Path, tied: bool, shard_size: str
) -> None:
    model = save_target(tmp_path, tied=tied, shard_size=shard_size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard_size == "1KB")
    frozen = FrozenHead.load(declared(tmp_path), dtype="float32")
    assert torch.equal(frozen.embedding, model.get_input_embeddings().weight)
    assert torch.equal(frozen.head, model.get_output_embeddings().weight)
    assert frozen.final_norm_weight is not None
    assert torch.equal(frozen.final_norm_weight, model.model.norm.weight)
    assert frozen.tied == (frozen.head is frozen.embedding) == tied
    assert not frozen.head.requires_grad
    assert not isinstance(frozen, torch.nn.Module)


def test_only_the_shards_that_hold_these_tensors_are_read(tmp_path: Path) -> None:
    model = save_target(tmp_path, shard_size="1KB")
    weight_map = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    needed = {weight_map[name] for name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight")}
    for path in tmp_path.glob("*.safetensors"):
        if path.name not in needed:
            path.unlink()
    assert len(needed) < len(set(weight_map.values()))
    assert torch.equal(FrozenHead.load(declared(tmp_path), dtype="float32").head, model.lm_head.weight)


def test_casting_in_place_keeps_a_tied_head_tied(tmp_path: Path) -> None:
    save_target(tmp_path, tied=True)
    frozen = FrozenHead.load(declared(tmp_path), dtype=torch.float32)
    assert frozen.to("cpu", torch.bfloat16) is frozen
    assert frozen.head is frozen.embedding
    assert frozen.head.dtype == torch.bfloat16


def test_names_of_a_language_model_inside_another_are_found(tmp_path: Path) -> None:
    model = save_target(tmp_path)
    moved = {f"model.language_model.{name.removeprefix('model.')}": t for name, t in model.state_dict().items()}
    moved["lm_head.weight"] = moved.pop("model.language_model.lm_head.weight")
    save_file(moved, tmp_path / "model.safetensors")
    frozen = FrozenHead.load(declared(tmp_path), dtype="float32")
    assert torch.equal(frozen.head, model.lm_head.weight)
    assert TargetTensors(declared(tmp_path)).decoder_prefix() == "model.language_model."


def test_a_missing_head_is_refused_with_the_candidates(tmp_path: Path) -> None:
    model = save_target(tmp_path)
    rewrite_tensors(tmp_path, {"lm_head.weight": None, "other_head.weight": model.lm_head.weight.detach()})
    with pytest.raises(ConfigError, match=r"no output head .*lm_head\.weight.* Found: other_head\.weight"):
        FrozenHead.load(declared(tmp_path), dtype="float32")


def test_a_missing_embedding_is_refused_with_the_candidates(tmp_path: Path) -> None:
    save_target(tmp_path)
    rewrite_tensors(tmp_path, {"model.embed_tokens.weight": None, "word_embed": torch.zeros(V, H)})
    with pytest.raises(ConfigError, match="no embedding .* Found: word_embed"):
        FrozenHead.load(declared(tmp_path), dtype="float32")


def test_a_tie_flag_against_a_differing_stored_head_is_refused(tmp_path: Path) -> None:
    model = save_target(tmp_path, tied=True)
    rewrite_tensors(tmp_path, {"lm_head.weight": model.lm_head.weight.detach().clone()})
    assert FrozenHead.load(declared(tmp_path), dtype="float32").tied
    rewrite_tensors(tmp_path, {"lm_head.weight": torch.zeros(V, H)})
    with pytest.raises(ConfigError, match="tie_word_embeddings is true"):
        FrozenHead.load(declared(tmp_path), dtype="float32")


@pytest.mark.parametrize("table", [torch.zeros(V + 1, H), torch.zeros(V, H, dtype=torch.int8)])
def test_a_head_of_another_shape_or_quantised_is_refused(tmp_path: Path, table: torch.Tensor) -> None:
    save_target(tmp_path)
    rewrite_tensors(tmp_path, {"lm_head.weight": table})
    with pytest.raises(ConfigError, match="not quantised"):
        FrozenHead.load(declared(tmp_path), dtype="float32")


def test_single_tensors_are_copies_and_a_wrong_name_is_a_key_error(tmp_path: Path) -> None:
    model = save_target(tmp_path)
    tensors = TargetTensors(declared(tmp_path))
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(tensors[name], model.state_dict()[name])
    tensors[name].zero_()
    assert tensors[name].any()
    with pytest.raises(KeyError, match="no tensor absent"):
        tensors["absent"]


def test_a_folder_without_or_with_broken_weights_is_refused(tmp_path: Path) -> None:
    save_target(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:20])
    with pytest.raises(ConfigError, match="not a whole safetensors file"):
        open_target_config(declared(tmp_path))
    weights.unlink()
    with pytest.raises(ConfigError, match=r"no \.safetensors file"):
        TargetTensors(declared(tmp_path))


def test_the_loaded_model_is_frozen_in_the_asked_dtype(tmp_path: Path) -> None:
    expected = save_target(tmp_path)
    model = load_target_model(declared(tmp_path), "float32")
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert torch.equal(model.get_output_embeddings().weight, expected.lm_head.weight)
    assert load_target_model(declared(tmp_path)).dtype == torch.bfloat16
    with pytest.raises(ConfigError, match=r"target\.vocab_size"):
        load_target_model(declared(tmp_path, vocab_size=V + 1))


def save_tokenizer(folder: Path, size: int) -> None:
    words = {f"w{index}": index for index in range(size)}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0"))).save_pretrained(folder)


def test_the_tokenizer_of_the_folder_is_loaded(tmp_path: Path) -> None:
    save_target(tmp_path)
    save_tokenizer(tmp_path, V)
    assert load_tokenizer(declared(tmp_path)).convert_tokens_to_ids("w7") == 7


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    save_target(tmp_path)
    with pytest.raises(ConfigError, match="holds no tokenizer"):
        load_tokenizer(declared(tmp_path))


def test_a_tokenizer_with_more_tokens_than_rows_is_refused(tmp_path: Path) -> None:
    save_target(tmp_path)
    save_tokenizer(tmp_path, V + 3)
    with pytest.raises(ConfigError, match=f"target.vocab_size={V}: .* {V + 3} tokens"):
        load_tokenizer(declared(tmp_path))
