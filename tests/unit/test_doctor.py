"""The doctor's command: what it is given, what it prints, how it ends. The faults are in tests/contract."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dflash2_train.app import EXIT_FAULT
from dflash2_train.config import RunConfig, UserError
from dflash2_train.export.commands import dispatch
from dflash2_train.export.doctor import check_config, check_folder
from dflash2_train.export.doctor.obtain import FETCHED, obtain
from dflash2_train.export.doctor.target_facts import open_target
from dflash2_train.export.doctor.weights import PIECE_ELEMENTS, Weights
from dflash2_train.export.hf import export_hf
from dflash2_train.model.drafter_config import DrafterShape
from tests.cases import RECORD, edit_json, make_drafter, make_target_info, tiny_run_config


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One export for the whole module; tests edit copies."""
    root = tmp_path_factory.mktemp("doctor")
    config = tiny_run_config(root)
    config.drafter.selector_top_k = 4
    return export_hf(make_drafter(config), config, make_target_info(config), root / "out", run_record=RECORD)


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "dflash"))


def doctor(*words: object) -> int | None:
    return dispatch(["doctor", *map(str, words)])


def test_a_clean_folder_ends_with_0(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor(folder) == 0
    out = capsys.readouterr().out
    assert "fit to serve: no error, no warning" in out
    assert "name it with --target" in out  # what could not be looked at is said


def test_an_error_ends_with_1_and_the_table_tells_what_to_do(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit_json(folder / "config.json", is_causal=...)
    assert doctor(folder) == 1
    out = capsys.readouterr().out
    for part in ("is-causal", "error", "SGLang", "Write false", "not fit to serve"):
        assert part in out


def test_a_warning_fails_only_when_strict(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "run.json").unlink()
    assert doctor(folder) == 0
    assert doctor(folder, "--strict") == 1
    assert "record-missing" in capsys.readouterr().out


def test_json_is_one_document_with_all_findings(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit_json(folder / "config.json", dflash_config__target_layer_ids=[2, 0, 4])
    assert doctor(folder, "--json", "--serve", "vllm") == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["format"], told["errors"], told["drafter"]) == (1, len(told["findings"]), str(folder))
    (order,) = [finding for finding in told["findings"] if finding["check"] == "taps-order"]
    assert order["severity"] == "error"
    assert order["servers"] == ["vLLM", "SGLang"]
    assert order["next_step"] and order["rule"]
    assert told["serve"]["server"] == "vLLM"


@pytest.mark.parametrize(
    ("server", "launch"),
    [
        ("vllm", '"num_speculative_tokens": 3'),
        ("sglang", "--speculative-num-draft-tokens 4"),
        ("llama.cpp", "--spec-draft-n-max 3"),
    ],
)
def test_the_launch_command_has_each_servers_own_count(
    folder: Path, server: str, launch: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor(folder, "--serve", server, "--json") == 0
    assert launch in json.loads(capsys.readouterr().out)["serve"]["command"]


@pytest.mark.parametrize("server", ["sglang", "llama.cpp"])
def test_a_server_that_ignores_the_mask_vector_is_told_on(
    folder: Path, server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    doctor(folder, "--serve", server, "--json")
    view = json.loads(capsys.readouterr().out)["serve"]
    assert any("mask_embedding.pt is not read" in pitfall for pitfall in view["pitfalls"])


def test_vllm_is_told_the_log_line_that_proves_the_mask_vector(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    doctor(folder, "--serve", "vllm", "--json")
    view = json.loads(capsys.readouterr().out)["serve"]
    (mask,) = [row for row in view["reads"] if row["key"] == "mask_embedding.pt"]
    assert "Loaded DFlash mask embedding for mask_token_id 95" in mask["effect"]


def test_the_serving_view_is_printed_whole(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor(folder, "--serve", "vllm", "--target", folder.parent / "none") == EXIT_FAULT
    assert "--target" in capsys.readouterr().err
    assert doctor(folder, "--serve", "vllm") == 0
    (command,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("vllm serve")]
    assert command.endswith("}'")


def test_fewer_proposals_are_explained_and_more_are_an_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor(folder, "--serve", "vllm", "--proposals", 2, "--json") == 0
    view = json.loads(capsys.readouterr().out)["serve"]
    assert '"num_speculative_tokens": 2' in view["command"]
    assert any(pitfall.startswith("2 proposals") for pitfall in view["pitfalls"])
    assert doctor(folder, "--proposals", 4, "--json") == 1
    assert [found["check"] for found in json.loads(capsys.readouterr().out)["findings"]] == ["proposals"]


def test_a_folder_without_a_block_size_gets_findings_and_no_command(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit_json(folder / "config.json", dflash_config=None, block_size=...)
    assert doctor(folder, "--serve", "vllm", "--json") == 1
    told = json.loads(capsys.readouterr().out)
    assert told["serve"] is None
    assert any("no block size" in line for line in told["not_checked"])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("nowhere", "no such folder"),
        ("/nowhere/at/all", "no such folder"),
        ("./owner/name", "no such folder"),
        ("a/b/c", "no such folder"),
    ],
)
def test_what_is_neither_here_nor_a_hub_id_is_one_clear_line(
    name: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor(name) == EXIT_FAULT
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert text in error


def test_a_file_that_is_no_gguf_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match="no .gguf"):
        obtain(str(folder / "model.safetensors"))


def test_a_folder_with_one_gguf_means_that_file_and_with_two_is_asked_for_one(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"")
    assert obtain(str(tmp_path)).is_gguf
    (tmp_path / "b.gguf").write_bytes(b"")
    with pytest.raises(UserError, match="2 GGUF files"):
        obtain(str(tmp_path))


class Hub:
    """In the place of ``snapshot_download``: answers with a folder or an error, and remembers what it was asked."""

    def __init__(self, answer: Path | Exception) -> None:
        self.answer = answer
        self.asked: dict[str, object] = {}

    def __call__(self, repository: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        self.asked = {"repository": repository, "revision": revision, "patterns": allow_patterns}
        if isinstance(self.answer, Exception):
            raise self.answer
        return str(self.answer)


def response_error(kind: str) -> Exception:
    """An error of huggingface_hub as a server's answer makes it."""
    import httpx
    from huggingface_hub import errors

    response = httpx.Response(403, request=httpx.Request("GET", "https://hub.invalid"))
    made: Exception = getattr(errors, kind)("said no", response=response)
    return made


def test_a_hub_id_is_taken_at_one_commit_and_without_programs(
    pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "a" * 40
    hub = Hub(Path(shutil.copytree(pristine, tmp_path / "snapshots" / commit)))
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub)
    obtained = obtain("owner/drafter@v2")
    assert (obtained.name, obtained.commit) == ("owner/drafter", commit)
    assert hub.asked == {"repository": "owner/drafter", "revision": "v2", "patterns": list(FETCHED)}
    assert not any(pattern.endswith(("py", "bin", "*")) for pattern in FETCHED)
    assert check_folder(obtained.path) == []


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("GatedRepoError", "Accept the terms"),
        ("RepositoryNotFoundError", "no such repository"),
        ("RevisionNotFoundError", "no such revision"),
        ("HfHubHTTPError", "said no"),
    ],
)
def test_what_the_hub_refuses_is_told_with_the_next_step(kind: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", Hub(response_error(kind)))
    with pytest.raises(UserError, match=text):
        obtain("owner/drafter", "main")


def test_no_network_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.errors import LocalEntryNotFoundError

    monkeypatch.setattr("huggingface_hub.snapshot_download", Hub(LocalEntryNotFoundError("offline")))
    with pytest.raises(UserError, match="neither the Hub could be reached"):
        obtain("owner/drafter")


def test_two_revisions_are_refused_before_anything_is_asked() -> None:
    with pytest.raises(UserError, match="Give the revision once"):
        obtain("owner/drafter@one", "two")


def test_a_repository_of_ggufs_alone_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", Hub(tmp_path))
    with pytest.raises(UserError, match="has no config.json"):
        obtain("owner/drafter")


def test_the_configuration_alone_is_checked_before_training(tiny_config: RunConfig) -> None:
    target = make_target_info(tiny_config)
    shape = DrafterShape.from_config(tiny_config)
    published = shape.to_published("bfloat16", bos_token_id=0, eos_token_id=[1, 2], pad_token_id=None)
    assert {finding.check for finding in check_config(published, target=target)} == {"selector-lattice"}
    published["max_position_embeddings"] = 63
    assert "positions" in {finding.check for finding in check_config(published, target=target)}


def test_a_drafter_of_the_first_version_is_judged_by_its_own_list_of_tensors(folder: Path) -> None:
    from safetensors.torch import load_file

    nested = {"mask_token_id": 95, "target_layer_ids": [0, 2, 4], "block_size": 4}
    edit_json(folder / "config.json", architectures=["DFlashDraftModel"], dflash_config=nested)
    stored = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in stored.items() if "conv" not in name and "selector" not in name}
    assert len(kept) == 3 + 11 * 2
    save_file(kept, folder / "model.safetensors")
    (folder / "run.json").unlink()
    (folder / "PROVENANCE.txt").unlink()
    assert [finding.check for finding in check_folder(folder)] == ["record-missing"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([-3.0, 0.5, 2.0], (True, -3.0, 2.0)),
        ([-3.0, float("nan"), 2.0], (False, -3.0, 2.0)),
        ([float("-inf"), 0.5, 2.0], (False, 0.5, 2.0)),
        ([float("nan")] * 3, (False, 0.0, 0.0)),
        ([], (True, 0.0, 0.0)),
    ],
)
def test_one_pass_over_stored_values_tells_whether_all_are_finite_and_the_ends_of_those_that_are(
    values: list[float], expected: tuple[bool, float, float], dtype: torch.dtype, tmp_path: Path
) -> None:
    save_file({"t": torch.tensor(values, dtype=dtype)}, tmp_path / "model.safetensors")
    found = Weights(tmp_path).figures("t")
    assert (found.finite, found.low, found.high) == expected


def test_a_large_tensor_is_read_a_piece_at_a_time(tmp_path: Path) -> None:
    wide = PIECE_ELEMENTS // 4
    table = torch.zeros(9, wide, dtype=torch.bfloat16)
    table[8, -1] = float("nan")
    save_file({"table": table, "scalar": torch.tensor(2.0)}, tmp_path / "model.safetensors")
    weights = Weights(tmp_path)
    assert [len(piece) for piece in weights.pieces("table")] == [4, 4, 1]
    assert not weights.figures("table").finite
    assert weights.figures("scalar").high == 2.0


def test_a_target_is_opened_from_its_folder_alone(tmp_path: Path) -> None:
    stated = {
        "model_type": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "vocab_size": 96,
        "max_position_embeddings": 64,
        "eos_token_id": 2,
        "rope_theta": 10000.0,
    }
    (tmp_path / "config.json").write_text(json.dumps(stated))
    target = open_target(str(tmp_path))
    assert (target.hidden_size, target.num_layers, target.vocab_size, target.eos_token_ids) == (32, 6, 96, (2,))
    assert target.tokenizer is None and target.tensors is None


@pytest.mark.parametrize("content", ["{}", "[]", "{"])
def test_a_folder_that_is_no_model_is_no_target(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match="--target"):
        open_target(str(tmp_path))


ODD_VALUES = (None, True, -1, 0, 1e300, "x", [], [None], ["x", {}], {}, {"a": []})


def refused_by_our_loader(config: dict[str, object]) -> bool:
    try:
        DrafterShape.from_published(config)
    except (ValueError, TypeError):
        return True
    return False


def test_no_content_of_the_configuration_stops_the_doctor_or_passes_it_where_our_loader_refuses(pristine: Path) -> None:
    """Each key set to each odd value, and each left out."""
    plain = json.loads((pristine / "config.json").read_text())
    for section in ("", "dflash_config"):
        for key in plain[section] if section else plain:
            for value in (*ODD_VALUES, ...):
                config = json.loads(json.dumps(plain))
                place = config[section] if section else config
                place[key] = value
                if value is ...:
                    del place[key]
                findings = check_config(config)
                assert findings or not refused_by_our_loader(config), (section, key, value)


def test_shards_of_the_export_itself_are_clean_and_a_missing_one_is_named(tmp_path: Path) -> None:
    config = tiny_run_config(tmp_path)
    config.drafter.selector_top_k = 4
    config.export.max_shard_gib = 2**-16  # 16 KiB a file
    out = export_hf(make_drafter(config), config, make_target_info(config), tmp_path / "out", run_record=RECORD)
    shards = sorted(out.glob("*.safetensors"))
    assert len(shards) > 1
    assert check_folder(out) == []
    shards[0].unlink()
    assert any(finding.check == "weights-file" and shards[0].name in finding.message for finding in check_folder(out))


def test_a_table_that_was_exported_on_purpose_is_no_finding(folder: Path) -> None:
    from safetensors.torch import load_file

    stored = load_file(folder / "model.safetensors")
    save_file({**stored, "embed_tokens.weight": torch.randn(96, 32).bfloat16()}, folder / "model.safetensors")
    assert "own-tables" in {finding.check for finding in check_folder(folder)}
    edit_json(folder / "run.json", export__tables=["embed_tokens"])
    assert "own-tables" not in {finding.check for finding in check_folder(folder)}


def test_the_launch_command_proposes_what_the_record_says(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit_json(folder / "run.json", export__num_proposals=2)
    doctor(folder, "--serve", "sglang", "--json")
    assert "--speculative-num-draft-tokens 3" in json.loads(capsys.readouterr().out)["serve"]["command"]


def test_the_launch_command_names_the_recorded_target(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit_json(folder / "run.json", target__name="owner/target")
    doctor(folder, "--serve", "vllm", "--json")
    assert json.loads(capsys.readouterr().out)["serve"]["command"].startswith("vllm serve owner/target ")
