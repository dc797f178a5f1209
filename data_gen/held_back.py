"""The held-back answers of a stream: captured once, before the first segment, into a small cache beside the ring.

A ring deletes what was trained on; what is validated on again and again has to stay. The folder is a capture cache like
any other, one answer a shard, so any number of producers may fill it side by side and a killed one loses one answer.
``whole.json`` says that it is complete, and for which choice. It takes its room beside the ring's budget.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from data_gen.cache.format import CacheIntegrityError, CapturedSample, CaptureManifest
from data_gen.cache.row_plan import Document
from data_gen.cache.split import WHOLE_FILE
from data_gen.cache.writer import CaptureWriter
from dflash2_train.config import ValidationConfig
from dflash2_train.provenance import atomic_write_json

logger = logging.getLogger(__name__)


def capture_held_back(
    root: Path,
    manifest: CaptureManifest,
    documents: Sequence[Document],
    capture: Callable[[Sequence[Document]], list[CapturedSample]],
    validation: ValidationConfig,
) -> int:
    """Capture the first ``max_documents`` of ``documents`` into ``root``, those that are not there.

    Args:
        root: folder of the small cache.
        manifest: of the ring's samples.
        documents: all that are held back, in the order of validation; none makes no folder.
        capture: makes the samples of documents, in their order.
        validation: how they were chosen.

    Returns:
        Answers captured by this call.

    Raises:
        CacheIntegrityError: the folder holds answers of another choice or of other settings.
    """
    wanted = documents[: validation.max_documents]
    if not wanted:
        return 0
    writer = CaptureWriter(root, manifest)
    present, captured = writer.existing_shards(), 0
    for number, document in enumerate(wanted):
        if number not in present:
            writer.write_shard(number, capture([document]))
            captured += 1
        elif writer.sample_ids(number) != [document.sample_id]:
            raise CacheIntegrityError(
                f"{root}: holds other answers than train.validation.share={validation.share} and "
                f"seed={validation.seed} choose. Delete it, or set them back."
            )
    atomic_write_json(root / WHOLE_FILE, {"share": validation.share, "seed": validation.seed})
    logger.info("%d held-back answers are captured, %d of them now", len(wanted), captured)
    return captured
