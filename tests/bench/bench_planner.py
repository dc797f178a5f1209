"""The planner's memory against real steps: ``python -m tests.bench.bench_planner [--cases A,B] [--ranks 1,2]``.

Every case runs in processes of its own (``planner_step``): the real engine, objective, batches and checkpoint. Shown
for the rank that took most: what interpreter and libraries took after all imports, the peak resident size (VmHWM) over
the steps and over saving, what the planner says of both, and their ratio; and that of the steps without the imports.
Exits with 1 if a plan is off by more than ``--tolerance``.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dflash2_train.budgets import ANCHORS_MULTIPLE, TOKENS_MULTIPLE, round_up
from dflash2_train.planning.fit import device_timeline
from dflash2_train.planning.libraries import CPU_IMPORTS
from dflash2_train.planning.setting import MicroBatch, Setting, make_setting
from dflash2_train.planning.timeline import SAVE, STEP, UPDATE, Timeline
from tests.bench.planner_step import PROMPT, Case
from tests.bench.workloads import WORKLOADS
from tests.integration.launch import start_ranks_of

MB = 1e6
SMOLLM2 = Case(
    name="smollm2_cpu",
    hidden=576,
    vocab=49152,
    layers=2,
    intermediate=1536,
    heads=9,
    kv_heads=9,
    head_dim=64,
    taps=3,
    document=126,
    documents=4,
    anchors=48,
    selector_rank=64,
    attention="dense",
    tied=True,
    chunk_mib=48,
    logit_share=1.0,
)


def of_workload(name: str, **changes: Any) -> Case:
    """A workload of the step benchmark as a case."""
    work = WORKLOADS[name]
    shared = ("hidden", "vocab", "layers", "intermediate", "heads", "kv_heads", "head_dim", "taps", "anchors")
    sizes = {key: getattr(work, key) for key in shared}
    return Case(name=name, document=work.tokens, selector_rank=work.selector_rank, **{**sizes, **changes})


CASES = {
    case.name: case
    for case in (
        SMOLLM2,
        of_workload("A"),
        of_workload("B"),
        replace(of_workload("A"), name="A fp32", dtype="float32"),
        replace(of_workload("A"), name="A 512 anchors", anchors=512, look=True),
        replace(of_workload("A"), name="A checkpointed", anchors=512, checkpointing=True),
        replace(of_workload("A"), name="A sliding", documents=2, window=256, rows=2, ema=True),
        replace(of_workload("A"), name="A dense", attention="dense"),
        replace(of_workload("A"), name="A ZeRO-2", zero_stage=2, accumulation=2),
        replace(of_workload("tiny"), name="tiny", hidden=256, vocab=8192, heads=4, head_dim=64, kv_heads=2),
    )
}


def setting_of(case: Case, ranks: int) -> Setting:
    """The planner's view of a case, with the very sizes of its batches."""
    config = case.config(Path(), ranks)
    anchors = case.documents * min(case.anchors, case.document - PROMPT - 1)
    batch = MicroBatch(
        rows=case.rows,
        tokens=round_up(case.document * case.documents, TOKENS_MULTIPLE),
        anchors=round_up(anchors, ANCHORS_MULTIPLE),
        block_size=case.block_size,
        document_tokens=case.document,
    )
    return replace(make_setting(config, batch), tied=case.tied)


def measured(case: Case, ranks: int, *, steps: int, threads: int, allocations: bool = False) -> list[dict[str, Any]]:
    """Results of all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [case.to_json(), "--steps", str(steps), "--threads", str(threads), "--save", folder]
        processes = start_ranks_of("tests.bench.planner_step", arguments + ["--allocations"] * allocations, ranks)
        results = []
        for process in processes:
            output = process.communicate(timeout=500)[0]
            if process.returncode != 0:
                raise SystemExit(f"{case.name} on {ranks} ranks failed:\n{output[-4000:]}")
            results.append(json.loads(output.strip().splitlines()[-1]))
    return results


def planned_steps(plan: Timeline, case: Case) -> int:
    """The plan's peak over the moments that the case goes through before it saves."""
    moments = [moment for moment in (*STEP, UPDATE) if case.look or moment != STEP[0]]
    return max(plan.total(moment) for moment in moments)


def compare(case: Case, ranks: int, options: argparse.Namespace, table: Table) -> float:
    """One case as a row; returns the ratio that is farther from 1."""
    results = measured(case, ranks, steps=options.steps, threads=options.threads, allocations=options.allocations)
    most = max(results, key=lambda result: result["steps"])
    plan = device_timeline(setting_of(case, ranks))
    steps, saving = planned_steps(plan, case), plan.total(SAVE)
    ratios = (steps / most["steps"], saving / results[0]["saving"])
    own = (steps - CPU_IMPORTS) / (most["steps"] - most["base"])
    table.add_row(
        case.name,
        str(ranks),
        *(f"{value / MB:,.0f}" for value in (most["base"], most["steps"], steps)),
        f"{ratios[0]:.3f}",
        f"{own:.3f}",
        *(f"{value / MB:,.0f}" for value in (results[0]["saving"], saving)),
        f"{ratios[1]:.3f}",
        str({key: round(value / MB) for key, value in most["allocated"].items()}) if options.allocations else "",
    )
    return max(ratios[0], 1 / ratios[0])


def main() -> int:
    """Run the cases and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tolerance", type=float, default=0.1)
    parser.add_argument("--allocations", action="store_true", help="also what the allocator itself counted")
    options = parser.parse_args()
    columns = ("case", "ranks", "libraries MB", "steps MB", "planned", "ratio", "without imports")
    table = Table(*columns, "saving MB", "planned", "ratio", "allocator", title="peak resident size of a rank")
    worst = 1.0
    for name in options.cases.split(","):
        for ranks in options.ranks.split(","):
            worst = max(worst, compare(CASES[name], int(ranks), options, table))
    Console(width=170).print(table)
    return 0 if worst <= 1 + options.tolerance else 1


if __name__ == "__main__":
    sys.exit(main())
