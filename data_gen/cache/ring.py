"""The ring: a folder of bounded size through which captured samples flow from producers to trainers.

===========================  =======================================================================================
``manifest.json``            what shaped the samples and their order; other settings are refused
``documents.jsonl``          all documents with their lengths, from which both sides compute the same plan
``segments/``                ``segment-00000012.safetensors``: the documents of rows [12 R, 13 R) of the plan
``claims/``                  which producer writes which segment (:mod:`data_gen.cache.claims`)
``positions/``               ``rank-00000.json``: the next row that a trainer's rank will read; ``checkpoint.json``: the
                             row that a resume would start from; ``goal.json``: rows of the whole training;
                             ``trainer.json``: the process that leads it
``done.json``                written by the trainer at its end
===========================  =======================================================================================

State is files alone, made by hard link or rename, so any number of producers and ranks on any hosts may share a ring
on a local disk, in ``/dev/shm`` or on a network file system, and any of them may be killed at any moment.

Who does what: trainers only read segments and write positions. Producers only write and delete segments. They fill the
lowest missing segment at or after the lowest position, and wait while it does not fit the budget. A segment behind the
last checkpoint is deleted; one behind all positions is deleted as soon as its room is needed.

A trainer that resumes goes back to its checkpoint. Segments that are gone by then are captured once more; the capture
is deterministic, so the resumed training equals the uninterrupted one, and along one line of checkpoints every row is
trained on exactly once.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data_gen.cache.claims import process_is_gone, read_small, this_host
from data_gen.cache.format import (
    MANIFEST_FILE,
    CacheIntegrityError,
    CaptureManifest,
    list_differences,
    read_json_object,
)
from data_gen.cache.row_plan import ORDER_VERSION, Document, RowPlan, documents_digest
from dflash2_train.config import StreamConfig, UserError
from dflash2_train.provenance import atomic_write_json, atomic_write_text, sha256_json

RING_VERSION = 1
DOCUMENTS_FILE = "documents.jsonl"
DONE_FILE = "done.json"


@dataclass(frozen=True, kw_only=True)
class Positions:
    """What the trainers have told; rows of the endless list."""

    lowest: int  # row that some rank will read next; 0 before any trainer started
    checkpoint: int  # row that a resume would start from
    goal: int | None  # rows of the whole training, where a trainer has told them


def plan_content(documents: Sequence[Document], *, row_tokens: int, seed: int, stream: StreamConfig) -> dict[str, Any]:
    """All that shapes which document lies in which segment."""
    return {
        "order_version": ORDER_VERSION,
        "documents": documents_digest(documents),
        "row_tokens": row_tokens,
        "seed": seed,
        "segment_rows": stream.segment_rows,
        "reuse": stream.reuse,
    }


class Ring:
    """An existing ring, opened for either side.

    Args:
        root: its folder.

    Raises:
        CacheIntegrityError: no ring, another version, or a damaged manifest.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        path = root / MANIFEST_FILE
        stored = read_json_object(path)
        if stored.get("version") != RING_VERSION or stored.get("fingerprint") != sha256_json(stored.get("content")):
            raise CacheIntegrityError(
                f"{path}: not a ring of version {RING_VERSION}, or edited by hand. Delete {root} and start the "
                "producers again; a ring holds nothing that cannot be captured again."
            )
        self.capture = CaptureManifest(content=stored["content"]["capture"])
        self.plan_content: dict[str, Any] = stored["content"]["plan"]
        self.claims, self._segments, self._positions = root / "claims", root / "segments", root / "positions"
        self._trainer = self._positions / "trainer.json"

    @classmethod
    def create(cls, root: Path, capture: CaptureManifest, plan: dict[str, Any], documents: Sequence[Document]) -> Ring:
        """Make the ring, or open the one that is there.

        Args:
            root: its folder.
            capture: what shapes the samples.
            plan: :func:`plan_content`.
            documents: all of them, as :func:`data_gen.cache.row_plan.trainable` gives them.

        Raises:
            CacheIntegrityError: ``root`` holds a ring of other settings; the differences are listed.
        """
        content = {"capture": capture.content, "plan": plan}
        path = root / MANIFEST_FILE
        if not path.exists():
            for name in ("claims", "segments", "positions"):
                (root / name).mkdir(parents=True, exist_ok=True)
            lines = (json.dumps(asdict(document)) + "\n" for document in documents)
            atomic_write_text(root / DOCUMENTS_FILE, "".join(lines))
            record = {"version": RING_VERSION, "fingerprint": sha256_json(content), "content": content}
            atomic_write_json(path, record)  # last: who sees it sees all of the ring
        ring = cls(root)
        differences = list_differences({"capture": ring.capture.content, "plan": ring.plan_content}, content)
        if differences:
            listed = "\n  ".join(differences)
            raise CacheIntegrityError(
                f"{root} is a ring of other settings (stored -> now):\n  {listed}\nSet them back, delete the ring "
                "(nothing in it is lost for good), or choose another data.stream.root."
            )
        return ring

    def documents(self) -> list[Document]:
        """The documents of the plan, in its order.

        Raises:
            CacheIntegrityError: the list is not the one that the manifest tells of.
        """
        path = self.root / DOCUMENTS_FILE
        try:
            found = [Document(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
        except (OSError, ValueError, TypeError) as error:
            raise CacheIntegrityError(f"{path}: cannot be read ({error}). Delete {self.root}.") from error
        if documents_digest(found) != self.plan_content["documents"]:
            raise CacheIntegrityError(f"{path}: not the list that {MANIFEST_FILE} tells of. Delete {self.root}.")
        return found

    # Segments

    def segment_path(self, segment: int) -> Path:
        """File of a segment."""
        return self._segments / f"segment-{segment:08d}.safetensors"

    def temporary_path(self, segment: int, token: str) -> Path:
        """Where the producer ``token`` writes a segment before it is whole."""
        return self._segments / f".segment-{segment:08d}.{token}.tmp"

    def segments(self) -> dict[int, int]:
        """Bytes of every segment that is there."""
        sizes: dict[int, int] = {}
        for path in self._segments.glob("segment-*.safetensors"):
            try:
                sizes[int(path.stem.removeprefix("segment-"))] = path.stat().st_size
            except FileNotFoundError:
                continue  # deleted since the folder was listed
        return sizes

    def delete(self, segment: int) -> None:
        """Remove a segment, if it is there."""
        self.segment_path(segment).unlink(missing_ok=True)

    def delete_temporaries(self, segment: int) -> None:
        """Remove what dead producers left of a segment."""
        for path in self._segments.glob(f".*segment-{segment:08d}.*.tmp"):
            path.unlink(missing_ok=True)

    def free_bytes(self) -> int:
        """Free space of the ring's file system."""
        return shutil.disk_usage(self.root).free

    # Positions

    def positions(self) -> Positions:
        """Where the trainers are."""
        ranks = [row for path in self._positions.glob("rank-*.json") if (row := _read_rows(path)) is not None]
        goal = _read_rows(self._positions / "goal.json")
        checkpoint = _read_rows(self._positions / "checkpoint.json")
        return Positions(lowest=min(ranks, default=0), checkpoint=checkpoint or 0, goal=goal)

    def begin(self, *, row: int, world_size: int, goal: int) -> None:
        """Put all ranks of a starting or resuming training at ``row``. The first rank calls it, before any rank reads.

        Args:
            row: of the checkpoint, or 0.
            world_size: ranks; files of ranks beyond it are removed.
            goal: rows of the whole training.

        Raises:
            UserError: a living process of this host leads another training on this ring.
        """
        self._refuse_second_training()
        (self.root / DONE_FILE).unlink(missing_ok=True)
        atomic_write_json(self._trainer, {"host": this_host(), "pid": os.getpid()})
        _write_rows(self._positions / "goal.json", goal)
        self.save_checkpoint(row)
        for rank in range(world_size):
            self.move(rank, row)
        for path in self._positions.glob("rank-*.json"):
            if int(path.stem.removeprefix("rank-")) >= world_size:
                path.unlink(missing_ok=True)

    def move(self, rank: int, row: int) -> None:
        """Tell the next row that ``rank`` will read."""
        _write_rows(self._positions / f"rank-{rank:05d}.json", row)

    def save_checkpoint(self, row: int) -> None:
        """Tell the row that a resume would start from; call it once the checkpoint is safe on disk."""
        _write_rows(self._positions / "checkpoint.json", row)

    def _refuse_second_training(self) -> None:
        """Two trainings would move each other's positions. A dead one on another host looks like a slow one."""
        if not self._trainer.exists():
            return
        leader = read_json_object(self._trainer)
        host, pid = leader["host"], leader["pid"]
        if host == this_host() and pid != os.getpid() and not process_is_gone(host, pid):
            raise UserError(
                f"{self.root} is in use by another training (process {pid}). Wait for it, stop it, or choose another "
                f"data.stream.root. If that process is none, delete {self._trainer}."
            )

    # The end

    def finish(self, *, output_dir: str, steps: int) -> None:
        """Tell the producers that the training of ``output_dir`` has done all its ``steps``."""
        self._trainer.unlink(missing_ok=True)
        atomic_write_json(self.root / DONE_FILE, {"output_dir": output_dir, "steps": steps, "token": uuid.uuid4().hex})

    def done(self) -> dict[str, Any] | None:
        """What :meth:`finish` told, or None."""
        path = self.root / DONE_FILE
        return read_json_object(path) if path.exists() else None


def ring_plan(ring: Ring, *, row_tokens: int, seed: int, stream: StreamConfig) -> RowPlan:
    """The plan that this configuration makes of the ring's documents.

    Raises:
        CacheIntegrityError: the ring was made for another plan; the differences are listed.
    """
    documents = ring.documents()
    differences = list_differences(
        ring.plan_content, plan_content(documents, row_tokens=row_tokens, seed=seed, stream=stream)
    )
    if differences:
        listed = "\n  ".join(differences)
        raise CacheIntegrityError(
            f"{ring.root} is filled for another training order (ring -> config):\n  {listed}\n"
            "Start producers and trainer with the same experiment and overrides, or choose another data.stream.root."
        )
    return RowPlan(documents, row_tokens=row_tokens, seed=seed, segment_rows=stream.segment_rows, reuse=stream.reuse)


def _write_rows(path: Path, rows: int) -> None:
    """Replace a small file. Not flushed to the disk: after a power cut trainers tell their positions anew."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    temporary.write_text(json.dumps({"rows": rows}))
    os.replace(temporary, path)


def _read_rows(path: Path) -> int | None:
    try:
        rows: int = json.loads(read_small(path))["rows"]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not readable ({error}). Delete it; the trainer writes it again at its start.") from (
            error
        )
    return rows
