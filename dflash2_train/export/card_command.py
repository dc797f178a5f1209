"""``dflash2-export card FOLDER --evaluation report.json …``: evaluations go into a drafter, its card is made anew."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dflash2_train.config import absolute


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The words of the command line."""
    parser = argparse.ArgumentParser(
        prog="dflash2-export card", description="Add evaluations to an exported drafter and render its card again."
    )
    parser.add_argument(
        "folder", type=Path, help="exported drafter; README.md, PROVENANCE.txt and run.json are renewed"
    )
    parser.add_argument(
        "--evaluation", type=Path, nargs="+", default=[], metavar="REPORT", help="report.json files of dflash2-eval"
    )
    parser.add_argument("--repo-id", metavar="OWNER/NAME", help="name the drafter so in the serving commands")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Run the sub-command and return its exit code."""
    words = parse(argv)
    from dflash2_train.export.rewrite import rewrite_papers

    folder = absolute(str(words.folder))
    reports = [absolute(str(path)) for path in words.evaluation]
    added = rewrite_papers(folder, reports, repo_id=words.repo_id)
    sys.stdout.write(f"model card rendered anew, {len(added)} evaluations added: {folder}\n")
    return 0
