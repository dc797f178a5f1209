"""Adding evaluations to an exported drafter.

Card, PROVENANCE.txt and run.json are made anew in a copy of the folder (weights as hard links), which then takes its
place: readers see the old papers or the new ones, never a mixture.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

from dflash2_train.config import RunConfig, UserError, absolute
from dflash2_train.export.evaluation_passes import EvaluationError
from dflash2_train.export.evaluations import add_evaluations, read_report, refuse_other_drafter, summarise
from dflash2_train.export.payload import CARD, RECORD
from dflash2_train.export.record import changed_files, finish_papers, read_record
from dflash2_train.export.workspace import check_replaceable, real_path, replace_folder, workspace
from dflash2_train.provenance import sha256_file

logger = logging.getLogger(__name__)
REPORT = "report.json"  # of dflash2-eval in eval.output_dir


def rewrite_papers(folder: Path, reports: list[Path], *, repo_id: str | None = None) -> list[str]:
    """Add evaluation reports to an exported drafter and make its papers anew, all or nothing.

    Args:
        folder: of an exported drafter, unchanged since.
        reports: of ``dflash2-eval``; may be empty, to render with a newer version of this tool.
        repo_id: of the Hub, for the serving commands of the card; None = as before, THIS_FOLDER at first.

    Returns:
        Names of the evaluation files that were added.

    Raises:
        UserError: not our export, files changed since, or a report that is none or of another drafter.
    """
    folder = real_path(folder)
    if not folder.parent.is_dir():
        read_record(folder)  # says that there is none; a workspace would make the parent
    with workspace(folder) as space:
        if not folder.exists():
            check_replaceable(folder)  # brings back a folder that a crash left aside
        record = read_record(folder)
        refuse_changed(folder, record)
        temporary = space / folder.name
        shutil.copytree(folder, temporary, copy_function=_link)
        added = add_evaluations(temporary, record, reports)
        record["repo_id"] = repo_id or record.get("repo_id")
        finish_papers(temporary, record)
        replace_folder(temporary, folder)
    return added


def refuse_changed(folder: Path, record: dict[str, Any]) -> None:
    """Raise UserError when a file is not as it was exported, or when the record lacks what papers are made from."""
    changed = changed_files(folder, record)
    if changed:
        raise UserError(
            f"{folder}: {', '.join(changed)} changed after the export, and new papers would hide that. "
            "Restore the files, or export again."
        )
    if "target" not in record:
        raise UserError(f"{folder / RECORD}: is of an earlier version. Export or convert again, then add reports.")
    if CARD not in record["files"]:
        raise UserError(f"{folder}: is in another tool's layout and has no card of this one. Its maker's card holds.")


def _link(source: str, target: str) -> None:
    """Weights need no second copy: papers are replaced by rename, which leaves the other name of a file alone."""
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)


def add_found_reports(config: RunConfig, folder: Path) -> list[str]:
    """Take the run's own reports into the card of its export, those about these very files.

    Args:
        config: the experiment; every ``report.json`` under ``eval.output_dir`` is looked at, served runs included.
        folder: the export.

    Returns:
        Names of the evaluation files that were added; empty when there is none that the card lacks.
    """
    record = read_record(folder)
    known = {entry["report_sha256"] for entry in record.get("evaluations") or []}
    wanted = []
    for path in sorted(absolute(config.eval.output_dir).rglob(REPORT)):
        if sha256_file(path) in known:
            continue
        try:
            report = read_report(path)
            refuse_other_drafter(report, path, record["files"])
            summarise(report, path)
        except EvaluationError as error:
            logger.info("not taken into the card: %s", error)
            continue
        wanted.append(path)
    return rewrite_papers(folder, wanted) if wanted else []
