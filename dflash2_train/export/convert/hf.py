"""This project's own style: the published layout with the trained mask vector in ``mask_embedding.pt``."""

from __future__ import annotations

from dflash2_train.export.convert.style import LAYOUT, Style
from dflash2_train.export.convert.zlab import as_published, publish_layout
from dflash2_train.export.payload import MASK

STYLE = Style(
    name="hf",
    title="dflash2-train",
    marks=f"{LAYOUT}, and {MASK} beside them",
    recognises=lambda seen: seen.is_published and MASK in seen.files,
    publish=publish_layout,
    configure=as_published,
    keeps_mask=True,
    is_layout=True,
)
