"""The plan of a training step as one value, as a JSON record and as tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from dflash2_train.config import RunConfig
from dflash2_train.planning.fit import (
    FITS,
    SHORT,
    Suggestion,
    Verdict,
    device_timeline,
    device_verdict,
    first_that_fits,
    host_timeline,
    host_verdict,
    room,
    suggestions,
)
from dflash2_train.planning.parameters import count_parameters, parameters_by_part
from dflash2_train.planning.setting import Setting, document_lengths, fullest_batch, make_setting
from dflash2_train.planning.speed import Speed, estimate
from dflash2_train.planning.state import state_by_stage
from dflash2_train.planning.timeline import MOMENTS, Timeline

GB = 1e9
TERA = 1e12


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """All of it."""

    config: RunConfig
    setting: Setting
    usual: Timeline
    fullest: Timeline
    host: Timeline | None
    verdicts: tuple[Verdict, ...]
    ways_out: tuple[Suggestion, ...]  # one that fits, where the config does not; else what it could grow to
    speed: Speed

    @property
    def fits(self) -> bool:
        """Nothing is known not to fit."""
        return all(verdict.word != SHORT for verdict in self.verdicts)

    def to_dict(self) -> dict[str, Any]:
        """A JSON value; sizes in bytes."""
        setting = self.setting
        return {
            "experiment": self.config.name,
            "hardware": asdict(self.config.plan.hardware),
            "ranks": setting.ranks,
            "zero_stage": setting.train.zero_stage,
            "parameters": parameters_by_part(setting.shape),
            "batch": asdict(setting.batch),
            "fullest_batch": asdict(fullest_batch(self.config)),
            "device": _timeline_dict(self.usual),
            "device_fullest": _timeline_dict(self.fullest),
            "host": None if self.host is None else _timeline_dict(self.host),
            "state_by_stage": state_by_stage(setting),
            "verdicts": [{**asdict(verdict), "verdict": verdict.word} for verdict in self.verdicts],
            "fits": self.fits,
            "suggestions": [asdict(way) for way in self.ways_out],
            "speed": {**asdict(self.speed), "tokens_per_second": self.speed.tokens_per_second},
            "assumptions": list(assumptions(self)),
        }


def make_training_plan(config: RunConfig) -> TrainingPlan:
    """Plan the step of an experiment on the hardware of ``config.plan``."""
    setting = make_setting(config)
    device, host = device_verdict(config), host_verdict(config)
    ways: list[Suggestion] = []
    if device.word == SHORT:
        found = first_that_fits(config)
        ways = [] if found is None else [found]
    elif room(config) is not None:
        ways = suggestions(config)
    return TrainingPlan(
        config=config,
        setting=setting,
        usual=device_timeline(setting),
        fullest=device_timeline(setting.with_batch(fullest_batch(config))),
        host=None if host is None else host_timeline(config, setting),
        verdicts=tuple(verdict for verdict in (device, host) if verdict is not None),
        ways_out=tuple(ways),
        speed=estimate(setting, config.plan),
    )


def _timeline_dict(timeline: Timeline) -> dict[str, Any]:
    return {
        "peak": timeline.peak,
        "peak_moment": timeline.peak_moment,
        "moments": {moment: timeline.total(moment) for moment in MOMENTS},
        "items": [asdict(item) for item in timeline.items if item.size > 0],
    }


def tables(plan: TrainingPlan) -> Iterator[tuple[str, Table]]:
    """What is shown, in order, each with its title."""
    yield _parameters_table(plan)
    yield _memory_table(plan)
    yield _moments_table(plan)
    yield _stages_table(plan)
    yield _room_table(plan)
    if plan.ways_out:
        yield _ways_table(plan)


def gigabytes(size: float) -> str:
    """1e9 bytes with two digits behind the point, three below a tenth."""
    return f"{size / GB:,.2f}" if size >= GB / 10 else f"{size / GB:.3f}"


def _parameters_table(plan: TrainingPlan) -> tuple[str, Table]:
    setting = plan.setting
    train, hardware = setting.train, plan.config.plan.hardware
    head = f"{plan.config.name} on {hardware.name}: {setting.ranks} ranks, ZeRO-{train.zero_stage}, {train.dtype}"
    table = _table("trained parameters", "millions")
    for part, count in parameters_by_part(setting.shape).items():
        table.add_row(part, f"{count / 1e6:,.1f}")
    table.add_row("all", f"{count_parameters(setting.shape) / 1e6:,.1f}", style="bold")
    return head, table


def _memory_table(plan: TrainingPlan) -> tuple[str, Table]:
    """Items at the peak of usual rows, and the same items in the fullest row."""
    moment = plan.usual.peak_moment
    place = "GPU" if plan.setting.device == "cuda" else "process"
    table = _table("part", "what", "GB", "fullest row", "from")
    fullest = {(item.group, item.name.split(",")[0]): item for item in plan.fullest.at(moment)}
    group = ""
    for item in plan.usual.at(moment):
        most = fullest.get((item.group, item.name.split(",")[0]))
        cells = ("" if item.group == group else item.group, item.name, gigabytes(item.size))
        table.add_row(*cells, "" if most is None else gigabytes(most.size), item.basis)
        group = item.group
    table.add_row("all", "", gigabytes(plan.usual.peak), gigabytes(plan.fullest.total(moment)), "", style="bold")
    return f"One {place} at its peak, {moment}", table


def _moments_table(plan: TrainingPlan) -> tuple[str, Table]:
    table = _table("when", "GB", "fullest row")
    for moment in MOMENTS:
        table.add_row(moment, gigabytes(plan.usual.total(moment)), gigabytes(plan.fullest.total(moment)))
    return "Moments", table


def _stages_table(plan: TrainingPlan) -> tuple[str, Table]:
    table = _table("ZeRO stage", "GB", "")
    for stage, size in state_by_stage(plan.setting).items():
        chosen = "as configured" if stage == plan.setting.train.zero_stage else ""
        table.add_row(str(stage), gigabytes(size), "not offered" if stage == 3 else chosen)
    return "Weights, gradients and optimizer state of a rank in the optimizer step", table


def _room_table(plan: TrainingPlan) -> tuple[str, Table]:
    table = _table("place", "needed GB", "fullest row", f"{plan.config.plan.memory_share:.0%} of it", "verdict")
    for verdict in plan.verdicts:
        there = "unknown" if verdict.available is None else gigabytes(verdict.available)
        style = "" if verdict.word == FITS else "yellow"
        table.add_row(
            verdict.place,
            gigabytes(verdict.needed),
            gigabytes(verdict.needed_fullest),
            there,
            verdict.word,
            style="red" if verdict.word == SHORT else style,
        )
    return "Room", table


def _ways_table(plan: TrainingPlan) -> tuple[str, Table]:
    title = "What it could take instead" if plan.fits else "What would fit"
    table = _table("settings", "GB", "")
    for way in plan.ways_out:
        table.add_row(way.words, gigabytes(way.needed), way.reason)
    return title, table


def _table(*columns: str) -> Table:
    table = Table()
    numbers = ("GB", "needed GB", "fullest row", "millions")
    for column in columns:
        table.add_column(column, justify="right" if column in numbers or column.endswith("of it") else "left")
    return table


def assumptions(plan: TrainingPlan) -> Iterator[str]:
    """What the figures rest on, in words."""
    config, setting, speed = plan.config, plan.setting, plan.speed
    prompt, answer = document_lengths(config)
    batch = setting.batch
    yield (
        f"usual rows: {batch.rows} x {batch.tokens} tokens with {batch.anchors} blocks of {batch.block_size}, from "
        f"documents of {prompt:,.0f} + {answer:,.0f} tokens (plan.prompt_tokens, plan.answer_tokens); the fullest row "
        "has a block at every token"
    )
    yield "the target's head counts as a table of its own" if not setting.tied else "head and embedding are one table"
    twice = speed.hardware_flops - speed.model_flops
    again = f", and {twice / TERA:,.1f} of layers that run twice" if twice > 0 else ""
    yield f"a step: {speed.model_flops / TERA:,.1f} TFLOP a rank{again}"
    if speed.seconds is not None and speed.tokens_per_second is not None:
        rate = f"{speed.seconds:.2f} s a step, {speed.tokens_per_second:,.0f} tokens/s over all ranks"
        yield f"{rate}; from {_basis(config)}"


def _basis(config: RunConfig) -> str:
    plan = config.plan
    if plan.train_seconds_per_step is not None:
        return "plan.train_seconds_per_step"
    return f"{plan.train_flops_share:.0%} of {plan.hardware.bf16_tflops or 0:g} TFLOP/s (plan.train_flops_share)"


def failures(plan: TrainingPlan) -> Iterator[str]:
    """What does not fit, each with the next step."""
    for verdict in plan.verdicts:
        if verdict.word != SHORT or verdict.available is None:
            continue
        lacking = f"{verdict.place} needs {gigabytes(verdict.needed)} GB of {gigabytes(verdict.available)}"
        if verdict.place == "host":
            yield f"{lacking}: lower train.prefetch_windows or train.rows, or spread the ranks over more machines."
        elif plan.ways_out:
            yield f"{lacking}: set {plan.ways_out[0].words}."
        else:
            yield f"{lacking}, and nothing tried makes it fit: use more devices (plan.hardware.devices) or larger ones."
