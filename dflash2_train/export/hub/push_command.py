"""``dflash2-export push FOLDER REPO_ID``: an exported drafter goes to the Hub, private unless ``--public``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dflash2_train.config import absolute

if TYPE_CHECKING:
    from dflash2_train.export.hub.push import PushPlan


def show(plan: PushPlan) -> None:
    """The plan as a table on stdout."""
    from rich.table import Table

    from dflash2_train.app import open_console

    console = open_console()
    rows = Table(title=plan.message, title_justify="left", title_style="bold")
    rows.add_column("file")
    rows.add_column("bytes", justify="right")
    rows.add_column("sha256", overflow="fold")
    for file in plan.files:
        rows.add_row(file.name, f"{file.num_bytes:,}", file.sha256)
    console.print(rows)
    console.print(f"{len(plan.files)} files, {plan.num_bytes:,} bytes", highlight=False)
    if plan.left_here:
        console.print(f"not in its record, stays here: {', '.join(plan.left_here)}", highlight=False, markup=False)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The words of the command line."""
    parser = argparse.ArgumentParser(
        prog="dflash2-export push",
        description="Put an exported drafter on the Hugging Face Hub, in one commit, after doctor and hashes agree. "
        "A push that was cut is continued by the same command. The token is that of hf auth login, or HF_TOKEN.",
    )
    parser.add_argument("folder", type=Path, help="exported drafter, or folder of GGUF files")
    parser.add_argument("repo_id", help="owner/name; created if missing")
    parser.add_argument(
        "--public", action="store_true", help="for everyone to see; without it the repository is private"
    )
    parser.add_argument("--dry-run", action="store_true", help="check, list what would go, and ask nobody")
    parser.add_argument("--revision", default="main", help="branch, made if missing (default: %(default)s)")
    parser.add_argument(
        "--replace", action="store_true", help="remove other files of the repository in the same commit"
    )
    parser.add_argument("--endpoint", help="of another Hub than the usual one")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Run the sub-command and return its exit code."""
    words = parse(argv)
    from dflash2_train.export.hub.push import plan_push, push

    plan = plan_push(absolute(str(words.folder)))
    show(plan)
    if words.dry_run:
        sys.stdout.write(f"dry run: nothing was sent to {words.repo_id}\n")
        return 0
    done = push(
        plan,
        words.repo_id,
        public=words.public,
        revision=words.revision,
        replace=words.replace,
        endpoint=words.endpoint,
    )
    seen = "private" if done.private else "public"
    sys.stdout.write(f"pushed ({seen}), the Hub's hashes agree: commit {done.commit}\n{done.url}\n")
    return 0
