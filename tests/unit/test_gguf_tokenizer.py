"""The tokenizer in a GGUF file is the target's, token for token, from its folder or copied from its own GGUF."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest

from dflash2_train.config import GgufConfig, RunConfig, TargetConfig
from dflash2_train.export.gguf_tokenizer import add_tokenizer, pre_tokenizer_name
from dflash2_train.export.gguf_types import GgufError
from dflash2_train.target import load_tokenizer
from tests.gguf_cases import PLACEHOLDERS, TEMPLATE, gguf_config, save_tokenizer

V, MASK = 96, 95
NORMAL, CONTROL, USER, UNUSED = 1, 3, 4, 5
TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TRIPLES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + TAIL
SINGLES = TRIPLES.replace("{1,3}", "")


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    config = gguf_config(tmp_path)
    folder = Path(config.target.name)
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_tokenizer(folder, num_tokens=V - PLACEHOLDERS)
    return config


def keys_of(target: TargetConfig, settings: GgufConfig | None = None, **changes: int) -> dict[str, Any]:
    """What the writer is given."""
    writer = gguf.GGUFWriter(None, "dflash")
    add_tokenizer(writer, target, settings or GgufConfig(), **{"num_tokens": V, "mask_id": MASK, **changes})
    return {key: value.value for key, value in writer.kv_data[0].items() if key.startswith("tokenizer.")}


def test_every_token_has_its_text_and_its_type_and_missing_ids_a_placeholder(config: RunConfig) -> None:
    keys, tokenizer = keys_of(config.target), load_tokenizer(config.target)
    tokens, types = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"]
    assert len(tokens) == len(types) == V
    assert tokens[: len(tokenizer)] == tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    assert tokens[len(tokenizer) :] == [f"[PAD{index}]" for index in range(len(tokenizer), V)]
    assert types[:3] == [CONTROL] * 3
    assert types[tokenizer.convert_tokens_to_ids("<note>")] == USER
    assert types[len(tokenizer) :] == [UNUSED] * PLACEHOLDERS
    assert types.count(NORMAL) == V - 3 - 1 - PLACEHOLDERS


def test_merges_special_ids_cut_and_template_are_the_targets_and_the_mask_is_the_drafters(config: RunConfig) -> None:
    keys = keys_of(config.target)
    assert keys["tokenizer.ggml.model"] == "gpt2"
    assert keys["tokenizer.ggml.pre"] == "smollm"
    assert keys["tokenizer.ggml.merges"] == ["Ġ t", "Ġt h", "Ġth e"]
    ids = ("bos_token_id", "eos_token_id", "unknown_token_id", "mask_token_id")
    assert [keys[f"tokenizer.ggml.{key}"] for key in ids] == [1, 2, 0, MASK]
    assert keys["tokenizer.chat_template"] == TEMPLATE


def test_a_mask_token_of_the_targets_own_gives_way_to_the_drafters(config: RunConfig) -> None:
    path = Path(config.target.name) / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"mask_token": "<|endoftext|>"}))
    assert keys_of(config.target)["tokenizer.ggml.mask_token_id"] == MASK


def byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def split(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize(
    ("steps", "ignore_merges", "name"),
    [
        ([byte_level(True)], False, "gpt-2"),
        ([{"type": "Digits", "individual_digits": True}, byte_level(True)], False, "smollm"),
        ([split(TRIPLES), byte_level(False)], False, "glm4"),
        ([split(TRIPLES), byte_level(False)], True, "llama-bpe"),
        ([split(SINGLES), byte_level(False)], False, "qwen2"),
        ([split(SINGLES.replace("+", "*")), byte_level(False)], False, None),
        ([split(TRIPLES), byte_level(True)], False, None),
        ([{"type": "Whitespace"}], False, None),
    ],
)
def test_the_cut_is_told_by_what_it_does(steps: list[dict[str, Any]], ignore_merges: bool, name: str | None) -> None:
    cut = steps[0] if len(steps) == 1 else {"type": "Sequence", "pretokenizers": steps}
    assert pre_tokenizer_name({"pre_tokenizer": cut, "model": {"ignore_merges": ignore_merges}}) == name


def edit_tokenizer(config: RunConfig, **changes: Any) -> None:
    path = Path(config.target.name) / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_an_unknown_cut_is_refused_unless_its_name_is_given(config: RunConfig) -> None:
    edit_tokenizer(config, pre_tokenizer={"type": "Sequence", "pretokenizers": [split("x"), byte_level(False)]})
    with pytest.raises(GgufError, match=r"export\.gguf\.pre_tokenizer"):
        keys_of(config.target)
    assert keys_of(config.target, GgufConfig(pre_tokenizer="tekken"))["tokenizer.ggml.pre"] == "tekken"


def test_a_tokenizer_of_another_kind_is_refused_with_the_way_out(config: RunConfig) -> None:
    edit_tokenizer(config, decoder={"type": "Sequence", "decoders": []})
    with pytest.raises(GgufError, match=r"only byte-level BPE[\s\S]*tokenizer_from"):
        keys_of(config.target)


def write_vocabulary(path: Path, num_tokens: int) -> Path:
    """A GGUF of a target with a tokenizer of the sentencepiece kind, and a key that is none of the tokenizer's."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(6)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([f"t{index}" for index in range(num_tokens)])
    writer.add_token_scores([-float(index) for index in range(num_tokens)])
    writer.add_token_types([NORMAL] * num_tokens)
    writer.add_bos_token_id(1)
    writer.add_add_space_prefix(False)
    writer.add_mask_token_id(7)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_tokenizer_is_copied_key_for_key_from_the_targets_own_gguf(config: RunConfig, tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "target.gguf", V)
    writer = gguf.GGUFWriter(None, "dflash")
    settings = GgufConfig(tokenizer_from=str(path))
    add_tokenizer(writer, config.target, settings, num_tokens=V, mask_id=MASK)
    copied, wanted = dict(writer.kv_data[0]), gguf.GGUFReader(path).fields
    assert {key for key in copied if key != "general.architecture"} == {key for key in wanted if "tokenizer" in key}
    for key, value in copied.items():
        if key not in ("general.architecture", "tokenizer.ggml.mask_token_id"):
            assert value.value == wanted[key].contents(), key
            assert value.type == wanted[key].types[0], key
            assert value.sub_type in (None, wanted[key].types[-1]), key
    assert copied["tokenizer.ggml.mask_token_id"].value == MASK


def test_a_gguf_of_another_vocabulary_is_refused(config: RunConfig, tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "target.gguf", V - 1)
    with pytest.raises(GgufError, match="has 95 tokens, the drafter's target has 96"):
        keys_of(config.target, GgufConfig(tokenizer_from=str(path)))


def test_the_tokenizer_of_smollm2_is_the_one_in_its_own_gguf(repo_root: Path) -> None:
    """Against a file that llama.cpp's converter wrote: the package that the first target comes from."""
    folder = repo_root / "targets" / "SmolLM2-135M-Instruct"
    if not (folder / "tokenizer.json").exists():
        pytest.skip("the first target is not built here")
    from data_gen.local_target import find_gguf

    target = TargetConfig(name=str(folder), license="apache-2.0", hidden_size=576, num_layers=30, vocab_size=49152)
    keys = keys_of(target, num_tokens=49152, mask_id=16)
    wanted = gguf.GGUFReader(find_gguf()[0]).fields
    tokenizer = load_tokenizer(target)
    assert keys["tokenizer.ggml.tokens"] == tokenizer.convert_ids_to_tokens(range(49152))
    for key in ("tokens", "token_type", "merges", "pre", "model", "bos_token_id", "eos_token_id"):
        assert keys[f"tokenizer.ggml.{key}"] == wanted[f"tokenizer.ggml.{key}"].contents(), key
    assert keys["tokenizer.chat_template"] == tokenizer.chat_template
