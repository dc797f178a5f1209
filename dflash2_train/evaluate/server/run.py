"""A whole server run: look at the server, measure every task at every concurrency, write what was found.

Into ``eval.output_dir/server/LABEL``: ``report.json``, one ``requests-….jsonl`` a measurement with a line a request,
and ``cells/`` with finished measurements, which a rerun takes over as long as the same server process runs. Into
``eval.output_dir/server``: the report of all labels side by side.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from dflash2_train.config import ConfigError, EvalConfig, RunConfig, absolute, to_plain
from dflash2_train.evaluate.readers import read_run
from dflash2_train.evaluate.runs import SERVER, Cell, EvalRun
from dflash2_train.evaluate.server.cell import Session, measure_cell
from dflash2_train.evaluate.server.connection import ServerError, open_client
from dflash2_train.evaluate.server.messages import Asking, EngineApi, ServerFacts
from dflash2_train.evaluate.server.sglang_api import SglangApi
from dflash2_train.evaluate.server.vllm_api import VllmApi
from dflash2_train.evaluate.server.workload import Render, RequestRecord, Workload
from dflash2_train.evaluate.tasks import Task, load_tasks
from dflash2_train.progress import ProgressReporter
from dflash2_train.provenance import atomic_write_json, atomic_write_text, run_record, sha256_file, sha256_json

logger = logging.getLogger(__name__)
APIS: dict[str, type[EngineApi]] = {"vllm": VllmApi, "sglang": SglangApi}
REPORT_NAME = "report.json"
DRAFTER_WEIGHTS = "model.safetensors"
PASSING_KEYS = ("warm_up", "tries", "timeout_s", "flags")  # of a protocol: they shape no figure, or only in words


def measure_server(config: RunConfig) -> EvalRun:
    """Measure the server of ``eval.server`` and write its run folder.

    Raises:
        ConfigError: prompts, key or template cannot be had.
        ServerError: a server that cannot be measured.
        CounterError: counters that are missing, or of a server that was restarted.
    """
    folder = run_folder(config)
    tasks = load_tasks(config)
    render = _renderer(config, tasks)
    if config.eval.server.template == "client":
        tasks = [rendered(task, render) for task in tasks]
    run = asyncio.run(_measure(config, tasks, render, folder))
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


async def _measure(config: RunConfig, tasks: Sequence[Task], render: Render, folder: Path) -> EvalRun:
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
                enable_thinking=config.data.enable_thinking,
            ),
            config=server,
            render=render,
            context=facts.context,
        )
        session = Session(config=config.eval, client=client, api=api, facts=facts, workload=workload)
        started = None if counters is None else counters.started
        cells = await _measure_all(session, tasks, Store(folder, protocol, started))
    return EvalRun(
        kind=SERVER,
        label=server.resolved_label,
        protocol=protocol,
        cells=cells,
        labels=_run_labels(config, facts),
        run={"evaluation": run_record(to_plain(config)), "server": asdict(facts)},
    )


def check_folder(folder: Path, protocol: dict[str, Any]) -> None:
    """Refuse to replace a result that was measured under other conditions.

    Raises:
        ConfigError: the label's folder holds such a one.
    """
    path = folder / REPORT_NAME
    if not path.is_file():
        return
    found = read_run(path).protocol
    changed = [key for key in protocol if key not in PASSING_KEYS and found.get(key) != protocol[key]]
    if changed:
        listed = ", ".join(f"{key} {found.get(key)!r} -> {protocol[key]!r}" for key in changed)
        raise ConfigError(
            f"eval.server.label={folder.name!r}: {path} holds a result under other conditions ({listed}). Name another "
            "label or another eval.output_dir, or remove that folder."
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


def check_speculation(config: RunConfig, facts: ServerFacts) -> None:
    """Hold what the server drafts against what the run is about, before anything is measured.

    Raises:
        ServerError: speculation where none is expected or the reverse, another K than configured, or a K for which the
            drafter was not trained.
    """
    server, drafted = config.eval.server, facts.num_drafted
    if server.method == "autoregressive":
        if drafted is not None:
            raise ServerError(
                f"{server.url}: speculates with K={drafted}, though eval.server.method=autoregressive. Start it "
                "without speculation, or name the method."
            )
        return
    if drafted is None:
        raise ServerError(
            f"{server.url}: does not speculate, though eval.server.method={server.method}. Start it with its "
            "speculative options, or set eval.server.method=autoregressive for a baseline."
        )
    trained = config.drafter.num_drafted
    if server.method == "drafter" and drafted > trained:
        raise ServerError(
            f"{server.url}: drafts K={drafted}; the drafter's block_size {config.drafter.block_size} trained {trained} "
            f"positions. Start the server with {trained} speculative tokens at most."
        )
    if config.eval.num_drafted is not None and drafted != config.eval.num_drafted:
        raise ServerError(
            f"{server.url}: drafts K={drafted}, eval.num_drafted={config.eval.num_drafted}. Start the server with "
            f"{config.eval.num_drafted} speculative tokens, or leave eval.num_drafted null."
        )


def describe(config: RunConfig, facts: ServerFacts) -> dict[str, Any]:
    """All that shapes the figures, as JSON values; likeness of runs is judged by it."""
    settings, server = config.eval, config.eval.server
    caching = {True: "on", False: "off", None: "not told"}[facts.prefix_caching]
    if facts.prefix_caching and server.cold_prefix_cache:
        caching = "on, kept cold"
    return {
        "experiment": config.name,
        "mode": settings.mode,
        "engine": f"{facts.engine} {facts.version or '(version not told)'}",
        "hardware": server.hardware or facts.hardware,
        "method": server.method,
        "target": config.target.name,
        "served_model": facts.model,
        "drafter_sha256": _declared_drafter(config),
        "num_drafted": facts.num_drafted,
        "max_new_tokens": settings.max_new_tokens,
        "temperature": settings.temperature,
        "top_p": settings.top_p if settings.temperature > 0 else None,
        "top_k": None,
        "min_p": None,
        "seed": None,  # not sent: batches of changing shape do not repeat, and seeded sampling is slower
        "ignore_eos": False,
        "enable_thinking": config.data.enable_thinking,
        "template": server.template,
        "prefix_caching": caching,
        "concurrency": list(server.concurrency),
        "warm_up": {"requests": server.warm_up or "as many as in flight", "tokens": server.warm_up_tokens},
        "tries": server.tries,
        "timeout_s": server.timeout_s,
        "flags": server.flags or facts.flags,
    }


def _declared_drafter(config: RunConfig) -> str | None:
    """Hash of the weights that the experiment exported; servers do not tell what they loaded."""
    if config.eval.server.method != "drafter":
        return None
    folder = absolute(config.eval.drafter or config.export.output_dir)
    weights = folder / DRAFTER_WEIGHTS
    return sha256_file(weights) if weights.is_file() else None


def _run_labels(config: RunConfig, facts: ServerFacts) -> list[str]:
    labels = []
    if not (config.eval.server.hardware or facts.hardware):
        labels.append("hardware not recorded: set eval.server.hardware")
    if config.eval.server.method == "drafter" and config.eval.num_drafted is None:
        trained = config.drafter.num_drafted
        if facts.num_drafted is not None and facts.num_drafted < trained:
            labels.append(f"K={facts.num_drafted}; the drafter was trained for {trained}")
    return labels


class Store:
    """Finished measurements on disk, valid for one server process and one protocol.

    A server cannot be asked which drafter it loaded, so another process is another server. Where the start time is not
    told, nothing is taken over.
    """

    def __init__(self, folder: Path, protocol: dict[str, Any], started: float | None) -> None:
        self._folder, self._started = folder, started
        self._covered = {"protocol": protocol, "started": started}

    def load(self, task: Task, concurrency: int) -> Cell | None:
        """The measurement, if it was finished under the same conditions."""
        path = self._path(task, concurrency)
        if self._started is None or not path.is_file():
            return None
        value = json.loads(path.read_text(encoding="utf-8"))
        return Cell.from_json(value["cell"]) if value["fingerprint"] == self._fingerprint(task, concurrency) else None

    def save(self, task: Task, concurrency: int, cell: Cell, records: Sequence[RequestRecord]) -> None:
        """Write the raw records, then the cell, each whole or not at all."""
        lines = "".join(json.dumps(asdict(record), ensure_ascii=False) + "\n" for record in records)
        raw = self._folder / f"requests-{_file_name(task, concurrency)}.jsonl"
        atomic_write_text(raw, lines)
        value = {
            "fingerprint": self._fingerprint(task, concurrency),
            "requests_file": raw.name,
            "requests_sha256": sha256_file(raw),
            "cell": asdict(cell),
        }
        atomic_write_json(self._path(task, concurrency), value)

    def _path(self, task: Task, concurrency: int) -> Path:
        return self._folder / "cells" / f"{_file_name(task, concurrency)}.json"

    def _fingerprint(self, task: Task, concurrency: int) -> str:
        return sha256_json({**self._covered, "task": task.name, "category": task.category,
                            "concurrency": concurrency, "prompts": task.prompts_sha256})


def _file_name(task: Task, concurrency: int) -> str:
    parts = [part for part in (task.name, task.category) if part]
    return f"{re.sub(r'[^A-Za-z0-9.-]+', '_', '-'.join(parts))}-c{concurrency}"


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
