"""``dflash2-export pull REPO_ID``: fetch a drafter from the Hub at a pinned commit, every hash checked."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dflash2_train.config import absolute


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The words of the command line."""
    parser = argparse.ArgumentParser(
        prog="dflash2-export pull",
        description="Fetch a drafter from the Hugging Face Hub. The revision is resolved to a commit, every file is "
        "checked, and pulled.json records both. A pull that was cut is continued by the same command.",
    )
    parser.add_argument("repo_id", help="owner/name")
    parser.add_argument("--revision", help="branch, tag or commit (default: the newest of main)")
    parser.add_argument("--to", type=Path, metavar="DIR", help="folder to make (default: the repository's name, here)")
    parser.add_argument(
        "--without-record", action="store_true", help="also take a drafter that dflash2-export did not write"
    )
    parser.add_argument("--endpoint", help="of another Hub than the usual one")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Run the sub-command and return its exit code."""
    words = parse(argv)
    from dflash2_train.export.hub.pull import pull

    folder = absolute(str(words.to or Path(words.repo_id).name))
    done = pull(
        words.repo_id,
        folder,
        revision=words.revision,
        without_record=words.without_record,
        endpoint=words.endpoint,
    )
    if done.was_there:
        sys.stdout.write(f"{done.folder} holds commit {done.commit} already, unchanged\n")
        return 0
    if done.skipped:
        sys.stdout.write(f"not fetched, since run.json does not list them: {', '.join(done.skipped)}\n")
    sys.stdout.write(
        f"{done.num_files} files, all hashes agree: {done.folder}\ncommit {done.commit}\n"
        f"check it for a server with: dflash2-export doctor {done.folder}\n"
    )
    return 0
