"""``dflash2-export``: a training checkpoint becomes a folder that vLLM, SGLang and this project's runner load."""

from __future__ import annotations

import logging

from dflash2_train.app import run_app
from dflash2_train.config import RunConfig

logger = logging.getLogger(__name__)


def export(config: RunConfig) -> int:
    """Export what ``config.export`` says and return the exit code."""
    from dflash2_train.export.formats import export_drafter

    folder = export_drafter(config)
    logger.info("serve-ready drafter: %s", folder)
    return 0


def main() -> None:
    """Entry of the console script ``dflash2-export``."""
    run_app("dflash2-export", export)


if __name__ == "__main__":
    main()
