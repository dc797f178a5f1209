"""Regeneration: what the engine returned is what is stored; a rerun continues, and never under other settings."""

from __future__ import annotations

import dataclasses
import errno
import json
import shutil
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from data_gen import regenerate as stage
from data_gen.backends.hf import check_supported
from data_gen.backends.nucleus import keep_nucleus_
from data_gen.cache.conversations import NAMES_AT_ONCE, ConversationStore, RowFacts
from data_gen.cache.format import CacheIntegrityError
from data_gen.cli import gen_data
from data_gen.prepare import prepare
from data_gen.turns import row_id, row_seed
from dflash2_train.config import ConfigError, RunConfig
from dflash2_train.provenance import publish
from tests.regeneration import MAX_TOKENS, PROMPTS, SHARD, StubBackend, make_config, no_display, rows_of, run, with_data
from tests.toy_target import END


@pytest.fixture
def config(tmp_path: Path, tiny_config: RunConfig) -> RunConfig:
    return make_config(tmp_path, tiny_config)


def with_sampling(config: RunConfig, **changes: object) -> RunConfig:
    sampling = dataclasses.replace(config.data.sampling, **changes)
    return dataclasses.replace(config, data=dataclasses.replace(config.data, sampling=sampling))


def test_rows_keep_the_ids_of_the_engine_and_everything_needed_to_repeat_them(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = StubBackend()
    totals = run(config, monkeypatch, backend)
    rows = rows_of(config)
    assert backend.closed
    assert len(rows) == totals.completions == totals.new_completions == PROMPTS
    by_id = {request.request_id: request for request in backend.requests}
    for name, row in rows.items():
        assert row["prompt_ids"] == by_id[name].prompt_ids
        assert row["completion_ids"] in ([7, 8, END], [7, 8, 9, 10, 11])
        assert row["seed"] == by_id[name].seed == row_seed(0, str(row["prompt_id"]), 0, 0)
        assert (row["temperature"], row["top_p"], row["max_tokens"], row["stop_ids"]) == (1.0, 0.95, MAX_TOKENS, [END])
        assert (row["license"], row["target"]) == ("mit", config.target.name)
    assert len({request.seed for request in backend.requests}) == PROMPTS


def test_shards_hold_rows_in_the_order_of_the_plan_whatever_order_the_engine_answers_in(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(config, monkeypatch, StubBackend())  # answers the newest request first
    store = ConversationStore(Path(config.data.root))
    stored = [[row["prompt_id"] for row in store.read(index)] for index in store.shards()]
    planned = [record.prompt_id for record in prepare(config).train]
    assert stored == [planned[begin : begin + SHARD] for begin in range(0, PROMPTS, SHARD)]


def test_cut_answers_are_counted_and_never_get_an_end_token(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    totals = run(config, monkeypatch, StubBackend())
    cut = [row for row in rows_of(config).values() if row["finish_reason"] == "length"]
    assert totals.cut == len(cut) > 0
    assert all(END not in row["completion_ids"] and not row["dropped"] for row in cut)


def test_the_drop_policy_marks_exactly_the_cut_rows(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, drop_cut=True))
    totals = run(config, monkeypatch, StubBackend())
    assert totals.dropped == {"cut by max_tokens": totals.cut}


def test_a_finished_stage_starts_no_engine(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    run(config, monkeypatch, StubBackend())
    monkeypatch.setattr(stage, "open_generator", lambda *_: pytest.fail("an engine was started"))
    totals = stage.regenerate(config, prepare(config), no_display)
    assert (totals.completions, totals.new_completions) == (PROMPTS, 0)


def test_a_run_that_died_is_continued_by_row_id_and_equals_an_uninterrupted_one(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(config, monkeypatch, StubBackend(alive=SHARD + 1))
    kept = rows_of(config)
    assert len(kept) == SHARD + 1, "an interrupted run keeps every finished answer"
    (tmp_path / "train.jsonl").write_text("".join(reversed((tmp_path / "train.jsonl").read_text().splitlines(True))))
    second = StubBackend()
    run(config, monkeypatch, second)
    assert {request.request_id for request in second.requests}.isdisjoint(kept)
    assert len(second.requests) == PROMPTS - SHARD - 1
    continued = rows_of(config)
    elsewhere = dataclasses.replace(config, data=dataclasses.replace(config.data, root=str(tmp_path / "other")))
    run(elsewhere, monkeypatch, StubBackend())
    assert continued == rows_of(elsewhere)


def test_a_torn_temporary_file_is_no_shard(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    run(config, monkeypatch, StubBackend())
    torn = Path(config.data.root) / "conversations" / ".shard-00009.parquet.1.tmp"
    torn.write_bytes(b"PAR1")
    assert run(config, monkeypatch, StubBackend()).completions == PROMPTS
    assert not torn.exists()


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"temperature": 0.5}, "sampling.temperature: 1.0 -> 0.5"),
        ({"max_tokens": 9}, "sampling.max_tokens: 5 -> 9"),
        ({"seed": 3}, "sampling.seed: 0 -> 3"),
    ],
)
def test_other_settings_are_refused_with_the_difference(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], line: str
) -> None:
    run(config, monkeypatch, StubBackend())
    with pytest.raises(CacheIntegrityError, match=line.replace(".", r"\.")):
        run(with_sampling(config, **changes), monkeypatch, StubBackend())


def test_more_repeats_add_rows_and_keep_the_old_ones(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    run(config, monkeypatch, StubBackend())
    before = rows_of(config)
    run(with_sampling(config, repeats=2), monkeypatch, StubBackend())
    after = rows_of(config)
    assert len(after) == 2 * PROMPTS
    assert {name: after[name] for name in before} == before
    seeds = {(row["prompt_id"], row["seed"]) for row in after.values()}
    assert len(seeds) == 2 * PROMPTS, "a repeat has a seed of its own"


def test_answers_of_prompts_that_are_gone_are_refused(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run(config, monkeypatch, StubBackend())
    lines = (tmp_path / "train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "train.jsonl").write_text("".join(lines[1:]))
    with pytest.raises(ConfigError, match="1 answers on disk belong to no configured prompt"):
        run(config, monkeypatch, StubBackend())


def test_answers_of_more_repeats_than_configured_are_refused_with_their_number(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(with_sampling(config, repeats=2), monkeypatch, StubBackend())
    with pytest.raises(ConfigError, match=f"{PROMPTS} answers .*repeats=1"):
        run(config, monkeypatch, StubBackend())


def test_the_names_of_a_stage_take_eight_bytes_a_row_and_no_copy_of_them() -> None:
    rows, shard = 40_000, 400

    class Store:
        """Rows of shards, made when they are read."""

        def facts(self) -> Iterator[RowFacts]:
            for first in range(0, rows, shard):
                names = [row_id(f"{number:016x}", 0, 0) for number in range(first, first + shard)]
                zeros, empty = [0] * shard, [""] * shard
                yield RowFacts(
                    row_id=names,
                    repeat=zeros,
                    turn=zeros,
                    num_prompt_tokens=zeros,
                    num_completion_tokens=zeros,
                    finish_reason=empty,
                    dropped=empty,
                )

    totals, store = stage.ConversationTotals(), Store()
    tracemalloc.start()
    stored = stage.read_stored(store, totals)  # type: ignore[arg-type]
    outside = stored.count_outside(row_id(f"{number:016x}", 0, 0) for number in range(1, rows + 7))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (totals.prompts, len(stored), outside) == (rows, rows, 1)
    assert row_id(f"{rows - 1:016x}", 0, 0) in stored
    assert row_id(f"{rows:016x}", 0, 0) not in stored
    shard_bytes = 300 * shard  # strings of the one shard that is looked at
    looked_up = 32 * NAMES_AT_ONCE  # the batch that is compared
    assert peak < 12 * rows + shard_bytes + looked_up


def test_the_holdout_is_stored_as_prompts_and_never_answered(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = StubBackend()
    run(config, monkeypatch, backend)
    lines = [json.loads(line) for line in (Path(config.data.root) / "holdout.jsonl").read_text().splitlines()]
    assert len(lines) == 2
    assert all(line["prompt_ids"] and line["messages"] for line in lines)
    asked = {tuple(request.prompt_ids) for request in backend.requests}
    assert all(tuple(line["prompt_ids"]) not in asked for line in lines)
    manifest = json.loads((Path(config.data.root) / "conversations" / "manifest.json").read_text())
    assert len(manifest["content"]["holdout_hashes"]) == 2


def test_prompts_beyond_the_limit_are_counted_with_the_reason(config: RunConfig) -> None:
    short = dataclasses.replace(config, data=dataclasses.replace(config.data, max_prompt_tokens=2))
    with pytest.raises(ConfigError, match="max_prompt_tokens=2"):
        prepare(short)


def test_a_full_disk_is_refused_before_the_engine_starts(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "BYTES_A_ROW", 1 << 60)
    monkeypatch.setattr(stage, "open_generator", lambda *_: pytest.fail("an engine was started"))
    with pytest.raises(ConfigError, match=r"data\.root"):
        stage.regenerate(config, prepare(config), no_display)


def test_a_disk_that_fills_up_ends_the_run_and_the_next_one_completes_it(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = 0

    def full_at_second(temporary: Path, final: Path) -> None:
        nonlocal written
        written += 1
        if written == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        publish(temporary, final)

    with monkeypatch.context() as patched:
        patched.setattr("data_gen.cache.conversations.publish", full_at_second)
        with pytest.raises(OSError, match="No space left"):
            run(config, monkeypatch, StubBackend())
    folder = Path(config.data.root) / "conversations"
    assert not list(folder.glob(".*.tmp"))
    second = StubBackend()
    assert run(config, monkeypatch, second).completions == PROMPTS
    assert 0 < len(second.requests) < PROMPTS


def test_a_damaged_shard_is_named_and_only_its_rows_are_answered_again(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(config, monkeypatch, StubBackend())
    damaged = Path(config.data.root) / "conversations" / "shard-00001.parquet"
    damaged.write_bytes(damaged.read_bytes()[:-50])
    with pytest.raises(CacheIntegrityError, match=r"shard-00001\.parquet: not a whole Parquet file"):
        run(config, monkeypatch, StubBackend())
    damaged.unlink()
    second = StubBackend()
    assert run(config, monkeypatch, second).completions == PROMPTS
    assert len(second.requests) == SHARD


def test_a_shard_that_was_copied_is_refused(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    run(config, monkeypatch, StubBackend())
    folder = Path(config.data.root) / "conversations"
    shutil.copy(folder / "shard-00000.parquet", folder / "shard-00077.parquet")
    with pytest.raises(CacheIntegrityError, match="4 answers are stored twice"):
        run(config, monkeypatch, StubBackend())


def test_conversations_of_an_older_format_are_not_continued(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    run(config, monkeypatch, StubBackend())
    path = Path(config.data.root) / "conversations" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": 1}))
    with pytest.raises(CacheIntegrityError, match="format_version 1, this program continues 2 only"):
        run(config, monkeypatch, StubBackend())
    assert ConversationStore(Path(config.data.root)).content()["target"] == config.target.name, "to read it is fine"


def test_sampling_fields_that_the_reference_backend_does_not_apply_are_refused(config: RunConfig) -> None:
    sampling = prepare(with_sampling(config, min_p=0.1)).sampling
    with pytest.raises(ConfigError, match=r"data\.sampling\.min_p=0\.1: data\.backend=hf does not apply it"):
        check_supported(sampling)
    check_supported(prepare(config).sampling)


def test_a_stage_that_servers_cannot_do_is_refused_before_the_first_answer(config: RunConfig) -> None:
    with pytest.raises(ConfigError, match=r"data\.capture_backend"):
        gen_data(with_data(config, backend="server"))


def sorted_nucleus(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """The rule of the docstring by a full sort, in float64."""
    shares = logits.double().softmax(dim=-1)
    values, order = shares.sort(dim=-1, descending=True)
    keep = values.cumsum(dim=-1) - values < top_p
    return torch.zeros_like(keep).scatter(-1, order, keep)


@pytest.mark.parametrize("spread", [0.5, 3.0, 12.0])
@pytest.mark.parametrize("top_p", [0.1, 0.95, 0.999])
def test_the_nucleus_equals_that_of_a_full_sort(spread: float, top_p: float) -> None:
    """Flat rows need the widest pass, peaked ones the first."""
    logits = torch.randn(8, 3000) * spread
    kept = keep_nucleus_(logits.clone(), torch.full((8,), top_p))
    expected = sorted_nucleus(logits, top_p)
    differs = (kept.isfinite() != expected).sum(dim=-1)
    assert int(differs.max()) <= 1, "rounding may move the boundary by one token"
    assert torch.equal(kept[kept.isfinite()], logits[kept.isfinite()]), "what stays is unchanged"


def test_rows_without_top_p_are_left_alone() -> None:
    logits = torch.randn(3, 500)
    kept = keep_nucleus_(logits.clone(), torch.tensor([1.0, 0.5, 1.0]))
    assert torch.equal(kept[[0, 2]], logits[[0, 2]])
    assert torch.equal(kept[1].isfinite(), sorted_nucleus(logits[1:2], 0.5)[0])
