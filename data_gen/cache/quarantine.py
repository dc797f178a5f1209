"""Set a faulty shard aside: out of the cache, kept for a look, with the reasons beside it."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from data_gen.cache.index import append_removal
from dflash2_train.provenance import atomic_write_json, fsync_path

logger = logging.getLogger(__name__)
QUARANTINE = "quarantine"


def quarantine(root: Path, name: str, reasons: Sequence[str]) -> Path | None:
    """Move shard ``name`` into ``quarantine/`` and out of the index; stage=capture then makes it again.

    In this order: reasons, move, index. A crash in between leaves a shard whose line has no file, which every reader
    reports; the other way round would bring the faulty shard back unseen.

    Returns:
        The file's new place, where a shard set aside before keeps its own; None if another process took it meanwhile.
    """
    folder = root / QUARANTINE
    folder.mkdir(exist_ok=True)
    record = _claim(folder, Path(name).stem)
    time_utc = datetime.now(UTC).isoformat(timespec="seconds")
    atomic_write_json(record, {"shard": name, "time_utc": time_utc, "reasons": list(reasons)})
    place = record.with_suffix(".safetensors")
    try:
        os.replace(root / name, place)
    except FileNotFoundError:
        record.unlink()
        return None
    fsync_path(folder)
    fsync_path(root)
    append_removal(root, name)
    logger.warning("%s is set aside in %s: %s", name, folder, reasons[0] if reasons else "no reason given")
    return place


def _claim(folder: Path, stem: str) -> Path:
    """The first free name for a record, taken by creating it, so that two processes never take one."""
    for number in itertools.count():
        record = folder / f"{stem}.{number}.json"
        try:
            record.touch(exist_ok=False)
        except FileExistsError:
            continue
        return record
    raise AssertionError("unreachable")
