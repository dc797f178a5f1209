"""The files of an exported drafter, and reading each of them without guessing.

    config.json           published layout, everything of DFlash 2 nested in dflash_config
    model.safetensors     6 + 15 L tensors under their published names
    mask_embedding.pt     the trained mask vector, a bare tensor [H]
    README.md             model card       PROVENANCE.txt   where data, target and code come from
    run.json              the run's record and the sha256 of every other file
    evaluation-*.json     reports of dflash2-eval about these files, once there are some
    pulled.json           after a pull only: repository, commit and hashes that were fetched

H hidden size, L drafter layers.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
MASK = "mask_embedding.pt"
CARD = "README.md"
PROVENANCE = "PROVENANCE.txt"
RECORD = "run.json"
PULLED = "pulled.json"
GGUF_RECORD = "gguf.json"  # in the place of run.json, in a folder of GGUF files
ALL_FILES = (CONFIG, WEIGHTS, MASK, CARD, PROVENANCE, RECORD)
TOOL = "dflash2-train"

PLAIN_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}  # safetensors name -> torch name
MIN_MASK_NORM = 1e-3  # a trained vector has a norm near 1; an untouched reserved row can be as small as 2e-5


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        ValueError: the file is missing, is no JSON, or holds something else than an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(
            f"{path}: missing. An exported drafter has {', '.join(ALL_FILES)}; export it again."
        ) from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not readable as JSON ({error}). Export the drafter again.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: holds a JSON {type(value).__name__}, not an object. Export the drafter again.")
    return value


def read_header(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> (safetensors dtype name, shape) of every tensor in a file, without reading their data.

    Raises:
        ValueError: the file is missing, cut short or damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            return {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
    except (FileNotFoundError, SafetensorError) as error:
        raise ValueError(f"{path}: cannot be read ({error}). Copy it anew or export the drafter again.") from error


def tensor_faults(header: dict[str, tuple[str, tuple[int, ...]]], expected: dict[str, tuple[int, ...]]) -> list[str]:
    """One line for each missing, unexpected, wrongly shaped or unusually typed tensor."""
    faults = [
        f"{name}: missing, expected shape {list(expected[name])}" for name in sorted(expected.keys() - header.keys())
    ]
    faults += [f"{name}: unexpected; servers refuse or ignore it" for name in sorted(header.keys() - expected.keys())]
    for name in sorted(header.keys() & expected.keys()):
        dtype, shape = header[name]
        if shape != tuple(expected[name]):
            faults.append(f"{name}: shape {list(shape)}, expected {list(expected[name])}")
        if dtype not in PLAIN_DTYPES:
            faults.append(
                f"{name}: dtype {dtype}, expected one of {', '.join(PLAIN_DTYPES)} (quantised drafters are refused)"
            )
    return faults


def _mask_vector(payload: object, path: Path, mask_token_id: int) -> Tensor:
    """The tensor inside one of the accepted payload forms."""
    if isinstance(payload, Tensor):
        return payload.detach()
    if not isinstance(payload, dict):
        raise ValueError(f"{path}: holds a {type(payload).__name__}; expected a tensor [H] or a dict with 'embedding'.")
    vector, stored_id = payload.get("embedding"), payload.get("mask_token_id")
    if not isinstance(vector, Tensor):
        raise ValueError(f"{path}: a dict with keys {sorted(map(str, payload))}; expected a tensor under 'embedding'.")
    if stored_id is None or int(stored_id) != mask_token_id:
        raise ValueError(
            f"{path}: mask_token_id={stored_id}, but config.json says {mask_token_id}. The vector belongs to another "
            "drafter, or the configuration was edited."
        )
    return vector.detach()


def read_mask_embedding(path: Path, *, hidden_size: int, mask_token_id: int) -> Tensor:
    """The trained mask vector.

    Args:
        path: ``mask_embedding.pt``: a tensor [H] or [1, H], or a dict with such a tensor under ``embedding`` and a
            matching ``mask_token_id``.
        hidden_size: H.
        mask_token_id: the id that ``config.json`` names.

    Returns:
        Tensor [H] in the stored dtype.

    Raises:
        ValueError: missing file, another form, another length, another id, a zero or a non-finite vector.
    """
    try:
        payload = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise ValueError(
            f"{path}: missing. This drafter is trained with a mask vector of its own and drafts badly without it; "
            "copy the file too, or export the drafter again."
        ) from error
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(f"{path}: not a plain tensor file ({error}). Export the drafter again.") from error
    vector = _mask_vector(payload, path, mask_token_id)
    if tuple(vector.shape) not in ((hidden_size,), (1, hidden_size)):
        raise ValueError(
            f"{path}: shape {list(vector.shape)}, expected [{hidden_size}], the hidden size of config.json."
        )
    if not vector.is_floating_point() or vector.element_size() < 2:
        raise ValueError(f"{path}: dtype {vector.dtype}, expected bfloat16, float16 or float32.")
    vector = vector.reshape(hidden_size)  # [H] or [1, H] -> [H]
    if not bool(torch.isfinite(vector).all()):
        raise ValueError(f"{path}: holds values that are not finite. Export from an earlier checkpoint.")
    if float(vector.float().norm()) < MIN_MASK_NORM:
        raise ValueError(f"{path}: norm {float(vector.float().norm()):.2e}, so it was never trained or was zeroed.")
    return vector
