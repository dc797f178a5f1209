"""``dflash2-export convert``: a drafter of another tool as one of this, and back.

dflash2-export convert owner/name drafter --target TARGET_FOLDER
dflash2-export convert drafter other --to speculators --verifier owner/target
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dflash2_train.config import DTYPES, UserError, absolute

if TYPE_CHECKING:
    from dflash2_train.export.convert.conversion import Plan

STYLE_NAMES = ("hf", "zlab", "specforge", "speculators", "angelspec")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dflash2-export convert",
        description="Converts a DFlash or DFlash 2 drafter from one tool's layout to another's. The source's is told "
        "by what is in it. What the result cannot hold is said; what would change the drafts is refused.",
        epilog="Exit codes: 0 converted, 2 refused; nothing half-written stays.",
    )
    parser.add_argument("source", help="folder, or Hub id owner/name or owner/name@revision")
    parser.add_argument("output", help="folder to make")
    parser.add_argument("--to", choices=STYLE_NAMES, default=STYLE_NAMES[0], help="default: hf, this project's own")
    parser.add_argument("--revision", help="branch, tag or commit of a source on the Hub")
    parser.add_argument("--target", help="folder or Hub id of the target: sizes, tables and the mask token's row")
    parser.add_argument("--target-revision", help="branch, tag or commit of a target on the Hub")
    parser.add_argument("--block-size", type=int, metavar="W", help="anchor included, where the source does not say")
    parser.add_argument("--num-target-layers", type=int, metavar="N", help="where neither source nor target say")
    parser.add_argument("--verifier", help="the target's name in a speculators configuration")
    parser.add_argument("--dtype", choices=DTYPES, help="default: as in the source")
    parser.add_argument("--max-shard-gib", type=_positive, metavar="GIB", help="several weights files with an index")
    parser.add_argument("--accept-losses", action="store_true", help="convert though it will draft otherwise")
    parser.add_argument("--json", action="store_true", help="one JSON document in the place of text")
    return parser


def _positive(text: str) -> float:
    """A size above 0, as export.max_shard_gib."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def main(argv: Sequence[str]) -> int:
    """Convert, say what was lost, and return the exit code."""
    options = _parser().parse_args(argv)
    from dflash2_train.export.convert.conversion import STYLES, Request, convert, plan_conversion, refuse_taken
    from dflash2_train.export.convert.style import Hints
    from dflash2_train.export.convert.target_rows import open_named_target
    from dflash2_train.export.doctor.obtain import obtain

    output = absolute(options.output)
    refuse_taken(output)
    obtained = obtain(options.source, options.revision)
    if obtained.is_gguf:
        raise UserError(
            f"{options.source}: is a GGUF, from which nothing is converted. Name the folder it was made of."
        )
    hints = Hints(block_size=options.block_size, num_target_layers=options.num_target_layers, verifier=options.verifier)
    target = open_named_target(options.target, options.target_revision) if options.target else None
    request = Request(
        to=STYLES[options.to],
        hints=hints,
        target=target,
        dtype=options.dtype,
        accept_losses=options.accept_losses,
        max_shard_gib=options.max_shard_gib,
    )
    plan = plan_conversion(obtained.path, request)
    convert(plan, output, name=obtained.name, commit=obtained.commit)
    document = _document(plan, str(options.output))
    sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=False) + "\n" if options.json else _text(document))
    return 0


def _document(plan: Plan, output: str) -> dict[str, Any]:
    """What was done, for programs."""
    return {
        "from": plan.source.style.name,
        "to": plan.request.to.name,
        "output": output,
        "generation": plan.described.generation,
        "dtype": plan.described.dtype,
        "mask_slots": plan.mask.origin,
        "losses": [asdict(loss) for loss in plan.losses],
    }


def _text(document: dict[str, Any]) -> str:
    """What was done, for people."""
    lines = [
        f"{document['from']} -> {document['to']}: {document['output']} "
        f"(DFlash {document['generation']}, {document['dtype']}; mask slots: {document['mask_slots']})"
    ]
    for loss in document["losses"]:
        mark = "CHANGES THE DRAFTS" if loss["drafts"] else "said"
        lines.append(f"  {mark}: {loss['what']}: {loss['text']}")
    return "\n".join(lines) + "\n"
