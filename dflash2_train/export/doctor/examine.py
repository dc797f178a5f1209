"""Running the checks over a configuration alone or over a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash2_train.export.doctor import (
    file_checks,
    key_checks,
    mask_checks,
    record_checks,
    shape_checks,
    target_checks,
    tensor_checks,
)
from dflash2_train.export.doctor.findings import ERROR, READERS, RUNNER, WARNING, Examination, Finding, errors_first
from dflash2_train.export.doctor.opened import DRAFTER_CHECKS, OpenedDrafter
from dflash2_train.export.doctor.target_facts import TargetFacts
from dflash2_train.export.payload import CONFIG, read_json
from dflash2_train.model.drafter_config import DrafterShape
from dflash2_train.target import TargetInfo

# Importing a module enters its checks.
CHECK_MODULES = (key_checks, shape_checks, file_checks, tensor_checks, mask_checks, target_checks, record_checks)
FOLDER_GROUPS = ("config", "files", "tensors", "mask", "target", "record")
CONFIG_GROUPS = ("config", "target")


def _run(drafter: OpenedDrafter, groups: tuple[str, ...]) -> list[Finding]:
    """Findings, errors first. A file that is no DFlash drafter of the published layout is told so and nothing else."""
    findings = DRAFTER_CHECKS.run(drafter, "kind")
    if not findings:
        findings = [finding for group in groups for finding in DRAFTER_CHECKS.run(drafter, group)]
        if not any(DRAFTER_CHECKS.group_of(finding.check) == "config" for finding in findings):
            findings += _own_reader(drafter)
    return errors_first(findings)


def _own_reader(drafter: OpenedDrafter) -> list[Finding]:
    """A net below the checks of the configuration: what none of them names and this project's loader still refuses."""
    if not drafter.is_second:
        return []
    try:
        DrafterShape.from_published(drafter.config)
    except (ValueError, TypeError) as error:
        return [
            Finding(
                check="own-reader",
                severity=WARNING,
                message=f"dflash2-eval's runner refuses it: {str(error).rstrip('.')}",
                rule="the configuration is one that this project computes",
                servers=(RUNNER,),
                next_step="Serve it with a server, or correct the key",
            )
        ]
    return []


def check_config(config: dict[str, Any], *, target: TargetInfo | None = None) -> list[Finding]:
    """Findings about a published configuration alone; before training it tells what export would refuse.

    Args:
        config: content of ``config.json``.
        target: what is known of the target; None leaves the comparison with it out.
    """
    facts = None if target is None else TargetFacts.of(target)
    return _run(OpenedDrafter(config, target=facts), CONFIG_GROUPS)


def examine(folder: Path, *, target: TargetFacts | None = None) -> Examination[OpenedDrafter]:
    """Everything about a drafter folder.

    Args:
        folder: with ``config.json`` and what belongs to it; nothing in it is trusted.
        target: the target to compare with, or None.
    """
    try:
        config = read_json(folder / CONFIG)
    except ValueError as error:
        return Examination(subject=None, findings=[_no_config(str(error))], not_checked=["everything else"])
    drafter = OpenedDrafter(config, folder, target)
    findings = _run(drafter, FOLDER_GROUPS)
    stopped = any(DRAFTER_CHECKS.group_of(finding.check) == "kind" for finding in findings)
    return Examination(
        subject=drafter,
        findings=findings,
        not_checked=["everything else"] if stopped else _not_checked(drafter),
    )


def check_folder(folder: Path, *, target_info: TargetInfo | None = None) -> list[Finding]:
    """All findings about a drafter folder, errors first. An empty list means: serve it.

    Args:
        folder: with ``config.json``, ``model.safetensors`` and ``mask_embedding.pt``.
        target_info: the target to compare with, or None.
    """
    return examine(folder, target=None if target_info is None else TargetFacts.of(target_info)).findings


def _no_config(message: str) -> Finding:
    return Finding(
        check="config-json",
        severity=ERROR,
        message=message.split(". ")[0],
        rule=f"{CONFIG} is a JSON object",
        servers=READERS,
        next_step="Name the folder of a drafter, or fetch the file again",
    )


def _not_checked(drafter: OpenedDrafter) -> list[str]:
    target, missing = drafter.target, []
    if drafter.expected_tensors is None:
        missing.append("names and shapes of tensors: config.json does not give them")
    if target is None:
        missing.append("sizes, positions, tokenizer and mask row of the target: name it with --target")
        return missing
    if target.tokenizer is None:
        missing.append("whether the tokenizer writes the mask token: no tokenizer.json at hand")
    if target.tensors is None:
        missing.append("the target's embedding rows: its weights are not in a local folder")
    return missing
