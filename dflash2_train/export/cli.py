"""``dflash2-export``: a training checkpoint becomes a folder that vLLM, SGLang and this project's runner load.

``dflash2-export doctor FOLDER`` and its like are sub-commands, see :mod:`dflash2_train.export.commands`.
"""

from __future__ import annotations

import logging
import sys

from dflash2_train.app import run_app
from dflash2_train.config import RunConfig
from dflash2_train.export.commands import PROGRAM, dispatch

logger = logging.getLogger(__name__)


def export(config: RunConfig) -> int:
    """Export what ``config.export`` says and return the exit code."""
    from dflash2_train.export.formats import export_drafter

    folder = export_drafter(config)
    if config.export.format == "hf":
        from dflash2_train.export.rewrite import add_found_reports

        for name in add_found_reports(config, folder):
            logger.info("the run's evaluation is in the card now (%s)", name)
    logger.info("serve-ready drafter: %s", folder)
    return 0


def main() -> None:
    """Entry of the console script ``dflash2-export``."""
    code = dispatch(sys.argv[1:])
    if code is not None:
        sys.exit(code)
    run_app(PROGRAM, export)


if __name__ == "__main__":
    main()
