"""A cache that is not what the target would compute, or whose text it did not write, is refused before a step is spent.

Every gate is shown to pass on a faithful cache and to fail on the one fault it is there for.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from data_gen.cache.conversations import ConversationStore
from data_gen.cache.format import CacheIntegrityError, CapturedSample, CaptureManifest
from data_gen.cache.reader import CaptureReader
from data_gen.cache.writer import CaptureWriter
from dflash2_train.attest import FAIL, PASS, UNKNOWN, Attestation, attest
from dflash2_train.attest.gate import Gate
from dflash2_train.attest.labels import spread
from dflash2_train.attest.records import SAMPLING_FIELDS, Conversations, record_gates
from dflash2_train.config import ConfigError, RunConfig
from dflash2_train.provenance import hash_chat_template
from tests.architectures import LAYERS, write_architecture
from tests.cases import tiny_run_config
from tests.tiny_target import cache_manifest, captured, save_tiny_llama, write_cache
from tests.toy_target import TEMPLATE, write_tokenizer

FORWARD = ("taps", "tap layers", "teacher")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    root = tmp_path_factory.mktemp("attest")
    config = tiny_run_config(root)
    config.target.name, config.target.dtype = str(root / "target"), "float32"
    config.data.teacher_top_k, config.data.attest.min_agreement = 8, 0.05
    write_cache(save_tiny_llama(root / "target", config), config, samples=4, length=20)
    return config


def reader_of(config: RunConfig) -> CaptureReader:
    return CaptureReader(Path(config.data.root) / "capture")


def with_limits(config: RunConfig, **changes: Any) -> RunConfig:
    limits = dataclasses.replace(config.data.attest, **changes)
    return dataclasses.replace(config, data=dataclasses.replace(config.data, attest=limits))


def rewrite(
    config: RunConfig,
    root: Path,
    *,
    taps: list[int] | None = None,
    ids: list[int] | None = None,
    change: Callable[[CapturedSample], CapturedSample] = lambda sample: sample,
) -> CaptureReader:
    """A cache that claims the config's taps but holds those of ``taps``, for the text ``ids``, then changed."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(config.target.name)
    writer = CaptureWriter(root / "capture", cache_manifest(config))
    drafter = dataclasses.replace(config.drafter, target_layer_ids=taps or config.drafter.target_layer_ids)
    text = ids or list(range(5, 45))
    sample = captured(model, dataclasses.replace(config, drafter=drafter), "s", text, prompt=4)
    writer.write_shard(0, [change(sample)])
    return CaptureReader(root / "capture")


def gate(attestation: Attestation, name: str) -> Gate:
    return next(gate for gate in attestation.gates if gate.name == name)


def only_failure(attestation: Attestation) -> Gate:
    (failed,) = attestation.failed()
    return failed


def test_a_faithful_cache_passes_with_an_error_of_rounding_size(config: RunConfig) -> None:
    attested = attest(reader_of(config), config)
    assert attested.passed
    attested.refuse()
    assert {gate.name for gate in attested.gates if gate.verdict == PASS} >= {*FORWARD, "mask token", "labels: all"}
    assert attested.tokens >= config.data.attest.tokens
    assert attested.relative_error < 0.01
    assert 0 < attested.argmax <= attested.in_top_k <= 1


def test_layers_shifted_by_one_are_named_with_the_layer_that_fits(config: RunConfig, tmp_path: Path) -> None:
    attested = attest(rewrite(config, tmp_path, taps=[1, 3, 5]), config)
    assert {found.name for found in attested.failed()} >= {"taps", "tap layers"}
    assert "tap 0 fits layer 1 (0.00" in gate(attested, "tap layers").found
    with pytest.raises(CacheIntegrityError, match="tap 2 fits layer 3"):
        attested.refuse()


def test_one_wrong_tap_among_right_ones_shows(config: RunConfig, tmp_path: Path) -> None:
    attested = attest(rewrite(config, tmp_path, taps=[0, 2, 3]), config)
    assert gate(attested, "taps").found.split()[3] == "4,"
    assert gate(attested, "tap layers").verdict == FAIL


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda sample: {"teacher_ids": sample.teacher_ids.roll(1, dims=-1)}, id="another first choice"),
        pytest.param(lambda sample: {"teacher_logprobs": sample.teacher_logprobs * 1.5}, id="a missing scale"),
    ],
)
def test_a_teacher_that_is_not_the_targets_is_refused(
    config: RunConfig, tmp_path: Path, change: Callable[[CapturedSample], dict[str, Any]]
) -> None:
    reader = rewrite(config, tmp_path, change=lambda sample: dataclasses.replace(sample, **change(sample)))
    assert only_failure(attest(reader, config)).name == "teacher"


def test_without_a_forward_its_gates_are_not_checked_and_said_to_be_so(config: RunConfig) -> None:
    attested = attest(reader_of(config), with_limits(config, tokens=0))
    assert [gate(attested, name).verdict for name in FORWARD] == [UNKNOWN] * 3
    assert attested.passed


def test_text_that_the_target_did_not_write_is_refused_with_the_share_found(config: RunConfig) -> None:
    failed = only_failure(attest(reader_of(config), with_limits(config, min_agreement=1.0)))
    assert failed.name == "labels: all"
    assert "% in the teacher's top-k" in failed.found


def test_a_mask_token_that_occurs_in_the_text_is_refused(config: RunConfig, tmp_path: Path) -> None:
    reader = rewrite(config, tmp_path, ids=[*range(5, 30), config.drafter.mask_token_id, 7, 8])
    assert gate(attest(reader, config), "mask token").verdict == FAIL


@pytest.mark.parametrize(("supervise", "verdict"), [(True, FAIL), (False, PASS)])
def test_a_cache_whose_prompts_are_supervised_is_refused(
    config: RunConfig, tmp_path: Path, supervise: bool, verdict: str
) -> None:
    def change(sample: CapturedSample) -> CapturedSample:
        mask = torch.ones_like(sample.loss_mask) if supervise else sample.loss_mask
        return dataclasses.replace(sample, loss_mask=mask)

    assert gate(attest(rewrite(config, tmp_path, change=change), config), "supervised share").verdict == verdict


def test_one_source_of_foreign_text_is_refused_though_the_whole_agrees(config: RunConfig, tmp_path: Path) -> None:
    """Own text four times, a foreign row once: the pooled share would pass."""
    own = reader_of(config)
    foreign = rewrite(config, tmp_path / "foreign", ids=[*range(90, 50, -1)]).read(0)
    writer = CaptureWriter(tmp_path / "capture", cache_manifest(config))
    samples = [own.read(index) for index in range(len(own))]
    writer.write_shard(0, [*samples, foreign])
    store = ConversationStore(tmp_path)
    store.folder.mkdir(parents=True)
    (store.folder / "manifest.json").write_text(json.dumps({"format_version": 2, "content": {"enable_thinking": None}}))
    sources = {sample.sample_id: "own" for sample in samples} | {foreign.sample_id: "foreign"}
    write_rows(store, sources)
    data = dataclasses.replace(config.data, root=str(tmp_path))
    limited = with_limits(dataclasses.replace(config, data=data), min_agreement=0.2)
    attested = attest(CaptureReader(tmp_path / "capture"), limited)
    assert attested.in_top_k > 0.2
    assert only_failure(attested).name == "labels: foreign"
    assert gate(attested, "labels: own").verdict == PASS


def write_rows(store: ConversationStore, sources: dict[str, str]) -> None:
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    columns = {"row_id": list(sources), "source": list(sources.values()), "enable_thinking": [None] * len(sources)}
    pyarrow.parquet.write_table(pyarrow.table(columns), store.path(0))


def records(tmp_path: Path, content: dict[str, Any], conversations: Conversations, thinking: bool | None) -> list[Gate]:
    folder = tmp_path / "target"
    if not folder.exists():
        write_tokenizer(folder)
    return record_gates(content, conversations, folder, "t" * 64, thinking)


def verdicts(gates: list[Gate]) -> dict[str, str]:
    return {gate.name: gate.verdict for gate in gates}


def test_records_that_agree_pass_and_each_one_that_differs_fails_its_own_gate(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "target")
    from dflash2_train.provenance import hash_tokenizer_files

    made = {
        "target_hash": "t" * 64,
        "tokenizer_hash": hash_tokenizer_files(tmp_path / "target"),
        "chat_template_hash": hash_chat_template(tmp_path / "target"),
        "enable_thinking": True,
        "sampling": dict.fromkeys(SAMPLING_FIELDS, 1),
    }
    content = {
        **made,
        **{f"capture_{key}": made[key] for key in ("target_hash", "tokenizer_hash", "chat_template_hash")},
    }
    rows = Conversations(content=made, thinking=Counter({"True": 5}))
    good = verdicts(records(tmp_path, content, rows, thinking=True))
    assert set(good.values()) == {PASS}
    changes = {
        "target": {"capture_target_hash": "u" * 64},
        "tokenizer": {"capture_tokenizer_hash": "0" * 64},
        "template": {"capture_chat_template_hash": "0" * 64},
        "thinking": {"enable_thinking": False},
        "sampling": {"sampling": dict.fromkeys(SAMPLING_FIELDS[1:], 1)},
    }
    assert changes.keys() == good.keys()
    for name, change in changes.items():
        found = verdicts(records(tmp_path, {**content, **change}, rows, thinking=True))
        assert found == {**good, name: FAIL}


def test_a_few_rows_of_another_thinking_mode_are_refused(tmp_path: Path) -> None:
    content = {"enable_thinking": True}
    mixed = Conversations(content=content, thinking=Counter({"True": 5, "False": 5}))
    (thinking,) = [gate for gate in records(tmp_path, content, mixed, thinking=True) if gate.name == "thinking"]
    assert thinking.verdict == FAIL
    assert "5 rows: False" in thinking.found


def test_what_an_older_cache_does_not_record_is_not_checked_rather_than_passed(tmp_path: Path) -> None:
    found = verdicts(records(tmp_path, {"enable_thinking": None}, Conversations(), thinking=None))
    assert found == {**dict.fromkeys(("target", "tokenizer", "template", "sampling"), UNKNOWN), "thinking": PASS}


@pytest.mark.parametrize("as_file", [True, False])
def test_the_template_hash_is_that_of_the_text_which_transformers_takes(tmp_path: Path, as_file: bool) -> None:
    import hashlib

    from transformers import AutoTokenizer

    write_tokenizer(tmp_path)
    if not as_file:
        (tmp_path / "chat_template.jinja").unlink()
        path = tmp_path / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": TEMPLATE}))
    text = AutoTokenizer.from_pretrained(str(tmp_path)).chat_template
    assert hash_chat_template(tmp_path) == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize("count", [0, 1, 7, 32])
def test_a_spread_order_holds_every_index_once_and_starts_wide(count: int) -> None:
    order = list(spread(range(count)))
    assert sorted(order) == list(range(count))
    assert count < 7 or max(order[:3]) >= count // 2


def test_all_failed_gates_are_told_at_once_and_stand_in_the_table_and_the_record(config: RunConfig) -> None:
    limited = with_limits(config, min_agreement=1.0, min_supervised_share=0.0, max_supervised_share=0.1)
    attested = attest(reader_of(config), limited)
    with pytest.raises(CacheIntegrityError, match="(?s)supervised share: .*labels: all: "):
        attested.refuse()
    assert attested.table().row_count == len(attested.gates)
    record = json.loads(json.dumps(attested.to_dict()))
    assert record["passed"] is False
    assert {gate["name"] for gate in record["gates"]} >= {"target", "template", "thinking", *FORWARD}


def test_the_run_writes_the_verdicts_before_it_refuses(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dflash2_train import admission
    from dflash2_train.config import UserError

    told: list[bool] = []
    monkeypatch.setattr(admission, "first_rank_says", lambda flag: told.append(flag) or flag)
    limited = with_limits(config, min_agreement=1.0)
    with pytest.raises(CacheIntegrityError, match="labels"):
        admission.attest_cache(limited, tmp_path, reader_of(config), rank=0)
    assert json.loads((tmp_path / "attestation.json").read_text())["passed"] is False
    with pytest.raises(UserError, match="first rank refused"):
        admission.attest_cache(limited, tmp_path, reader_of(config), rank=1)
    broken = dataclasses.replace(config, target=dataclasses.replace(config.target, name=str(tmp_path / "nowhere")))
    with pytest.raises(ConfigError):
        admission.attest_cache(broken, tmp_path, reader_of(config), rank=0)
    assert told == [False, False, False], "the other ranks hear of an error too"


@pytest.mark.parametrize("name", ["qwen3", "glm_moe_dsa", "glm5_next"])
def test_a_cache_of_each_architecture_captured_and_attested_from_end_to_end(tmp_path: Path, name: str) -> None:
    """Sparse attention, recurrent layers and four residual streams included: gates and backend mean the same tap."""
    from data_gen.backends.hf import HfCapturer
    from data_gen.capture_rows import capture_rows, refuse_failure

    write_architecture(tmp_path / "target", name)
    config = tiny_run_config(tmp_path)
    config.target.name, config.target.dtype, config.target.num_layers = str(tmp_path / "target"), "float32", LAYERS
    config.data.teacher_top_k, config.data.attest.min_agreement = 8, 0.0
    rows = [{"row_id": f"r{n}", "prompt_ids": [0, 5, 7 + n], "completion_ids": [*range(20, 40)]} for n in range(3)]
    folder = Path(config.target.name)
    for taps, verdict in (([0, 2, 4], PASS), ([0, 1, 3], FAIL)):
        backend = HfCapturer(folder, config.target, config.data, taps)
        samples = list(capture_rows(backend, rows, on_failure=refuse_failure))
        root = tmp_path / "-".join(map(str, taps))
        CaptureWriter(root, cache_manifest(config)).write_shard(0, samples)
        attested = attest(CaptureReader(root), config)
        assert gate(attested, "tap layers").verdict == gate(attested, "taps").verdict == verdict
        assert gate(attested, "teacher").verdict == PASS


def test_limits_are_checked() -> None:
    from dflash2_train.config import AttestConfig

    for change in ({"tokens": -1}, {"min_agreement": 1.5}, {"min_supervised_share": 0.9, "max_supervised_share": 0.5}):
        with pytest.raises(ConfigError, match="data.attest"):
            AttestConfig(**change).check()  # type: ignore[arg-type]


def test_a_manifest_of_other_taps_is_refused_before_any_forward(config: RunConfig) -> None:
    reader = reader_of(config)
    reader.manifest = CaptureManifest(content={**reader.manifest.content, "target_layer_ids": [1, 2, 3]})
    with pytest.raises(CacheIntegrityError, match="target_layer_ids"):
        attest(reader, config)
