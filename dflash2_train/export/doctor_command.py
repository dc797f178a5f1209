"""``dflash2-export doctor``: is this drafter, ours or anyone's, fit to serve?

dflash2-export doctor runs/smollm2_cpu/export --target targets/SmolLM2-135M-Instruct
dflash2-export doctor owner/name@revision --json
dflash2-export doctor drafter.gguf
dflash2-export doctor FOLDER --serve vllm
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from dflash2_train.app import open_console
from dflash2_train.config import UserError

if TYPE_CHECKING:
    from dflash2_train.export.doctor.obtain import Obtained
    from dflash2_train.export.doctor.report import AnyExamination
    from dflash2_train.export.doctor.serve import ServingView
    from dflash2_train.export.doctor.target_facts import TargetFacts

SERVER_CHOICES = ("vllm", "sglang", "llama.cpp")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dflash2-export doctor",
        description="Checks a DFlash or DFlash 2 drafter for what servers get wrong, most of it silently.",
        epilog="Exit codes: 0 no error, 1 an error (with --strict: or a warning), 2 nothing could be checked.",
    )
    parser.add_argument("drafter", help="folder, .gguf file, or Hub id owner/name or owner/name@revision")
    parser.add_argument("--revision", help="branch, tag or commit of a Hub id; the commit is reported")
    parser.add_argument("--target", help="folder or Hub id of the target: its sizes, tokenizer and rows are compared")
    parser.add_argument("--target-revision", help="branch, tag or commit of a target on the Hub")
    parser.add_argument("--json", action="store_true", help="one JSON document in the place of tables")
    parser.add_argument("--strict", action="store_true", help="a warning fails as well")
    parser.add_argument("--serve", choices=SERVER_CHOICES, help="what this server makes of it, and its launch command")
    parser.add_argument(
        "--proposals", type=int, metavar="N", help="tokens to propose; default: as run.json says, else block_size - 1"
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Check the named drafter, print table or JSON, and return the exit code."""
    options = _parser().parse_args(argv)
    from dflash2_train.export.doctor.obtain import obtain
    from dflash2_train.export.doctor.report import document, exit_code, show

    obtained = obtain(options.drafter, options.revision)
    examination, view = _examined(obtained, options)
    if options.json:
        json.dump(document(obtained, examination, view, target=options.target), sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        show(open_console(), obtained, examination, view)
    return exit_code(examination, strict=options.strict)


def _examined(obtained: Obtained, options: argparse.Namespace) -> tuple[AnyExamination, ServingView | None]:
    from dflash2_train.export.doctor.target_facts import open_target

    target = open_target(options.target, options.target_revision) if options.target else None
    look = _examined_gguf if obtained.is_gguf else _examined_folder
    examination, view = look(obtained, options, target)
    if options.serve and view is None:
        missing = f"what {options.serve} makes of it: the configuration has no block size"
        examination = replace(examination, not_checked=[*examination.not_checked, missing])
    return examination, view


def _examined_folder(
    obtained: Obtained, options: argparse.Namespace, target: TargetFacts | None
) -> tuple[AnyExamination, ServingView | None]:
    from dflash2_train.export.doctor.examine import examine
    from dflash2_train.export.doctor.serve import CHOICES, proposals_finding, serving_view

    examination = examine(obtained.path, target=target)
    drafter = examination.subject
    if drafter is None:
        return examination, None
    examination = examination.adding(proposals_finding(drafter.block_size, options.proposals))
    if not options.serve:
        return examination, None
    return examination, serving_view(
        drafter,
        CHOICES[options.serve],
        examination.findings,
        name=obtained.name,
        target=options.target,
        proposals=options.proposals,
    )


def _examined_gguf(
    obtained: Obtained, options: argparse.Namespace, target: TargetFacts | None
) -> tuple[AnyExamination, ServingView | None]:
    from dflash2_train.export.doctor.gguf_checks import examine_gguf
    from dflash2_train.export.doctor.serve import gguf_view, proposals_finding

    if options.serve not in (None, "llama.cpp"):
        raise UserError(f"--serve {options.serve}: reads no GGUF. Use --serve llama.cpp, or name the drafter's folder.")
    examination = examine_gguf(obtained.path, target=target)
    gguf = examination.subject
    if gguf is None:
        return examination, None
    examination = examination.adding(proposals_finding(gguf.number("block_size"), options.proposals))
    if not options.serve:
        return examination, None
    return examination, gguf_view(gguf, examination.findings, name=obtained.name, proposals=options.proposals)
