"""The export that ``export.format`` asks for, by one function for trainer and command line."""

from __future__ import annotations

from pathlib import Path

from dflash2_train.config import RunConfig
from dflash2_train.export.run import export_checkpoint


def export_drafter(config: RunConfig) -> Path:
    """Export and return the folder: of the published drafter, or of the GGUF files made from it.

    Raises:
        UserError: as :func:`export_checkpoint` and ``gguf_export.export_gguf``.
    """
    if config.export.format == "gguf":
        from dflash2_train.export.gguf_export import export_gguf

        return export_gguf(config)
    return export_checkpoint(config)
