"""The doctor on GGUFs: a clean one has no finding, and each planted fault is found by its check and by no other."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dflash2_train.app import EXIT_FAULT
from dflash2_train.export.commands import dispatch
from dflash2_train.export.doctor.gguf_checks import examine_gguf
from dflash2_train.export.doctor.gguf_file import GGUF_CHECKS
from dflash2_train.export.doctor.target_facts import TargetFacts
from tests.cases import make_target_info
from tests.contract.drafter_families import export_family, tiny_family
from tests.contract.tiny_gguf import Edit, GgufFault, Parts, gguf_parts, write_gguf
from tests.families import EXPERIMENTS, HIDDEN, VOCAB

pytest.importorskip("gguf")
BASE, PROJECTION = "blk.0.attn_conv_base", "blk.0.attn_conv_proj.weight"
SWA = "glm53_flash_swa"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: export_family(name, tmp_path_factory.mktemp(name)) for name in EXPERIMENTS}


def key(**changes: object) -> Edit:
    """Set keys, dots written as double underscores; None removes one."""

    def edit(parts: Parts) -> None:
        for name, value in changes.items():
            full = name.replace("__", ".")
            if value is None:
                del parts.keys[full]
            else:
                parts.keys[full] = value

    return edit


def tensor(name: str, new: object) -> Edit:
    """Set one tensor, or remove it for None."""
    return lambda parts: parts.tensors.pop(name) if new is None else parts.tensors.update({name: new})


def change(name: str, function: object) -> Edit:
    return lambda parts: parts.tensors.update({name: function(parts.tensors[name])})


def identity(parts: Parts) -> None:
    parts.tensors[BASE] = np.zeros_like(parts.tensors[BASE])
    parts.tensors[BASE][:, 0] = 1
    parts.tensors[PROJECTION] = np.zeros_like(parts.tensors[PROJECTION])


def old_architecture(parts: Parts) -> None:
    parts.architecture = "llama"


def own_embedding(parts: Parts) -> None:
    table = np.random.default_rng(0).standard_normal((VOCAB, HIDDEN)).astype(np.float16)
    table[VOCAB - 1] = 0
    parts.tensors["token_embd.weight"] = table


FAULTS = (
    GgufFault(what="the target's own file", check="gguf-architecture", edit=old_architecture),
    GgufFault(what="no head size", check="gguf-keys", edit=key(attention__value_length=None)),
    GgufFault(what="no rotary base", check="gguf-keys", edit=key(rope__freq_base=None)),
    GgufFault(what="a key of the old converter", check="gguf-old-converter", edit=key(mask_token_id=5)),
    GgufFault(what="no block size", check="gguf-second-keys", edit=key(block_size=None)),
    GgufFault(what="no selector width", check="gguf-second-keys", edit=key(selector_top_k=None)),
    GgufFault(what="no layers of the target", check="gguf-target-layers", edit=key(target_layers=None)),
    GgufFault(what="layers out of order", check="gguf-target-layers", edit=key(target_layers=[15, 6, 25, 34, 43])),
    GgufFault(
        what="layers without the added 1", check="gguf-target-layers", edit=key(target_layers=[0, 14, 24, 33, 42])
    ),
    GgufFault(what="causal blocks", check="gguf-causal", edit=key(attention__causal=True)),
    GgufFault(what="a window without a pattern", check="gguf-window", edit=key(attention__sliding_window_pattern=None)),
    GgufFault(what="a pattern too short", check="gguf-window", edit=key(attention__sliding_window_pattern=[True])),
    GgufFault(what="a window below the block", check="gguf-window", edit=key(attention__sliding_window=7)),
    GgufFault(what="scaled embeddings", check="gguf-embedding-scale", edit=key(embedding_scale=2.0)),
    GgufFault(what="too many candidates", check="gguf-lattice", edit=key(selector_top_k=8)),
    GgufFault(what="no tokenizer", check="gguf-tokenizer", edit=key(tokenizer__ggml__tokens=None)),
    GgufFault(what="another tokenizer", check="gguf-tokenizer", edit=key(tokenizer__ggml__tokens=["a", "b"])),
    GgufFault(what="no mask token", check="gguf-mask-id", edit=key(tokenizer__ggml__mask_token_id=None)),
    GgufFault(
        what="a mask token beyond the table", check="gguf-mask-id", edit=key(tokenizer__ggml__mask_token_id=VOCAB)
    ),
    GgufFault(what="a tensor left out", check="gguf-tensors-missing", edit=tensor("blk.1.ffn_up.weight", None)),
    GgufFault(what="an unknown tensor", check="gguf-tensors-unknown", edit=tensor("mask", np.ones(4, np.float32))),
    GgufFault(
        what="a conv base named as a weight",
        check="gguf-tensors-unknown",
        edit=lambda parts: parts.tensors.update({f"{BASE}.weight": parts.tensors.pop(BASE)}),
    ),
    GgufFault(
        what="a transposed conv base", check="gguf-shapes", edit=change(BASE, lambda base: base.transpose(2, 1, 0))
    ),
    GgufFault(
        what="a conv base in half precision",
        check="gguf-float32",
        edit=change(BASE, lambda base: base.astype(np.float16)),
    ),
    GgufFault(
        what="a value beyond half precision",
        check="gguf-finite",
        edit=change("fc.weight", lambda weight: (weight.astype(np.float32) * 0 + 1e9 * weight).astype(np.float16)),
    ),
    GgufFault(what="a norm of zeros", check="gguf-zero", edit=change("output_norm.weight", np.zeros_like)),
    GgufFault(what="a matrix of ones", check="gguf-zero", edit=change("blk.0.attn_v.weight", np.ones_like)),
    GgufFault(what="a convolution that was never trained", check="gguf-untrained", edit=identity),
    GgufFault(
        what="a selector that was never trained",
        check="gguf-untrained",
        edit=change("selector_successor.weight", np.zeros_like),
    ),
    GgufFault(what="an own embedding with an empty mask row", check="gguf-mask-row", edit=own_embedding),
    GgufFault(what="a cut file", check="gguf-file", spoil=lambda path: path.write_bytes(path.read_bytes()[:-5000])),
    GgufFault(
        what="a file cut in its keys", check="gguf-file", spoil=lambda path: path.write_bytes(path.read_bytes()[:300])
    ),
    GgufFault(what="an empty file", check="gguf-file", spoil=lambda path: path.write_bytes(b"")),
    GgufFault(what="another file", check="gguf-file", spoil=lambda path: path.write_bytes(b"text, no model" * 10)),
)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_a_clean_gguf_of_every_experiment_has_no_finding(
    experiment: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    parts = gguf_parts(folders[experiment])
    assert len(parts.tensors) == 6 + 15 * parts.keys["block_count"]
    target = TargetFacts.of(make_target_info(tiny_family(experiment, tmp_path)))
    assert examine_gguf(write_gguf(tmp_path / "drafter.gguf", parts), target=target).findings == []


def test_the_five_layer_drafter_has_81_tensors(folders: dict[str, Path]) -> None:
    assert len(gguf_parts(folders[SWA]).tensors) == 81


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.check}: {fault.what}")
def test_a_planted_fault_is_found_by_its_check_and_by_no_other(
    fault: GgufFault, folders: dict[str, Path], tmp_path: Path
) -> None:
    parts = gguf_parts(folders[SWA])
    fault.edit(parts)
    path = write_gguf(tmp_path / "drafter.gguf", parts)
    fault.spoil(path)
    findings = examine_gguf(path).findings
    assert {finding.check for finding in findings} == {fault.check, *fault.also}, "\n".join(map(str, findings))


def test_another_target_is_found(folders: dict[str, Path], tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "drafter.gguf", gguf_parts(folders[SWA]))
    config = tiny_family(SWA, tmp_path)
    config.target.num_layers, config.target.vocab_size = 40, 2 * VOCAB
    findings = examine_gguf(path, target=TargetFacts.of(make_target_info(config))).findings
    assert [finding.check for finding in findings] == ["gguf-target"] * 2


def test_every_check_has_a_planted_fault() -> None:
    assert GGUF_CHECKS.checks.keys() | {"gguf-file"} == {fault.check for fault in FAULTS} | {"gguf-target"}


def test_the_command_takes_a_gguf_and_shows_llama_cpps_view(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_gguf(tmp_path / "my drafter.gguf", gguf_parts(folders[SWA]))
    assert dispatch(["doctor", str(path), "--serve", "llama.cpp", "--json"]) == 0
    view = json.loads(capsys.readouterr().out)["serve"]
    assert view["server"] == "llama.cpp"
    assert f"--spec-draft-model '{path}' --spec-draft-n-max 7" in view["command"]
    assert any("no embedding of its own" in pitfall for pitfall in view["pitfalls"])


def test_a_server_that_reads_no_gguf_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "drafter.gguf").write_bytes(b"")
    assert dispatch(["doctor", str(tmp_path / "drafter.gguf"), "--serve", "vllm"]) == EXIT_FAULT
    assert "reads no GGUF" in capsys.readouterr().err
