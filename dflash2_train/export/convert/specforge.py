"""SpecForge drafters: the published layout, with keys of its own in ``dflash_config``.

    attention_mode, attention_modes   gqa or mha are this drafter; mla and kda are others
    projector_type                    set by its Domino and DSpark drafters, which have further heads
    shift_label                       slots that predict the token after their own
    pure_draft_prefix_len             slots that see no context

Its DFlash 1 class reads block_size at the top level alone. ``save_pretrained`` leaves embedding and head out.
Facts: sgl-project/SpecForge ``specforge/modeling/draft/{dflash,dflash2}.py``, ``specforge/export/to_hf.py``.
"""

from __future__ import annotations

from typing import Any

from dflash2_train.export.convert.style import LAYOUT, Config, ConvertError, Described, Hints, Seen, Style
from dflash2_train.export.convert.zlab import publish_layout

OWN_KEYS = ("attention_mode", "attention_modes", "projector_type", "shift_label", "pure_draft_prefix_len")
THIS_ATTENTION = ("gqa", "mha")


def recognises(seen: Seen) -> bool:
    """The published layout, with a key that SpecForge alone reads."""
    return seen.is_published and any(key in seen.nested for key in OWN_KEYS)


def publish(config: Config, hints: Hints) -> dict[str, Any]:
    """The published configuration, once its own keys say nothing that this drafter does not compute."""
    nested = config["dflash_config"]
    modes = nested.get("attention_modes", [nested.get("attention_mode", "gqa")])
    ordinary = {
        "attention_mode(s)": all(str(mode).lower() in THIS_ATTENTION for mode in modes),
        "projector_type": nested.get("projector_type") is None,
        "shift_label": not nested.get("shift_label"),
        "pure_draft_prefix_len": not nested.get("pure_draft_prefix_len"),
    }
    other = [key for key, holds in ordinary.items() if not holds]
    if other:
        stated = {key: nested[key] for key in OWN_KEYS if key in nested}
        raise ConvertError(
            f"dflash_config: {', '.join(other)} of {stated}: another drafter than DFlash or DFlash 2, which has "
            f"attention {' or '.join(THIS_ATTENTION)} and none of the rest. It cannot be converted."
        )
    plain = {key: value for key, value in nested.items() if key not in OWN_KEYS}
    return publish_layout({**config, "dflash_config": plain}, hints)


def configure(described: Described, _hints: Hints) -> dict[str, Any]:
    """The published configuration with the attention named as SpecForge does."""
    published = described.published
    return {**published, "dflash_config": {**published["dflash_config"], "attention_mode": THIS_ATTENTION[0]}}


STYLE = Style(
    name="specforge",
    title="SpecForge",
    marks=f"{LAYOUT}, and one of {', '.join(OWN_KEYS)} in dflash_config",
    recognises=recognises,
    publish=publish,
    configure=configure,
    is_layout=True,
)
