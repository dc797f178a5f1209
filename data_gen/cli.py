"""``dflash2-gen-data``: plan, regenerate, capture and verify the training data of an experiment.

``stage=plan`` tells prompts, tokens and bytes and starts nothing; ``stage=all`` regenerates, captures and verifies in
turn; ``stage=inspect`` shows what a cache holds.
Each stage continues where an earlier run stopped, and a finished one is left alone.
"""

from __future__ import annotations

import logging
import os
import resource
from typing import TYPE_CHECKING

from rich.table import Table

from dflash2_train.app import open_console
from dflash2_train.config import RunConfig
from dflash2_train.launching import Command, run_launched
from dflash2_train.progress import ProgressReporter

if TYPE_CHECKING:
    from data_gen.capture import CaptureTotals
    from data_gen.prepare import PreparedPrompts
    from data_gen.regenerate import ConversationTotals
    from data_gen.ring_filler import FillTotals

logger = logging.getLogger(__name__)
GIB = 2**30
MAX_REASONS = 10  # of failed rows in the summary; the ledger has all


def open_display(title: str, total: int, before: int) -> ProgressReporter:
    """The progress of one stage, ``before`` units of which were finished by earlier runs."""
    return ProgressReporter(title, total, done=before)


def _table(title: str, rows: list[tuple[str, str]]) -> None:
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column()
    table.add_column(justify="right")
    for name, value in rows:
        table.add_row(name, value)
    open_console(stderr=True).print(table)


def _peak_memory() -> str:
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB"


def show_conversations(totals: ConversationTotals, prepared: PreparedPrompts) -> None:
    """Summary of the regenerate stage."""
    rate = totals.new_tokens / totals.seconds if totals.seconds else 0.0
    rows = [
        ("prompts answered", f"{totals.prompts:,}"),
        ("answers", f"{totals.completions:,}"),
        ("prompt tokens", f"{totals.prompt_tokens:,}"),
        ("answer tokens", f"{totals.completion_tokens:,}"),
        ("cut by max_tokens", f"{totals.cut / max(totals.completions, 1):.1%}"),
        *((f"rejected prompts: {reason}", f"{number:,}") for reason, number in sorted(prepared.rejected.items())),
        *(
            (f"hold-out, left out: {reason}", f"{number:,}")
            for reason, number in sorted(prepared.counts.holdout_rejected.items())
        ),
        *((f"dropped: {reason}", f"{number:,}") for reason, number in sorted(totals.dropped.items())),
        *((f"later turns not asked: {reason}", f"{number:,}") for reason, number in sorted(totals.skipped.items())),
        *((f"failed: {reason}", f"{number:,}") for reason, number in totals.failed.most_common(MAX_REASONS)),
        ("failed in all (given up)", f"{totals.failed.total():,} ({totals.dead:,})"),
        ("written by this run", f"{totals.new_completions:,} in {totals.seconds:.0f} s ({rate:.0f} tokens/s)"),
        ("engine start", f"{totals.start_seconds:.0f} s"),
        ("peak memory", _peak_memory()),
    ]
    _table("Conversations", rows)


def show_capture(totals: CaptureTotals) -> None:
    """Summary of the capture stage."""
    rate = totals.tokens / totals.seconds if totals.seconds else 0.0
    rows = [
        ("samples of this run", f"{totals.samples:,}"),
        ("tokens", f"{totals.tokens:,}"),
        ("supervised", f"{totals.supervised:,} ({totals.supervised / max(totals.tokens, 1):.1%})"),
        ("written", f"{totals.num_bytes / GIB:.3f} GiB in {totals.seconds:.0f} s ({rate:.0f} tokens/s)"),
        ("teacher = engine's next token", f"{totals.next_equal} of {totals.samples}"),
        ("asked for again", f"{totals.tally.retried:,}"),
        *((f"fault: {reason}", f"{number:,}") for reason, number in totals.tally.faults.most_common(5)),
        ("conversations that failed", f"{totals.failed:,}"),
        ("shards that were there", f"{totals.skipped_shards:,}"),
        ("engine start", f"{totals.start_seconds:.0f} s"),
        ("peak memory", _peak_memory()),
    ]
    _table("Capture", rows)


def show_stream(totals: FillTotals) -> None:
    """Summary of a producer."""
    busy, idle = totals.capture_seconds, totals.wait_seconds
    rate = totals.tokens / busy if busy else 0.0
    rows = [
        ("segments of this producer", f"{totals.segments:,}"),
        ("of them begun by another", f"{totals.taken_over:,}"),
        ("tokens", f"{totals.tokens:,} ({rate:.0f} tokens/s while at work)"),
        ("written", f"{totals.num_bytes / GIB:.3f} GiB"),
        ("waited for room", f"{idle:.0f} s ({idle / max(busy + idle, 1e-9):.0%} of the time)"),
        ("peak memory", _peak_memory()),
    ]
    _table("Stream", rows)


def gen_data(config: RunConfig) -> int:
    """Run the stages that ``config.stage`` names; the exit code is 1 if verify left faults."""
    stages = ("regenerate", "capture", "verify") if config.stage == "all" else (config.stage,)
    if stages == ("stream",):
        from data_gen.backends.folder import find_target
        from data_gen.stream import stream
        from data_gen.stream_workers import run_workers

        if config.data.stream.workers > 0:
            return run_workers(config)
        show_stream(stream(config, find_target(config.target)))
        return 0
    if "capture" in stages:
        logger.info("states will be read by %s", config.data.capturer)  # refuses now what would fail after a week
    if "plan" in stages:
        from data_gen.stage_plan import plan_stage

        plan_stage(config)
    if "regenerate" in stages:
        from data_gen.prepare import prepare
        from data_gen.regenerate import regenerate

        prepared = prepare(config)
        for line in prepared.plan.report.lines():
            logger.info("%s", line)
        show_conversations(regenerate(config, prepared, open_display), prepared)
    if "capture" in stages:
        from data_gen.backends.folder import find_target
        from data_gen.capture import capture

        show_capture(capture(config, find_target(config.target), open_display))
    if "inspect" in stages:
        from data_gen.store_stages import run_inspect

        run_inspect(config, open_display)
    if "verify" in stages:
        from data_gen.store_stages import run_verify

        return run_verify(config, open_display)
    return 0


def main() -> None:
    """Console script."""
    # Read when torch loads its threading library: threads that wait in a loop stall each other for minutes as soon as
    # anything else runs on the machine's cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    run_launched(Command(name="dflash2-gen-data", module="data_gen.cli", main=gen_data, shards=True))


if __name__ == "__main__":
    main()
