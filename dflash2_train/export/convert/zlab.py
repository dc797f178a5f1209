"""The layout of z-lab and incoai drafters: the published one, for readers that embed the target's row in mask slots.

Facts: z-lab/dflash ``dflash/model.py`` (it looks up every embedding in the target), ``tests/fixtures/dflash2-*.json``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash2_train.export.convert.style import (
    LAYOUT,
    TARGET_LAYERS,
    Config,
    Described,
    Hints,
    Style,
    hinted,
    refuse_unknown,
)


def publish_layout(config: Config, hints: Hints) -> dict[str, Any]:
    """A configuration in the published layout as it is, with what the user says where it does not."""
    nested = config["dflash_config"]
    refuse_unknown(nested)
    stated = {key: _stated(config, nested, key) for key in ("block_size", "num_target_layers")}
    said = {
        "block_size": hinted(stated["block_size"], hints.block_size, "block_size", "--block-size"),
        "num_target_layers": hinted(
            stated["num_target_layers"], hints.num_target_layers, "num_target_layers", TARGET_LAYERS
        ),
    }
    return {**config, **{key: value for key, value in said.items() if stated[key] is None}}


def _stated(config: Config, nested: Mapping[str, Any], key: str) -> int | None:
    value: int | None = nested[key] if nested.get(key) is not None else config.get(key)
    return value


def as_published(described: Described, _hints: Hints) -> dict[str, Any]:
    """The published configuration."""
    return dict(described.published)


STYLE = Style(
    name="zlab",
    title="z-lab and incoai",
    marks=LAYOUT,
    recognises=lambda seen: seen.is_published,
    publish=publish_layout,
    configure=as_published,
    is_layout=True,
)
