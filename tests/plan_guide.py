"""Write the plans of the large experiments into the planner's guide: ``python -m tests.plan_guide``.

What stands between the markers is what ``dflash2-train +experiment=NAME plan=true`` prints; a test keeps it current.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

from hydra import compose, initialize_config_dir
from rich.console import Console

from dflash2_train.app import register_schema
from dflash2_train.config import load_config
from dflash2_train.planning.command import show
from dflash2_train.planning.report import make_training_plan
from dflash2_train.provenance import atomic_write_text

ROOT = Path(__file__).resolve().parents[1]
GUIDE = ROOT / "dflash2_train" / "planning" / "README.md"
LARGE = ("glm53_flash", "glm53_flash_swa", "glm53", "qwen3_8b")
BEGIN, END = "<!-- plans: python -m tests.plan_guide -->\n", "<!-- end of plans -->\n"
WIDTH = 118


def plan_text(experiment: str) -> str:
    """What the command prints on a console of ``WIDTH`` columns."""
    register_schema()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = load_config(compose("config", [f"+experiment={experiment}"]))
    text = io.StringIO()
    show(make_training_plan(config), Console(file=text, width=WIDTH, force_terminal=False, color_system=None))
    return "".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())


def plans() -> str:
    """The block of the guide."""
    parts = [f"### `{name}`\n\n```text\n{plan_text(name)}```\n" for name in LARGE]
    return "\n".join(parts)


def with_plans(guide: str) -> str:
    """The guide with its block made anew."""
    before, rest = guide.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{plans()}\n{END}{after}"


def main() -> int:
    """Rewrite the guide."""
    atomic_write_text(GUIDE, with_plans(GUIDE.read_text(encoding="utf-8")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
