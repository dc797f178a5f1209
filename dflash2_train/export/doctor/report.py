"""An examination as a table for people and as one JSON document for programs, and the exit code of both."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeAlias

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dflash2_train.export.doctor.findings import ERROR, READERS, Examination

if TYPE_CHECKING:
    from dflash2_train.export.doctor.obtain import Obtained
    from dflash2_train.export.doctor.serve import ServingView

AnyExamination: TypeAlias = Examination[Any]  # of a folder or a GGUF
FORMAT = 1  # of the JSON document; raised when a key changes its meaning or goes
EXIT_CLEAN, EXIT_FINDINGS = 0, 1
STYLES = {ERROR: "bold red", "warning": "yellow"}


def exit_code(examination: AnyExamination, *, strict: bool = False) -> int:
    """1 for any error, with ``strict`` for any warning as well; else 0."""
    bad = examination.errors + (examination.warnings if strict else 0)
    return EXIT_FINDINGS if bad else EXIT_CLEAN


def verdict(examination: AnyExamination) -> str:
    """One line: serve it or not."""
    if examination.errors:
        return f"not fit to serve: {_count(examination.errors, 'error')}, {_count(examination.warnings, 'warning')}"
    if examination.warnings:
        return f"no error, {_count(examination.warnings, 'warning')}: serve it if these were meant so"
    return "fit to serve: no error, no warning"


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def document(
    obtained: Obtained, examination: AnyExamination, view: ServingView | None, *, target: str | None
) -> dict[str, Any]:
    """The whole answer for programs.

    Keys: format, drafter, commit, target, verdict, errors, warnings, findings (check, severity, message, rule, servers,
    next_step), not_checked, serve (null, or server, command, reads, pitfalls).
    """
    return {
        "format": FORMAT,
        "drafter": obtained.name,
        "commit": obtained.commit,
        "target": target,
        "verdict": verdict(examination),
        "errors": examination.errors,
        "warnings": examination.warnings,
        "findings": [asdict(finding) for finding in examination.findings],
        "not_checked": examination.not_checked,
        "serve": None if view is None else asdict(view),
    }


def show(console: Console, obtained: Obtained, examination: AnyExamination, view: ServingView | None) -> None:
    """Print findings, what was not looked at, the verdict and the serving view."""
    if examination.findings:
        table = Table("severity", "check", "finding", "touches", "next step", show_lines=True)
        for finding in examination.findings:
            table.add_row(
                Text(finding.severity, style=STYLES[finding.severity]),
                Text(finding.check),
                Text(finding.message),
                Text(_touched(finding.servers)),
                Text(finding.next_step),
            )
        console.print(table)
    for line in examination.not_checked:
        console.print(Text(f"not checked: {line}", style="dim"))
    at = f" at commit {obtained.commit}" if obtained.commit else ""
    console.print(Text(f"{obtained.name}{at}: {verdict(examination)}"))
    if view is not None:
        _show_view(console, view)


def _touched(servers: tuple[str, ...]) -> str:
    """The readers, a line each; of a rule that no program reads, people are touched."""
    return "all readers" if servers == READERS else "\n".join(servers) or "people"


def _show_view(console: Console, view: ServingView) -> None:
    console.print(Text(f"\n{view.server}", style="bold"))
    table = Table("what it reads", "value", f"what {view.server} makes of it")
    for row in view.reads:
        table.add_row(Text(row.key), Text(row.value), Text(row.effect))
    console.print(table)
    for pitfall in view.pitfalls:
        console.print(Text(f"! {pitfall}", style="yellow"))
    console.print(Text("\nlaunch:"))
    console.out(view.command, highlight=False)  # whole on one line, to be copied
