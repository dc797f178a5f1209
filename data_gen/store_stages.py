"""Stages ``verify`` and ``inspect``: look at a finished cache, say what was found, and leave a record of it."""

from __future__ import annotations

import logging
from pathlib import Path

from rich.table import Table

from data_gen.cache.conversations import ConversationStore
from data_gen.cache.reader import CaptureReader
from data_gen.cache.statistics import SourceStatistics, StoreStatistics, gather_statistics
from data_gen.cache.verify import LISTED_FAULTS, StoreVerifier, VerifyReport
from data_gen.cache_plots import write_cache_plot
from data_gen.capture import CAPTURE
from data_gen.regenerate import OpenProgress
from dflash2_train.app import open_console
from dflash2_train.config import RunConfig, absolute
from dflash2_train.provenance import atomic_write_json

logger = logging.getLogger(__name__)
EXIT_FAULTS = 1  # verify left faults in the cache
INSPECT = "inspect"
GIB, MIB = 2**30, 2**20
LISTED_SHARDS = 10  # with faults; the record has them all


def run_verify(config: RunConfig, open_progress: OpenProgress) -> int:
    """Check the cache of ``config``; the exit code is 1 if faults are left in it.

    Raises:
        CacheIntegrityError: no cache, or more faulty shards than ``data.store.max_damaged*`` lets it set aside.
    """
    root = absolute(config.data.root)
    verifier = StoreVerifier(root / CAPTURE, config.data.store, _conversations(root))
    done, total = 0, verifier.num_bytes
    with open_progress("verified MiB", total // MIB, 0) as progress:

        def on_bytes(new: int) -> None:
            nonlocal done
            done += new
            progress.update(min(done // MIB, total // MIB - 1))  # the last unit is for the end: values follow bytes

        report = verifier.run(on_bytes)
        progress.update(total // MIB)
    atomic_write_json(_folder(root) / "verify.json", report.to_dict())
    show_verify(report)
    return EXIT_FAULTS if report.left else 0


def show_verify(report: VerifyReport) -> None:
    """Faults first, then the totals."""
    for shard, faults in list(report.faults.items())[:LISTED_SHARDS]:
        more = f" (and {len(faults) - LISTED_FAULTS} more)" if len(faults) > LISTED_FAULTS else ""
        logger.error("%s: %s%s", shard, "; ".join(faults[:LISTED_FAULTS]), more)
    if report.quarantined:
        logger.warning("%d shards were set aside; stage=capture makes them again", len(report.quarantined))
    shares = report.to_dict()
    rows = [
        ("shards read", f"{report.read:,} of {report.shards:,}"),
        ("samples", f"{report.samples:,}"),
        ("tokens compared with conversations", f"{report.compared:,} samples"),
        ("conversations without states", f"{report.without_states:,}"),
        ("tokens", f"{report.tokens:,}"),
        ("supervised, with a teacher", f"{report.supervised:,}"),
        ("size", f"{report.num_bytes / GIB:.3f} GiB"),
        ("labels in the teacher's top-k", f"{shares['in_top_k_share']:.1%}"),
        ("labels that are its first choice", f"{shares['argmax_share']:.1%}"),
        ("equal samples", f"{report.duplicates:,}"),
        ("shards with faults", f"{len(report.faults):,}"),
        ("of these set aside", f"{len(report.quarantined):,}"),
    ]
    table = Table(title="Verify", show_header=False, title_justify="left")
    table.add_column()
    table.add_column(justify="right")
    for row in rows:
        table.add_row(*row)
    open_console(stderr=True).print(table)


def run_inspect(config: RunConfig, open_progress: OpenProgress) -> None:
    """Gather, show and record the statistics of the cache of ``config``.

    Raises:
        CacheIntegrityError: the cache cannot be opened.
    """
    root = absolute(config.data.root)
    reader = CaptureReader(root / CAPTURE, verify_checksums=False)
    with open_progress("inspected samples", len(reader), 0) as progress:
        statistics = gather_statistics(reader, _conversations(root), progress.update)
    folder = _folder(root)
    atomic_write_json(folder / "cache.json", statistics.to_dict())
    write_cache_plot(statistics, folder / "cache.png", config.name)
    show_statistics(statistics)
    logger.info("figures and plot: %s", folder)


def show_statistics(statistics: StoreStatistics) -> None:
    """Sizes in the title, one line a source."""
    total = statistics.total
    table = Table(
        *("source", "samples", "tokens", "mean length", "in top-k", "first choice", "ended for"),
        title=f"Cache: {statistics.shards:,} shards, {statistics.num_bytes / GIB:.3f} GiB of {statistics.dtype}, "
        f"{statistics.num_bytes / max(total.tokens, 1):,.0f} bytes a token, {statistics.quarantined} set aside",
        title_justify="left",
    )
    for column in table.columns[1:6]:
        column.justify = "right"
    for name, part in [*statistics.sources.items(), ("all", total)]:
        table.add_row(name, *_cells(part))
    open_console(stderr=True).print(table)


def _cells(part: SourceStatistics) -> list[str]:
    reasons = ", ".join(f"{name} {number / part.samples:.0%}" for name, number in part.finish_reasons.most_common())
    return [
        f"{part.samples:,}",
        f"{part.tokens:,}",
        f"{part.tokens / max(part.samples, 1):.0f}",
        f"{part.in_top_k_share:.1%}",
        f"{part.argmax_share:.1%}",
        reasons,
    ]


def _conversations(root: Path) -> ConversationStore | None:
    """The conversations beside the cache; None, said aloud, where only the cache was copied."""
    store = ConversationStore(root)
    if store.shards():
        return store
    logger.warning("%s holds no conversations, so tokens and sources cannot be compared with them", root)
    return None


def _folder(root: Path) -> Path:
    folder = root / INSPECT
    folder.mkdir(exist_ok=True)
    return folder
