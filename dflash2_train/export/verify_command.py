"""``dflash2-export verify-provenance FOLDER``: every recorded hash of an exported drafter computed anew.

Exit code 0 when all of it holds, 1 when something differs or is missing, 2 when there is nothing to verify.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from dflash2_train.config import absolute

if TYPE_CHECKING:
    from dflash2_train.export.verify import Check


def show(checks: Sequence[Check]) -> None:
    """The checks as a table on stdout."""
    from rich.table import Table

    from dflash2_train.app import open_console
    from dflash2_train.export.verify import BAD, SAME

    console = open_console()
    rows = Table(title="provenance", title_justify="left", title_style="bold")
    for name in ("what", "recorded", "found", "verdict"):
        rows.add_column(name, overflow="fold")
    for check in checks:
        style = "red" if check.verdict in BAD else "green" if check.verdict == SAME else "yellow"
        rows.add_row(check.what, check.recorded[:16], check.found[:16], f"[{style}]{check.verdict}[/]")
    console.print(rows)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The words of the command line."""
    parser = argparse.ArgumentParser(
        prog="dflash2-export verify-provenance",
        description="Compute every recorded hash of an exported drafter anew. Exit code 1 when one does not hold.",
    )
    parser.add_argument("folder", type=Path, help="exported drafter")
    parser.add_argument("--target", type=Path, help="folder of the target, hashed too")
    parser.add_argument("--json", action="store_true", help="print the checks as JSON in place of a table")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Run the sub-command and return its exit code."""
    words = parse(argv)
    from dflash2_train.export.verify import BAD, SAME, verify

    folder = absolute(str(words.folder))
    checks = verify(folder, None if words.target is None else absolute(str(words.target)))
    failed = [check for check in checks if check.verdict in BAD]
    if words.json:
        value = {
            "folder": folder.name,
            "holds": not failed,
            "checks": [asdict(check) for check in checks],
        }
        sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
    else:
        show(checks)
        same = sum(check.verdict == SAME for check in checks)
        sys.stdout.write(f"{same} of {len(checks)} hold, {len(failed)} do not\n")
    return 1 if failed else 0
