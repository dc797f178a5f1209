"""``dflash2-export doctor``: is this drafter fit to serve?"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dflash2-export doctor", description=__doc__)
    parser.add_argument("drafter", type=Path, help="folder of a drafter")
    return parser


def main(argv: Sequence[str]) -> int:
    """Check the named drafter and print the findings; 1 if any is an error, else 0."""
    options = _parser().parse_args(argv)
    from dflash2_train.export.doctor import ERROR, check_folder

    findings = check_folder(options.drafter)
    sys.stdout.write("".join(f"{finding}\n" for finding in findings) or "clean\n")
    return int(any(finding.severity == ERROR for finding in findings))
