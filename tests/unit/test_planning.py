"""The plan of a training step: exact where it can be, and its verdicts, ways out and record."""

from __future__ import annotations

import copy
import functools
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from dflash2_train.app import register_schema
from dflash2_train.config import HardwareConfig, RunConfig, load_config
from dflash2_train.planning import activations, buffers, fit, losses, state
from dflash2_train.planning.command import EXIT_DOES_NOT_FIT, PLAN_FILE, plan_training
from dflash2_train.planning.parameters import count_parameters, optimizer_groups, parameter_sizes, parameters_by_part
from dflash2_train.planning.report import failures, make_training_plan
from dflash2_train.planning.setting import MicroBatch, Setting, fullest_batch, make_setting, usual_batch
from dflash2_train.planning.speed import ESTIMATED, MEASURED, estimate, window_work
from dflash2_train.planning.timeline import LAYERS, LOSS, MOMENTS, SAVE, UPDATE
from tests.unit.test_imports import HEAVY

CONF = Path(__file__).resolve().parents[2] / "conf"
EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))


@functools.cache
def composed(*overrides: str) -> RunConfig:
    register_schema()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return load_config(compose("config", list(overrides)))


def load(*overrides: str) -> RunConfig:
    return copy.deepcopy(composed(*overrides))


def on(config: RunConfig, **hardware: object) -> RunConfig:
    values = {"name": "test", "kind": "cuda", "devices": 1, "memory_gb": 10.0, **hardware}
    return replace(config, plan=replace(config.plan, hardware=HardwareConfig(**values)))  # type: ignore[arg-type]


def named(items: list[object]) -> dict[str, int]:
    return {item.name: item.size for item in items}  # type: ignore[attr-defined]


# ---------------------------------------------------------------------------------------------------------- parameters


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_parameters_are_those_of_the_real_drafter_of_every_experiment(experiment: str) -> None:
    import torch

    from dflash2_train.model.drafter import Drafter
    from dflash2_train.optimizer import parameter_groups

    setting = make_setting(load(f"+experiment={experiment}"))
    with torch.device("meta"):
        drafter = Drafter(setting.shape)
    real = {name: parameter.numel() for name, parameter in drafter.named_parameters()}
    assert parameter_sizes(setting.shape) == real
    assert sum(parameters_by_part(setting.shape).values()) == count_parameters(setting.shape) == sum(real.values())
    groups = {g["name"]: sum(p.numel() for p in g["params"]) for g in parameter_groups(drafter, setting.train)}
    assert optimizer_groups(setting.shape, setting.train, 1) == {name: size + size % 2 for name, size in groups.items()}


def test_flat_buffers_are_filled_up_to_two_elements_a_rank(tiny_config: RunConfig) -> None:
    setting = make_setting(tiny_config)
    one, seven = (optimizer_groups(setting.shape, setting.train, ranks) for ranks in (1, 7))
    assert all(size % 14 == 0 and 0 <= size - one[name] < 14 for name, size in seven.items())


# --------------------------------------------------------------------------------------------------------------- state


def engine_bytes(dtype: str, stage: int, *, ema: bool, root: Path) -> dict[str, int]:
    """What a real engine holds after a step, in a process of its own (it leaves a process group behind)."""
    script = f"""
import json, torch
from pathlib import Path
from tests.objective_case import make_objective, batch_of
from dflash2_train.config import GuardConfig, TrainConfig
from dflash2_train.engine import TrainEngine
from dflash2_train.ranks import start_ranks, stop_ranks
from dflash2_train.target import FrozenHead
start_ranks(GuardConfig())
config, objective, samples = make_objective(Path({str(root)!r}))
options = dict(dtype={dtype!r}, zero_stage={stage}, ema_decay={0.9 if ema else None})
train = TrainConfig(output_dir="x", steps=2, row_tokens=64, rows=1, **options)
engine = TrainEngine(objective, train)
objective.frozen.to("cpu", getattr(torch, {dtype!r}))
batch, blocks = batch_of([samples[:2]])
batch = batch.to(torch.device("cpu"), getattr(torch, {dtype!r}))
engine.backward(engine.forward(batch, blocks, denominator=torch.tensor(9.0), scale=1.0, selector_ramp=1.0).loss)
engine.step()
def held(tensors):
    storages = [t.untyped_storage() for t in tensors]
    return sum({{storage.data_ptr(): storage.nbytes() for storage in storages}}.values())
masters = engine._masters()
inner = engine._engine.optimizer
print(json.dumps({{
    "weights": held(p.data for p in objective.parameters()),
    "fp32 sums of gradients": held(getattr(inner, "fp32_groups_gradients_flat", [])),
    "fp32 masters": held(masters),
    "AdamW's two moments": held(engine._optimizer.state[m][k] for m in masters for k in ("exp_avg", "exp_avg_sq")),
    "moving average": held(engine._average.shards) if engine._average else 0,
}}))
stop_ranks()
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_state_is_what_deepspeed_and_the_engine_hold_byte_for_byte(tiny_config: RunConfig, tmp_path: Path) -> None:
    found = engine_bytes("bfloat16", 1, ema=True, root=tmp_path)
    config = on(tiny_config, kind="cpu")
    config.train.ema_decay = 0.9
    planned = named(state.state_items(make_setting(config)))
    assert {name: planned[name] for name in found} == found


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "stage"), [("float32", 0), ("float32", 1), ("bfloat16", 2), ("float32", 2)])
def test_state_of_the_other_stages_is_what_deepspeed_holds(
    tiny_config: RunConfig, tmp_path: Path, dtype: str, stage: int
) -> None:
    found = engine_bytes(dtype, stage, ema=False, root=tmp_path)
    config = on(tiny_config, kind="cpu")
    config.train.dtype, config.train.zero_stage = dtype, stage
    planned = named(state.state_items(make_setting(config)))
    for name in ("weights", "AdamW's two moments"):
        assert planned[name] == found[name]
    if stage > 0:
        assert planned["fp32 masters"] == found["fp32 masters"]


def test_ranks_share_masters_and_moments_and_at_stage_two_gradients(tiny_config: RunConfig) -> None:
    shares = {}
    for ranks in (1, 4):
        setting = make_setting(on(tiny_config, devices=ranks))
        shares[ranks] = (named(state.state_items(setting)), state.flat_elements(setting))
    one, four = shares[1][0], shares[4][0]
    assert one["fp32 masters"] == 4 * shares[1][1]
    assert four["fp32 masters"] == shares[4][1]
    assert four["AdamW's two moments"] == 2 * four["fp32 masters"]
    assert four["fp32 sums of gradients"] == 4 * shares[4][1]
    by_stage = state.state_by_stage(make_setting(on(load("+experiment=glm53_flash"), devices=8)))
    assert by_stage[3] < by_stage[2] < by_stage[1]
    assert 0 not in by_stage  # there is none in bf16


def test_a_lone_group_is_reduced_without_being_laid_side_by_side() -> None:
    half = state.BUCKET // 2
    assert state.reduce_buffer_bytes([state.BUCKET + 2]) == 0
    assert state.reduce_buffer_bytes([half, 10]) == 4 * (half + 10)
    assert state.reduce_buffer_bytes([half, half + 2, 10]) == 4 * (2 * half + 2)


# --------------------------------------------------------------------------------------------- activations and losses


def kept_for_backward(setting: Setting, root: Path) -> int:
    """Bytes of distinct storages that autograd keeps of a real forward pass through the layers."""
    import torch

    from dflash2_train.masks import context_masks
    from dflash2_train.model.drafter import Drafter

    drafter, batch = Drafter(setting.shape), setting.batch
    drafter.attention = setting.train.attention
    documents = torch.zeros(batch.rows, batch.tokens, dtype=torch.int64)
    positions = torch.arange(batch.tokens).expand(batch.rows, -1)
    anchors = torch.arange(1, batch.anchors + 1).expand(batch.rows, -1)
    visible = context_masks(
        setting.shape.layer_types,
        setting.shape.sliding_window,
        anchor_positions_local=anchors,
        block_document_ids=torch.zeros_like(anchors),
        block_valid=torch.ones_like(anchors, dtype=torch.bool),
        position_ids=positions,
        document_ids=documents,
        block_size=batch.block_size,
    )
    embedded = torch.randn(batch.rows, batch.anchors, batch.block_size, setting.shape.hidden_size)
    context = torch.randn(batch.rows, batch.tokens, setting.shape.hidden_size)
    weights = {parameter.untyped_storage().data_ptr() for parameter in drafter.parameters()}
    held: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    kept = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block_positions = anchors.unsqueeze(-1) + torch.arange(batch.block_size)
        kept.append(drafter(embedded.requires_grad_(), context.requires_grad_(), block_positions, positions, visible))
    assert kept[0].shape == embedded.shape
    del root
    return sum(held.values())


@pytest.mark.parametrize("attention", ["chunked", "chunked, weights made again", "dense"])
def test_what_the_layers_keep_is_what_autograd_keeps(
    tiny_config: RunConfig, tmp_path: Path, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dflash2_train.model import attend_chunked

    attention, _, again = attention.partition(", ")
    if again:
        for module in (attend_chunked, activations):
            monkeypatch.setattr(module, "KEPT_WEIGHT_BYTES", 0)
    config = on(tiny_config, kind="cpu")
    config.train.dtype, config.train.attention = "float32", attention
    batch = MicroBatch(rows=2, tokens=64, anchors=16, block_size=4, document_tokens=64.0)
    setting = make_setting(config, batch)
    shape = setting.shape
    context = shape.num_layers * batch.context * activations.layer_context_bytes(setting)
    tables = 4 * shape.head_dim * (batch.slots + batch.context)  # cosines and sines
    norm = 4 * batch.slots * (shape.hidden_size + 1)  # the final norm's input and scale
    taken = 4 * batch.context * shape.hidden_size  # the context, read by the first projections
    planned = activations.kept_of_layers(setting) + context + tables + norm + taken
    kept = kept_for_backward(setting, tmp_path)
    if attention == "chunked" and not again:  # planned as if the blocks saw their whole document
        weights = shape.num_layers * activations.attention_bytes(setting)
        assert weights > 0 and planned - weights < kept <= planned
    else:
        assert planned == pytest.approx(kept, rel=0.01)


def test_checkpointing_keeps_inputs_and_runs_one_layer_again() -> None:
    plain = make_setting(load("+experiment=glm53_flash"))
    again = replace(plain, train=replace(plain.train, gradient_checkpointing=True))
    inputs = again.itemsize * again.batch.slots * again.shape.hidden_size
    assert activations.kept_of_layers(again) == again.shape.num_layers * inputs
    assert activations.recomputed(again) + inputs == activations.kept_of_layer(plain)
    assert fit.device_timeline(again).total(LAYERS) < fit.device_timeline(plain).total(LAYERS)


def test_the_chunk_of_logits_is_the_one_that_the_sweep_takes(tiny_config: RunConfig) -> None:
    import torch

    from dflash2_train.budgets import TILE_BYTES, TILE_ROWS
    from dflash2_train.losses import Workspace, unary_loss

    config = on(tiny_config, kind="cpu")
    batch = MicroBatch(rows=1, tokens=64, anchors=64, block_size=4, document_tokens=64.0)
    for dtype in ("float32", "bfloat16"):
        config.train.dtype = dtype
        config.target.vocab_size, config.loss.logit_share = 40_000, 0.2
        setting = make_setting(config, batch)
        count, real = batch.labels, getattr(torch, dtype)
        workspace = Workspace()
        unary_loss(
            torch.randn(count, 32).to(real).requires_grad_(),
            torch.randn(40_000, 32).to(real),
            torch.zeros(count, dtype=torch.int64),
            torch.arange(8).expand(count, -1),
            torch.full((count, 8), -3.0),
            ce_weight=1.0,
            kl_weight=1.0,
            kl_kind="tail_bucket",
            top_k=6,
            chunk_bytes=config.loss.chunk_mib * 2**20,
            logit_share=config.loss.logit_share,
            workspace=workspace,
        )
        rows, size = losses.chunk_of_logits(setting)
        # In fp32 the library makes each tile a tensor of its own.
        tile = 0 if dtype == "bfloat16" else rows * 4 * (TILE_BYTES // (TILE_ROWS * 4))
        assert size == workspace.num_bytes() + tile


def test_a_micro_batch_takes_what_its_tensors_take(tiny_config: RunConfig, tmp_path: Path) -> None:
    import torch

    from dflash2_train.blocks import build_blocks
    from tests.objective_case import make_objective, pack

    _, objective, samples = make_objective(tmp_path)
    packed = pack([[samples[0]], [samples[2]]])
    blocks = build_blocks(packed, block_size=4, mask_token_id=95)
    rows, tokens = packed.input_ids.shape
    config = on(tiny_config)
    config.data.teacher_top_k = packed.teacher_ids.shape[-1]
    size = MicroBatch(
        rows=rows, tokens=tokens, anchors=blocks.anchor_positions.shape[1], block_size=4, document_tokens=17.0
    )
    setting = make_setting(config, size)
    held = [value for value in vars(packed).values() if isinstance(value, torch.Tensor)]
    real = sum(value.numel() * value.element_size() for value in held) - packed.tap_hidden.numel() * 2  # stored bf16
    assert buffers.micro_batch_bytes(setting) == pytest.approx(real, rel=0.02)
    cut = [value for value in vars(blocks).values() if isinstance(value, torch.Tensor)]
    assert buffers.block_batch_bytes(setting) == pytest.approx(
        sum(value.numel() * value.element_size() for value in cut), rel=0.06
    )
    assert objective.drafter.shape == setting.shape


# ------------------------------------------------------------------------------------------------------ the whole plan


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_fits_the_machine_of_its_plan(experiment: str) -> None:
    plan = make_training_plan(load(f"+experiment={experiment}"))
    assert plan.fits
    assert list(failures(plan)) == []
    record = json.loads(json.dumps(plan.to_dict()))
    assert record["device"]["peak"] == max(record["device"]["moments"].values())
    assert record["device"]["peak"] == sum(
        item["size"] for item in record["device"]["items"] if record["device"]["peak_moment"] in item["moments"]
    )
    assert record["device_fullest"]["peak"] >= record["device"]["peak"]


def test_moments_hold_what_is_alive_then_and_the_peak_is_the_largest(tiny_config: RunConfig) -> None:
    timeline = fit.device_timeline(make_setting(on(tiny_config)))
    names = {moment: {item.name for item in timeline.at(moment)} for moment in MOMENTS}
    assert "layers" in names[LAYERS] and "layers" not in names[UPDATE]
    assert "gradients to reduce" in names[UPDATE] and "gradients to reduce" not in names[LAYERS]
    assert "supervised slots" in names[LOSS] and "supervised slots" not in names[LAYERS]
    assert timeline.peak == max(timeline.total(moment) for moment in MOMENTS)
    on_cpu = fit.device_timeline(make_setting(on(tiny_config, kind="cpu")))
    assert "state gathered for saving" in {item.name for item in on_cpu.at(SAVE)}


def test_memory_grows_with_rows_and_anchors_and_falls_with_ranks() -> None:
    config = load("+experiment=glm53_flash")
    base = fit.needed(config, {})
    assert fit.needed(config, {"train.rows": 2}) > base
    assert fit.needed(config, {"train.anchors_per_document": 64}) < base
    lone, many = (fit.device_timeline(make_setting(on(config, devices=ranks))) for ranks in (2, 16))
    assert many.total(UPDATE) < lone.total(UPDATE)


def test_the_heap_of_a_cpu_keeps_small_activations_behind_the_step_and_no_large_ones(tiny_config: RunConfig) -> None:
    config = on(tiny_config, kind="cpu")
    few = MicroBatch(rows=1, tokens=64, anchors=512, block_size=4, document_tokens=64.0)
    many = replace(few, anchors=1 << 20)
    kept = [named(fit.device_timeline(make_setting(config, batch)).at(SAVE)) for batch in (few, many)]
    assert kept[0]["heap left by activations"] > activations.kept_of_layers(make_setting(config, few))
    assert "heap left by activations" not in kept[1]


def small(config: RunConfig, memory_gb: float) -> RunConfig:
    return on(config, memory_gb=memory_gb, devices=8, bf16_tflops=100.0)


def test_what_does_not_fit_is_named_with_the_mildest_change_that_does() -> None:
    config = load("+experiment=glm53_flash")
    whole = fit.needed(on(config, devices=8), {}) / 1e9
    plan = make_training_plan(small(config, whole * 0.85))
    assert not plan.fits
    (way,) = plan.ways_out
    assert way.overrides == {"train.gradient_checkpointing": True}
    (line,) = failures(plan)
    assert "a GPU needs" in line and "train.gradient_checkpointing=true" in line
    assert fit.needed(plan.config, way.overrides) <= whole * 0.85 * 0.9 * 1e9


def test_where_nothing_helps_more_devices_are_asked_for() -> None:
    plan = make_training_plan(small(load("+experiment=glm53_flash"), 4.0))
    assert plan.ways_out == ()
    (line,) = failures(plan)
    assert "more devices" in line


def test_suggestions_fit_and_one_more_row_would_not() -> None:
    config = load("+experiment=glm53_flash")
    limit = fit.room(config)
    assert limit is not None
    ways = fit.suggestions(config)
    assert all(way.needed <= limit for way in ways)
    rows = [int(str(way.overrides["train.rows"])) for way in ways if "train.rows" in way.overrides]
    assert rows[0] < rows[1]
    if rows[0] < fit.MAX_ROWS:
        assert fit.needed(config, {"train.rows": rows[0] + 1}) > limit


def test_ranks_of_a_cpu_share_its_memory(tiny_config: RunConfig) -> None:
    assert fit.room(on(tiny_config, kind="cpu", devices=2)) == pytest.approx(10e9 * 0.9 / 2)
    assert fit.room(on(tiny_config, devices=2)) == pytest.approx(10e9 * 0.9)
    assert fit.room(on(tiny_config, memory_gb=None)) is None


def test_a_host_too_small_for_the_windows_is_named() -> None:
    config = load("+experiment=glm53_flash")
    plan = make_training_plan(on(config, devices=8, memory_gb=288.0, host_memory_gb=4.0))
    (line,) = failures(plan)
    assert line.startswith("host needs") and "train.prefetch_windows" in line


def test_the_usual_row_has_fewer_blocks_than_the_fullest_one_and_neither_more_than_tokens() -> None:
    for experiment in EXPERIMENTS:
        config = load(f"+experiment={experiment}")
        usual, fullest = usual_batch(config), fullest_batch(config)
        assert usual.anchors <= fullest.anchors == fullest.tokens
        documents = math.ceil(config.train.row_tokens / usual.document_tokens)
        assert usual.anchors <= documents * config.train.anchors_per_document + 16


# --------------------------------------------------------------------------------------------------------------- speed


def test_time_is_operations_over_a_share_of_the_peak_or_what_was_measured(tiny_config: RunConfig) -> None:
    config = on(tiny_config, bf16_tflops=2.0, devices=4)
    config.plan.train_flops_share = 0.5
    speed = estimate(make_setting(config), config.plan)
    assert speed.basis == ESTIMATED
    assert speed.seconds == pytest.approx(speed.hardware_flops / 1e12)
    assert speed.tokens_per_second == pytest.approx(4 * window_work(make_setting(config)).tokens / speed.seconds)
    config.plan.train_seconds_per_step = 3.0
    assert estimate(make_setting(config), config.plan).basis == MEASURED
    assert estimate(make_setting(on(tiny_config)), on(tiny_config).plan).seconds is None


# ------------------------------------------------------------------------------------------------------------- command


def test_the_command_writes_the_plan_and_says_no_by_its_exit_code(
    tiny_config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = replace(on(tiny_config), run_dir=str(tmp_path / "run"))
    assert plan_training(config) == 0
    assert json.loads((tmp_path / "run" / PLAN_FILE).read_text())["fits"] is True
    assert "trained parameters" in capsys.readouterr().out
    config = replace(on(tiny_config, memory_gb=0.1), run_dir=str(tmp_path / "run"))
    assert plan_training(config) == EXIT_DOES_NOT_FIT
    assert json.loads((tmp_path / "run" / PLAN_FILE).read_text())["fits"] is False


@pytest.mark.parametrize("word", ["plan=true", "train.plan=true"])
def test_a_plan_answers_without_a_heavy_library_and_trains_nothing(tmp_path: Path, word: str) -> None:
    code = (
        "import sys, runpy\n"
        f"sys.argv = ['x', '+experiment=glm53_flash', {word!r}, 'run_dir={tmp_path}/run']\n"
        "try:\n"
        "    runpy.run_module('dflash2_train.train', run_name='__main__')\n"
        "except SystemExit as end:\n"
        "    assert end.code == 0, end.code\n"
        f"loaded = set({HEAVY!r}) & set(sys.modules)\n"
        "assert not loaded, f'{loaded} were imported'\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (tmp_path / "run").iterdir()] == [PLAN_FILE]


def test_the_guide_shows_the_plans_as_they_are_printed_now() -> None:
    from tests.plan_guide import GUIDE, with_plans

    text = GUIDE.read_text(encoding="utf-8")
    assert with_plans(text) == text, "run: python -m tests.plan_guide"
