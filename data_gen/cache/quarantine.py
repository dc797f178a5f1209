"""Set a faulty shard aside: out of the cache, kept for a look, with the reasons beside it."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from data_gen.cache.index import append_removal
from dflash2_train.provenance import atomic_write_json, fsync_path

logger = logging.getLogger(__name__)
QUARANTINE = "quarantine"


def quarantine(root: Path, name: str, reasons: Sequence[str]) -> Path:
    """Move shard ``name`` into ``quarantine/`` and out of the index; stage=capture then makes it again.

    In this order: reasons, move, index. A crash in between leaves a shard whose line has no file, which every reader
    reports; the other way round would bring the faulty shard back unseen.

    Returns:
        The file's new place; a shard set aside before keeps its own.
    """
    folder = root / QUARANTINE
    folder.mkdir(exist_ok=True)
    stem = Path(name).stem
    number = sum(1 for _ in folder.glob(f"{stem}.*.safetensors"))
    while (place := folder / f"{stem}.{number}.safetensors").exists():
        number += 1
    record = {"shard": name, "time_utc": datetime.now(UTC).isoformat(timespec="seconds"), "reasons": list(reasons)}
    atomic_write_json(place.with_suffix(".json"), record)
    os.replace(root / name, place)
    fsync_path(folder)
    fsync_path(root)
    append_removal(root, name)
    logger.warning("%s is set aside in %s: %s", name, folder, reasons[0] if reasons else "no reason given")
    return place
