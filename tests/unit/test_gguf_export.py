"""From a drafter to GGUF files and back: nothing is lost, nothing is left behind, and faults are named."""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash2_train import provenance
from dflash2_train.config import RunConfig
from dflash2_train.export import gguf_export, gguf_source, gguf_write, tensor_file
from dflash2_train.export.gguf_export import export_gguf
from dflash2_train.export.gguf_read import GgufFile, read_gguf_drafter
from dflash2_train.export.gguf_source import DrafterFolder, SourceTensor
from dflash2_train.export.gguf_types import GgufError
from dflash2_train.export.workspace import ExportError
from dflash2_train.model.drafter import Drafter
from dflash2_train.provenance import sha256_file
from tests.cases import edit_json, make_drafter
from tests.gguf_cases import gguf_config, save_drafter, save_target
from tests.unit.test_gguf_layout import GLM_5_LAYERS


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Target, published drafter and one file of each kind of type, for the whole module; nobody edits them."""
    root = tmp_path_factory.mktemp("gguf")
    config = gguf_config(root)
    save_target(config)
    save_drafter(config, root / "drafter")
    config.export.gguf.source = str(root / "drafter")
    config.export.gguf.types = ["F32", "BF16", "F16", "Q8_0", "Q4_1"]
    export_gguf(config)
    return root


@pytest.fixture
def config(base: Path, tmp_path: Path) -> RunConfig:
    """The experiment of ``base``, with outputs of its own."""
    config = gguf_config(tmp_path)
    config.target.name = str(base / "target")
    config.export.gguf.source = str(base / "drafter")
    return config


def written(base: Path, kind: str) -> Path:
    return base / "export-gguf" / f"tiny-{kind}.gguf"


def published(base: Path) -> dict[str, torch.Tensor]:
    return load_file(base / "drafter" / "model.safetensors")


@pytest.mark.parametrize("kind", ["F32", "BF16"])
def test_every_tensor_comes_back_bit_for_bit_from_the_lossless_types(base: Path, kind: str) -> None:
    drafter = read_gguf_drafter(written(base, kind))
    state, wanted = drafter.state_dict(torch.bfloat16), published(base)
    assert state.keys() == wanted.keys()
    assert all(torch.equal(state[name], wanted[name]) for name in wanted)
    assert drafter.shape == DrafterFolder(base / "drafter").shape
    assert drafter.notes == []


def test_the_config_that_is_read_is_the_published_one(base: Path) -> None:
    config = read_gguf_drafter(written(base, "Q8_0")).config
    wanted = json.loads((base / "drafter" / "config.json").read_text())
    # the file holds the tokenizer's special tokens, the folder those of the target's configuration
    tokens = {"bos_token_id", "eos_token_id", "pad_token_id"}
    assert {key: value for key, value in config.items() if key not in tokens} == {
        key: value for key, value in wanted.items() if key not in tokens
    }


def test_the_file_is_what_the_package_and_so_any_reader_finds_in_it(base: Path) -> None:
    reader = gguf.GGUFReader(written(base, "Q8_0"))
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert len(tensors) == 6 + 15 * 2 + 1  # and the table with the mask vector
    base_kernel = tensors["blk.1.attn_conv_base"]
    assert base_kernel.shape.tolist() == [32, 2, 2]  # {H, Kc, 2}
    assert base_kernel.tensor_type.name == "F32"
    wanted = published(base)["layers.1.attention_conv.base_kernel"]
    assert base_kernel.data.tobytes() == wanted.float().numpy().tobytes()  # no transposition
    assert tensors["fc.weight"].shape.tolist() == [96, 32]
    assert tensors["fc.weight"].tensor_type.name == "Q8_0"
    assert tensors["blk.0.ffn_down.weight"].tensor_type.name == "F16"  # rows of 48
    fields = {key: field.contents() for key, field in reader.fields.items()}
    assert fields["general.architecture"] == "dflash"
    assert fields["general.file_type"] == gguf.LlamaFileType.MOSTLY_Q8_0
    assert fields["dflash.target_layers"] == [1, 3, 5]
    assert fields["dflash.attention.sliding_window_pattern"] == [True, False]
    assert fields["dflash.attention.causal"] is False
    assert fields["tokenizer.ggml.mask_token_id"] == 95


def test_the_learned_mask_vector_stands_in_the_mask_tokens_row_of_a_table_of_its_own(base: Path) -> None:
    drafter = read_gguf_drafter(written(base, "F32"))
    table = drafter.file.tensor("token_embd.weight")
    wanted = load_file(base / "target" / "model.safetensors")["model.embed_tokens.weight"].float()
    mask = torch.load(base / "drafter" / "mask_embedding.pt", weights_only=True).float()
    assert not torch.equal(wanted[95], mask)
    wanted[95] = mask
    assert torch.equal(table, wanted)
    assert drafter.mask_embedding is not None and torch.equal(drafter.mask_embedding, mask)


def test_without_a_table_llama_cpp_takes_the_targets_and_the_file_has_6_and_15_a_layer(config: RunConfig) -> None:
    config.export.gguf.embedding = "target"
    folder = export_gguf(config)
    drafter = read_gguf_drafter(folder / "tiny-F32.gguf")
    assert len(drafter.file.tensors) == 6 + 15 * 2
    assert drafter.mask_embedding is None
    assert "target's own row of the mask token" in (folder / "README.md").read_text()


def test_an_embedding_and_a_head_that_the_drafter_brings_along_are_kept(
    base: Path, config: RunConfig, tmp_path: Path
) -> None:
    source = save_drafter(config, tmp_path / "drafter")
    extra = {name: torch.randn(96, 32).bfloat16() for name in ("embed_tokens.weight", "lm_head.weight")}
    save_file({**published(base), **extra}, source / "model.safetensors")
    config.export.gguf.source = str(source)
    drafter = read_gguf_drafter(export_gguf(config) / "tiny-F32.gguf")
    assert drafter.has_head and drafter.has_embedding
    assert torch.equal(drafter.file.tensor("output.weight"), extra["lm_head.weight"].float())
    table = drafter.file.tensor("token_embd.weight")
    assert torch.equal(table[:95], extra["embed_tokens.weight"][:95].float())
    assert not torch.equal(table[95], extra["embed_tokens.weight"][95].float())


def test_a_checkpoint_is_exported_as_folder_first_and_both_say_the_same(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.unit.test_export_run import write_checkpoint

    config.export.gguf.source = None
    write_checkpoint(config, 10)
    drafter = read_gguf_drafter(export_gguf(config) / "tiny-F32.gguf")
    folder = Path(config.export.output_dir)
    stored = load_file(folder / "model.safetensors")
    assert all(torch.equal(tensor, stored[name].float()) for name, tensor in drafter.state_dict().items())
    record = json.loads((folder.with_name("export-gguf") / "gguf.json").read_text())
    assert record["source"]["drafter"]["model.safetensors"] == sha256_file(folder / "model.safetensors")


def test_a_folder_in_shards_gives_the_same_tensors(base: Path, config: RunConfig, tmp_path: Path) -> None:
    source, tensors = save_drafter(config, tmp_path / "drafter"), published(base)
    (source / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = {"model-00001-of-00002.safetensors": names[:20], "model-00002-of-00002.safetensors": names[20:]}
    for file, part in halves.items():
        save_file({name: tensors[name] for name in part}, source / file)
    index = {"weight_map": {name: file for file, part in halves.items() for name in part}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    config.export.gguf.source = str(source)
    state = read_gguf_drafter(export_gguf(config) / "tiny-F32.gguf").state_dict(torch.bfloat16)
    assert all(torch.equal(state[name], tensor) for name, tensor in tensors.items())


def test_the_codebooks_may_have_a_type_of_their_own(config: RunConfig) -> None:
    config.export.gguf.types, config.export.gguf.codebook_type = ["Q8_0"], "F16"
    kinds = read_gguf_drafter(export_gguf(config) / "tiny-Q8_0.gguf").kinds
    assert kinds["candidate_selector.predecessor_codebook"] == "F16"
    assert kinds["candidate_selector.hidden_projection.weight"] == "Q8_0"


def test_writing_again_touches_no_file_that_is_right_and_mends_one_that_is_not(config: RunConfig) -> None:
    config.export.gguf.types = ["F32", "F16"]
    folder = export_gguf(config)
    kept, damaged = folder / "tiny-F32.gguf", folder / "tiny-F16.gguf"
    right = sha256_file(damaged)
    content = bytearray(damaged.read_bytes())
    content[-40] ^= 1
    damaged.write_bytes(content)
    before = kept.stat().st_mtime_ns
    export_gguf(config)
    assert kept.stat().st_mtime_ns == before
    assert sha256_file(damaged) == right


@pytest.mark.parametrize("change", ["weights", "mask", "embedding"])
def test_a_change_of_the_source_or_the_settings_writes_anew(
    base: Path, config: RunConfig, change: str, tmp_path: Path
) -> None:
    source = save_drafter(config, tmp_path / "drafter")
    config.export.gguf.source = str(source)
    path = export_gguf(config) / "tiny-F32.gguf"
    before = sha256_file(path)
    if change == "weights":
        save_file({name: tensor * 2 for name, tensor in published(base).items()}, source / "model.safetensors")
    elif change == "mask":
        torch.save(torch.randn(32).bfloat16(), source / "mask_embedding.pt")
    else:
        config.export.gguf.embedding = "target"
    export_gguf(config)
    assert sha256_file(path) != before


def test_another_programs_file_is_never_replaced(config: RunConfig) -> None:
    folder = gguf_export.gguf_folder(config)
    folder.mkdir(parents=True)
    (folder / "tiny-F32.gguf").write_bytes(b"GGUF of somebody else")
    with pytest.raises(GgufError, match="was not written by this tool"):
        export_gguf(config)
    assert (folder / "tiny-F32.gguf").read_bytes() == b"GGUF of somebody else"


def test_a_file_without_its_record_is_ours_all_the_same(config: RunConfig) -> None:
    folder = export_gguf(config)
    (folder / "gguf.json").unlink()
    export_gguf(config)
    assert (folder / "gguf.json").exists()


def test_a_crash_while_writing_leaves_the_earlier_file_and_nothing_half_written(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = export_gguf(config)
    before = sha256_file(folder / "tiny-F32.gguf")
    config.export.gguf.source = str(save_drafter(config, tmp_path / "other", dtype="float32"))

    def fail(*_arguments: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(gguf_write, "encode", fail)
    with pytest.raises(ExportError, match="no space"):
        export_gguf(config)
    assert sha256_file(folder / "tiny-F32.gguf") == before
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


def flip_value(path: Path) -> None:
    """Change one value of the last tensor: the exponent of a number in the file's last row."""
    content = bytearray(path.read_bytes())
    content[-33] ^= 0x40
    path.write_bytes(content)


def lower_key(path: Path) -> None:
    """Make block_size 4 a 3."""
    content = path.read_bytes()
    key = b"dflash.block_size" + struct.pack("<II", 4, 4)
    assert key in content
    path.write_bytes(content.replace(key, key[:-4] + struct.pack("<I", 3)))


def rename_tensor(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"blk.0.attn_q.weight", b"blk.0.attn_Q.weight"))


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (flip_value, "its bytes are not those that were written"),
        (lower_key, r"dflash\.block_size: another value"),
        (rename_tensor, r"blk\.0\.attn_q\.weight: missing"),
    ],
)
def test_a_file_that_reads_back_differently_is_never_published(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None], text: str
) -> None:
    check = gguf_write.check_written

    def damage_and_check(path: Path, *arguments: object) -> None:
        damage(path)
        check(path, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(gguf_write, "check_written", damage_and_check)
    with pytest.raises(GgufError, match=text):
        export_gguf(config)
    assert list(gguf_export.gguf_folder(config).glob("*.gguf*")) == []


def test_a_value_that_is_encoded_wrongly_is_never_written(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config.export.gguf.types = ["Q8_0"]
    encode = gguf_write.encode
    monkeypatch.setattr(gguf_write, "encode", lambda rows, kind, name: encode(rows * 1.05, kind, name))
    with pytest.raises(GgufError, match="further from its own than this type allows"):
        export_gguf(config)
    assert list(gguf_export.gguf_folder(config).iterdir()) == []


def test_a_source_that_changes_while_it_is_converted_gives_no_file(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save_drafter(config, tmp_path / "drafter")
    config.export.gguf.source = str(source)
    path = source / "model.safetensors"
    write = gguf_write._write

    def overtaken(*arguments: Any) -> Any:
        save_file({name: tensor * 2 for name, tensor in load_file(path).items()}, path)
        return write(*arguments)

    monkeypatch.setattr(gguf_write, "_write", overtaken)
    with pytest.raises(GgufError, match=r"model\.safetensors: its bytes are not those that were hashed before"):
        export_gguf(config)
    assert list(gguf_export.gguf_folder(config).iterdir()) == []


def test_the_weights_of_an_export_are_read_once_a_file_and_never_for_a_hash_alone(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save_drafter(config, tmp_path / "drafter")
    monkeypatch.setattr(gguf_export, "export_checkpoint", lambda _config: source)
    config.export.gguf.source = None
    config.export.gguf.types = ["F32", "BF16"]
    taken: Counter[str] = Counter()
    for module in (provenance, gguf_source, gguf_export, gguf_write):
        monkeypatch.setattr(module, "sha256_file", lambda file: taken.update([file.name]) or sha256_file(file))
    passed = tensor_file._read_whole

    def counted(file: FileIO, piece: memoryview) -> None:
        taken[f"bytes of {Path(str(file.name)).parent.name}"] += len(piece)  # the target's table comes from another
        passed(file, piece)

    monkeypatch.setattr(tensor_file, "_read_whole", counted)
    export_gguf(config)
    assert taken["model.safetensors"] == 0
    assert taken["bytes of drafter"] == 2 * (source / "model.safetensors").stat().st_size
    assert taken["tiny-F32.gguf"] == taken["tiny-BF16.gguf"] == 1, "what was written is read back once"


def test_a_large_tensor_is_written_and_checked_in_pieces_of_whole_rows(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = sha256_file(export_gguf(config) / "tiny-F32.gguf")
    monkeypatch.setattr("dflash2_train.export.gguf_source.PIECE_VALUES", 100)
    monkeypatch.setattr("dflash2_train.export.gguf_read.PIECE_VALUES", 100)
    sizes: list[int] = []
    pieces = SourceTensor.pieces

    def counted(self: SourceTensor, file: object = None):  # noqa: ANN202
        for rows in pieces(self, file):
            sizes.append(rows.numel())
            yield rows

    monkeypatch.setattr(SourceTensor, "pieces", counted)
    config.export.gguf.output_dir = str(Path(config.run_dir) / "pieces")
    assert sha256_file(export_gguf(config) / "tiny-F32.gguf") == whole
    assert max(sizes) <= 100


def break_source(folder: Path, kind: str) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    if kind == "missing":
        del tensors["layers.1.mlp.up_proj.weight"]
    elif kind == "unknown":
        tensors["d2t"] = torch.zeros(4, dtype=torch.int64)
    elif kind == "nan":
        tensors["layers.1.mlp.up_proj.weight"][3, 3] = torch.nan
    elif kind == "candidates":
        edit_json(folder / "config.json", dflash_config__selector_top_k=6)
    elif kind == "causal":
        edit_json(folder / "config.json", is_causal=True)
    elif kind == "vocabulary":
        edit_json(folder / "config.json", num_target_layers=7)
    save_file(tensors, path)
    if kind == "cut":
        path.write_bytes(path.read_bytes()[:-8])


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("missing", r"layers\.1\.mlp\.up_proj\.weight: missing"),
        ("unknown", r"d2t: unexpected"),
        ("nan", r"layers\.1\.mlp\.up_proj\.weight holds values that are not finite"),
        ("candidates", r"selector_top_k=6: llama\.cpp needs hidden_size"),
        ("causal", "is_causal"),
        ("vocabulary", "num_target_layers=7, the target has 6"),
        ("cut", "cannot be read"),
    ],
)
def test_a_source_that_llama_cpp_could_not_serve_is_refused_by_name(
    config: RunConfig, tmp_path: Path, kind: str, text: str
) -> None:
    source = save_drafter(config, tmp_path / "drafter")
    break_source(source, kind)
    config.export.gguf.source = str(source)
    with pytest.raises(GgufError, match=text):
        export_gguf(config)
    assert list(gguf_export.gguf_folder(config).glob("*.gguf*")) == []


@pytest.mark.parametrize("kind", ["none", "empty", "other", "cut", "counts"])
def test_reading_refuses_what_is_no_whole_file(base: Path, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.gguf"
    content = written(base, "F32").read_bytes()
    if kind == "empty":
        path.write_bytes(b"")
    elif kind == "other":
        path.write_bytes(b"PK\x03\x04" + bytes(100))
    elif kind == "cut":
        path.write_bytes(content[:-200])
    elif kind == "counts":
        path.write_bytes(content[:8] + struct.pack("<Q", 1 << 60) + content[16:])
    with pytest.raises(GgufError, match=r"x\.gguf"):
        GgufFile(path)


def test_reading_lists_what_a_drafter_lacks(base: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(written(base, "F32").read_bytes())
    rename_tensor(path)
    with pytest.raises(GgufError, match=r"self_attn\.q_proj\.weight: missing[\s\S]*attn_Q\.weight: unknown"):
        read_gguf_drafter(path)
    assert "blk.0.attn_Q.weight" in GgufFile(path).tensors  # the facts are readable all the same


def test_types_that_only_other_writers_use_are_read(tmp_path: Path) -> None:
    path, generator = tmp_path / "x.gguf", torch.Generator().manual_seed(0)
    stored = torch.randint(
        0, 60, (3, 2 * 210), generator=generator, dtype=torch.uint8
    ).numpy()  # Q6_K: 210 bytes for 256
    writer = gguf.GGUFWriter(path, "dflash")
    writer.add_tensor("fc.weight", stored, raw_dtype=gguf.GGMLQuantizationType.Q6_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(path)
    assert (file.tensors["fc.weight"].shape, file.tensors["fc.weight"].kind) == ((3, 512), "Q6_K")
    wanted = torch.from_numpy(gguf.dequantize(stored, gguf.GGMLQuantizationType.Q6_K))
    assert torch.equal(file.tensor("fc.weight"), wanted)
    assert torch.equal(file.row("fc.weight", 1), wanted[1])


def test_a_plan_of_the_glm_drafter_has_81_tensors_and_keeps_32_of_them_in_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(DrafterFolder, "__init__", lambda self: None)
    folder = DrafterFolder()  # type: ignore[call-arg]
    folder.folder, folder.shape = Path("glm"), GLM_5_LAYERS
    folder.expected = Drafter.expected_tensors(GLM_5_LAYERS)
    path = Path("glm") / "model.safetensors"
    folder.weights = SimpleNamespace(header=folder.expected, path_of=lambda name: path)  # type: ignore[assignment]
    plan = folder.plan("Q8_0", gguf_config(Path("x")).export.gguf, None)
    kinds = [tensor.kind for tensor in plan]
    assert (len(kinds), kinds.count("F32"), kinds.count("Q8_0")) == (81, 2 + 6 * 5, 49)
    values = sum(tensor.num_values for tensor in plan)
    assert values == 1_171_080_448


def test_record_and_readme_give_type_size_and_hash_of_every_file(base: Path) -> None:
    record = json.loads((base / "export-gguf" / "gguf.json").read_text())
    for name, entry in record["files"].items():
        path = base / "export-gguf" / name
        assert entry["sha256"] == sha256_file(path)
        assert entry["bytes"] == path.stat().st_size
        assert sum(entry["tensors_by_type"].values()) == entry["tensors"] == 37
    sizes = {entry["type"]: entry["bytes"] for entry in record["files"].values()}
    assert sizes["F32"] > sizes["BF16"] >= sizes["F16"] > sizes["Q8_0"] > sizes["Q4_1"]
    readme = (base / "export-gguf" / "README.md").read_text()
    assert "learned mask vector" in readme and "| Q8_0 |" in readme and "--spec-draft-n-max 3" in readme


def test_the_drafter_of_the_file_drafts_what_the_published_one_does(base: Path, config: RunConfig) -> None:
    drafter = Drafter(DrafterFolder(base / "drafter").shape)
    loaded = read_gguf_drafter(written(base, "F32"))
    state = loaded.state_dict()
    mask = loaded.mask_embedding
    assert mask is not None
    drafter.load_state_dict({**state, "mask_embedding": mask}, strict=True)
    wanted = make_drafter(config).bfloat16().float().state_dict()
    assert all(torch.equal(drafter.state_dict()[name], tensor) for name, tensor in wanted.items())
