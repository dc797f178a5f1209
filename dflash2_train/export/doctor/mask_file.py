"""``mask_embedding.pt`` as found: whatever it holds is described, and nothing in it is run.

The strict reading that this project loads a drafter with is ``payload.read_mask_embedding``.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# What a damaged pickle or archive makes torch's restricted reader raise, beside its own UnpicklingError.
DAMAGED = (RuntimeError, EOFError, ValueError, KeyError, IndexError, AttributeError, TypeError)


@dataclass(frozen=True, kw_only=True)
class MaskFile:
    """What the file holds: exactly one of ``vector``, ``unusable`` and ``code`` is set."""

    vector: Tensor | None = None  # as stored, any shape
    unusable: str = ""  # why there is no vector in it
    code: str = ""  # the object that only running code could make
    is_dict: bool = False
    stored_id: int | None = None  # mask_token_id beside the vector


def read_mask_file(path: Path) -> MaskFile | None:
    """Look into the file without running anything; None if there is none."""
    if not path.exists():
        return None
    try:
        payload = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        text = str(error)
        at = text.lower().find("global")
        if at >= 0:
            return MaskFile(code=text[at:].split("\n")[0].split(" was not")[0].split(" whose")[0])
        return MaskFile(unusable="it is no file of torch.save")
    except DAMAGED as error:
        return MaskFile(unusable=f"it cannot be read ({type(error).__name__})")
    return _described(payload)


def _described(payload: object) -> MaskFile:
    if isinstance(payload, Tensor):
        return MaskFile(vector=payload.detach())
    if not isinstance(payload, dict):
        return MaskFile(unusable=f"it holds a {type(payload).__name__}")
    vector, stored = payload.get("embedding"), payload.get("mask_token_id")
    if not isinstance(vector, Tensor):
        keys = ", ".join(sorted(map(repr, payload)))
        return MaskFile(unusable=f"it holds a dict with the keys {keys} and no tensor under 'embedding'")
    if isinstance(stored, Tensor) and stored.numel() == 1:
        stored = stored.item()
    return MaskFile(vector=vector.detach(), is_dict=True, stored_id=stored if isinstance(stored, int) else None)
