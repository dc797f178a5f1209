"""The plan stage as a command: count or assume, probe if asked, print the tables and keep ``plan.json``."""

from __future__ import annotations

import logging

from rich.table import Table

from data_gen.cache.conversations import ConversationStore
from data_gen.capture import token_bytes
from data_gen.plan import ASSUMED, COUNTED, Amounts, Fit, Plan, StagePlan, cost, make_plan, short
from data_gen.prepare import PreparedPrompts, prepare
from data_gen.probe import probe
from data_gen.regenerate import ConversationTotals, read_stored
from dflash2_train.app import open_console
from dflash2_train.config import ConfigError, RunConfig, absolute
from dflash2_train.provenance import atomic_write_json

logger = logging.getLogger(__name__)
PLAN_FILE = "plan.json"


def answers_on_disk(config: RunConfig) -> ConversationTotals | None:
    """Totals of the conversations that earlier runs wrote, if there are any."""
    store = ConversationStore(absolute(config.data.root))
    if not store.shards():
        return None
    totals = ConversationTotals()
    read_stored(store, totals)
    return totals if totals.completions else None


def find_amounts(config: RunConfig, prepared: PreparedPrompts | None) -> Amounts:
    """Prompts and lengths: counted where sources were read and answers are there, else as the config assumes."""
    plan = config.plan
    if prepared is None and plan.prompts is None:
        raise ConfigError("plan.prompts=null: without a number the sources must be read. Set it, or read them.")
    if prepared is None:
        prompts, prompt_tokens, origin = int(plan.prompts or 0), plan.prompt_tokens, ASSUMED
    else:
        prompts, origin = prepared.counts.turns, COUNTED  # every turn is a prompt of its own
        prompt_tokens = prepared.counts.prompt_tokens / prompts
    there = answers_on_disk(config)
    if there is not None:
        answer_tokens, answer_origin = there.completion_tokens / there.completions, f"{COUNTED} on disk"
    elif plan.answer_tokens is not None and plan.answer_tokens < config.data.sampling.max_tokens:
        answer_tokens, answer_origin = plan.answer_tokens, ASSUMED
    else:
        answer_tokens, answer_origin = float(config.data.sampling.max_tokens), "the most there can be"
    return Amounts(
        prompts=prompts,
        prompts_origin=origin,
        prompt_tokens=prompt_tokens,
        prompt_tokens_origin=origin,
        answer_tokens=answer_tokens,
        answer_tokens_origin=answer_origin,
    )


def plan_stage(config: RunConfig) -> Plan:
    """Make, print and keep the plan of ``config``; sources are read unless ``plan.prompts`` gives their number."""
    counting = config.plan.prompts is None
    prepared = prepare(config) if counting or config.plan.probe_seconds > 0 else None
    amounts = find_amounts(config, prepared if counting else None)
    probed = None
    if prepared is not None and config.plan.probe_seconds > 0:
        result = probe(config, prepared)
        probed = (result.answer_tokens_per_s, result.captured_tokens_per_s)
    plan = make_plan(config, amounts, token_bytes=token_bytes(config), probed=probed)
    if prepared is not None:
        for line in prepared.plan.report.lines():
            logger.info("%s", line)
        for reason, number in sorted(prepared.rejected.items()):
            logger.info("%d prompts rejected: %s", number, reason)
    show(config, plan)
    folder = absolute(config.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write_json(folder / PLAN_FILE, plan.to_dict())
    return plan


def show(config: RunConfig, plan: Plan) -> None:
    """Amounts, stages, sizes, what fits, and the assumptions, as tables on stderr."""
    console = open_console(stderr=True)
    console.print(_amounts_table(config, plan))
    console.print(_stages_table(config, plan))
    console.print(_fits_table(plan.fits))
    for line in plan.assumptions:
        console.print(f"assumed: {line}", highlight=False)
    for fit in plan.fits:
        if fit.verdict == "does not fit":
            logger.warning("%s: %s needed, %s there; %s", fit.what, *_pair(fit), fit.advice)


def _amounts_table(config: RunConfig, plan: Plan) -> Table:
    amounts = plan.amounts
    answers = amounts.prompts * config.data.sampling.repeats
    table = Table("what", "amount", "from", title=f"Plan of {config.name}", title_justify="left")
    table.columns[1].justify = "right"
    table.add_row("training prompts, one a turn", f"{amounts.prompts:,}", amounts.prompts_origin)
    table.add_row("tokens a prompt, mean", f"{amounts.prompt_tokens:,.0f}", amounts.prompt_tokens_origin)
    table.add_row("answers", f"{answers:,}", f"{config.data.sampling.repeats} a prompt")
    table.add_row("tokens an answer, mean", f"{amounts.answer_tokens:,.0f}", amounts.answer_tokens_origin)
    for name, size in plan.sizes:
        table.add_row(name, short(size, "B"), "taps, teacher, ids")
    return table


def _stages_table(config: RunConfig, plan: Plan) -> Table:
    hardware = config.plan.hardware
    table = Table("stage", "work", "rate", "from", "hours", "device hours", title=hardware.name, title_justify="left")
    for column in (1, 2, 4, 5):
        table.columns[column].justify = "right"
    if hardware.price_per_hour is not None:
        table.add_column("cost", justify="right")
    costs = cost(plan.stages, hardware.devices, hardware.price_per_hour)
    for stage, price in zip(plan.stages, costs, strict=True):
        cells = _stage_cells(stage, hardware.devices)
        if hardware.price_per_hour is not None:
            cells.append("unknown" if price is None else f"{price:,.2f}")
        table.add_row(*cells)
    return table


def _stage_cells(stage: StagePlan, devices: int) -> list[str]:
    work = f"{short(stage.units)} {stage.unit}"
    if stage.rate is None or stage.hours is None:
        return [stage.stage, work, "unknown", "no peaks, no measurement", "unknown", "unknown"]
    rate = f"{short(stage.rate.value)} {stage.unit}/s"
    return [stage.stage, work, rate, stage.rate.origin, f"{stage.hours:,.2f}", f"{stage.hours * devices:,.1f}"]


def _fits_table(fits: list[Fit]) -> Table:
    table = Table("what must fit", "needed", "there", "verdict", title="Room", title_justify="left")
    for fit in fits:
        table.add_row(fit.what, *_pair(fit), fit.verdict)
    return table


def _pair(fit: Fit) -> tuple[str, str]:
    if fit.unit != "B":
        there = "unknown" if fit.available is None else f"{fit.available:,.0f} {fit.unit}"
        return f"{fit.needed:,.0f} {fit.unit}", there
    return short(fit.needed, "B"), "unknown" if fit.available is None else short(fit.available, "B")
