"""A whole server run: look at the server, measure every task at every concurrency, write what was found.

Into ``eval.output_dir/server/LABEL``: ``report.json``, one ``requests-….jsonl`` a measurement with a line a request,
and ``cells/`` with finished measurements, which a rerun takes over as long as the same server process runs. Into
``eval.output_dir/server``: the report of all labels side by side.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from dflash2_train.config import EvalConfig, RunConfig, absolute, to_plain
from dflash2_train.evaluate.runs import SERVER, Cell, EvalRun
from dflash2_train.evaluate.server.cell import Session, measure_cell
from dflash2_train.evaluate.server.connection import open_client
from dflash2_train.evaluate.server.messages import Asking, EngineApi
from dflash2_train.evaluate.server.protocol import check_speculation, describe, run_labels
from dflash2_train.evaluate.server.sglang_api import SglangApi
from dflash2_train.evaluate.server.store import REPORT_NAME, Store, check_folder
from dflash2_train.evaluate.server.vllm_api import VllmApi
from dflash2_train.evaluate.server.workload import Render, Workload
from dflash2_train.evaluate.tasks import Task, load_tasks
from dflash2_train.evaluate.trained_on import check_tasks
from dflash2_train.progress import ProgressReporter
from dflash2_train.provenance import atomic_write_json, run_record

logger = logging.getLogger(__name__)
APIS: dict[str, type[EngineApi]] = {"vllm": VllmApi, "sglang": SglangApi}


def measure_server(config: RunConfig) -> EvalRun:
    """Measure the server of ``eval.server`` and write its run folder.

    Raises:
        ConfigError: prompts, key or template cannot be had.
        ServerError: a server that cannot be measured.
        CounterError: counters that are missing, or of a server that was restarted.
    """
    folder = run_folder(config)
    tasks = load_tasks(config)
    overlap = check_tasks(config, tasks)
    render = _renderer(config, tasks)
    if config.eval.server.template == "client":
        tasks = [rendered(task, render) for task in tasks]
    run = asyncio.run(_measure(config, tasks, render, folder, overlap))
    atomic_write_json(folder / REPORT_NAME, run.to_json())
    return run


def run_folder(config: RunConfig) -> Path:
    """Where this label's files go."""
    return absolute(config.eval.output_dir) / "server" / config.eval.server.resolved_label


def _renderer(config: RunConfig, tasks: Sequence[Task]) -> Render:
    """Messages -> ids with the target's tokenizer; it is opened only if some prompt needs it."""
    if config.eval.server.template == "server":
        return lambda _: None
    if all(one.prompt_ids is not None and not one.further_turns for task in tasks for one in task.conversations):
        return lambda _: None
    from dflash2_train.evaluate.server.chat_ids import open_renderer

    return open_renderer(config.target, config.data.enable_thinking)


def rendered(task: Task, render: Render) -> Task:
    """The task with every opening as token ids, so that no template runs while requests are timed."""
    conversations = [
        one if one.prompt_ids is not None else replace(one, prompt_ids=render(one.opening))
        for one in task.conversations
    ]
    return replace(task, conversations=conversations)


async def _measure(
    config: RunConfig, tasks: Sequence[Task], render: Render, folder: Path, overlap: Sequence[str]
) -> EvalRun:
    server = config.eval.server
    api = APIS[server.engine]()
    async with open_client(server) as client:
        facts = await api.facts(client, server.model)
        check_speculation(config, facts)
        counters = await api.counters(client, facts.model)
        protocol = describe(config, facts)
        check_folder(folder, protocol)
        workload = Workload(
            client=client,
            api=api,
            asking=Asking(
                model=facts.model,
                temperature=config.eval.temperature,
                top_p=config.eval.top_p,
                top_k=config.eval.top_k,
                min_p=config.eval.min_p,
                enable_thinking=config.data.enable_thinking,
            ),
            config=server,
            render=render,
            context=facts.context,
        )
        session = Session(config=config.eval, client=client, api=api, facts=facts, workload=workload)
        started = None if counters is None else counters.started
        cells = await _measure_all(session, tasks, Store(folder, protocol, server.url, started))
    return EvalRun(
        kind=SERVER,
        label=server.resolved_label,
        protocol=protocol,
        cells=cells,
        labels=[*run_labels(config, facts), *overlap],
        run={"evaluation": run_record(to_plain(config)), "server": asdict(facts)},
    )


async def _measure_all(session: Session, tasks: Sequence[Task], store: Store) -> list[Cell]:
    """Every task at every concurrency, one after another."""
    plan = [(task, concurrency) for concurrency in session.config.server.concurrency for task in tasks]
    kept = {place: cell for place, (task, level) in enumerate(plan) if (cell := store.load(task, level)) is not None}
    if kept:
        logger.info("%d of %d measurements are finished already, by the same server process", len(kept), len(plan))
    total = sum(task.num_requests for place, (task, _) in enumerate(plan) if place not in kept)
    cells = []
    with ProgressReporter("requests", total) as progress:
        for place, (task, concurrency) in enumerate(plan):
            cell = kept.get(place)
            if cell is None:
                name = task.name if task.category is None else f"{task.name} / {task.category}"

                def finished(facts: str = f"{name}, {concurrency} in flight") -> None:
                    progress.update(progress.done + 1, facts)

                cell, records = await measure_cell(session, task, concurrency, finished)
                store.save(task, concurrency, cell, records)
            cells.append(cell)
    return cells


def over_limit(run: EvalRun, config: EvalConfig) -> list[str]:
    """Cells in which more requests failed than ``eval.server.max_failed_share`` allows, in words."""
    lines = []
    for cell in run.cells:
        share = cell.requests.num_failed / max(1, cell.requests.asked)
        if share > config.server.max_failed_share:
            causes = ", ".join(f"{number} {cause}" for cause, number in cell.requests.failed.items())
            lines.append(
                f"{cell.task} at concurrency {cell.concurrency}: {cell.requests.num_failed} of {cell.requests.asked} "
                f"requests failed ({causes}); eval.server.max_failed_share={config.server.max_failed_share:g}"
            )
    return lines
