"""The target's folder: where it is, which tokens end an answer, single tensors out of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash2_train.config import ConfigError, TargetConfig, absolute
from dflash2_train.provenance import WEIGHT_INDEX

if TYPE_CHECKING:
    from torch import Tensor

NORM_NAMES = ("model.norm.weight", "model.language_model.norm.weight", "language_model.model.norm.weight")
HEAD_NAMES = (
    "lm_head.weight",
    "language_model.lm_head.weight",
    "model.lm_head.weight",
    "model.language_model.lm_head.weight",
)
EMBEDDING_NAMES = (
    "model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
)


def find_target(target: TargetConfig) -> Path:
    """The local folder, or the Hub snapshot of ``target.name`` at ``target.revision`` (downloaded whole).

    Raises:
        ConfigError: there is none; says how to make or name one.
    """
    folder = absolute(target.name)
    if (folder / "config.json").is_file():
        return folder
    if folder.exists() or target.setup or target.name.count("/") != 1 or target.name.startswith((".", "/", "~")):
        hint = f"Make it with: {target.setup}" if target.setup else "Name a Hugging Face folder or a Hub id."
        raise ConfigError(f"target.name={target.name!r}: {folder} is no model folder (no config.json). {hint}")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(target.name, revision=target.revision))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"target.name={target.name!r}, target.revision={target.revision!r}: neither a folder nor to be had from "
            f"the Hub ({type(error).__name__}). Check name, network and access."
        ) from error


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return value


def text_config(folder: Path) -> dict[str, Any]:
    """``config.json``, or the text part of a multimodal one."""
    raw = _json(folder / "config.json")
    text: dict[str, Any] = raw.get("text_config", raw)
    return text


def model_config(folder: Path) -> dict[str, Any]:
    """The text part of the configuration with the defaults of its class filled in, as a plain dict.

    Files leave out what equals a default (Gemma's cap, a tied head), so the file alone would mislead. A model type that
    transformers does not know, or code of the model's own, is read from the file alone.
    """
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    raw = _json(folder / "config.json")
    if raw.get("model_type") not in CONFIG_MAPPING_NAMES:
        return {**raw, **text_config(folder)}
    whole = AutoConfig.from_pretrained(str(folder))
    text: dict[str, Any] = whole.get_text_config(decoder=True).to_dict()
    text["tie_word_embeddings"] = whole.tie_word_embeddings  # a multimodal model ties at the top
    return text


def end_ids(folder: Path) -> list[int]:
    """Ids that end an answer, sorted: those of the generation settings and of the model's configuration.

    Raises:
        ConfigError: none is stated, so every answer would run into the token limit.
    """
    found: set[int] = set()
    for part in (_json(folder / "generation_config.json"), text_config(folder), _json(folder / "config.json")):
        stated = part.get("eos_token_id")
        found.update(stated if isinstance(stated, list) else [] if stated is None else [stated])
    if not found:
        raise ConfigError(f"{folder}: no eos_token_id stated, so no answer would ever end. Add generation_config.json.")
    return sorted(found)


def load_first_tensor(folder: Path, names: tuple[str, ...]) -> Tensor | None:
    """The first of ``names`` that the folder's safetensors hold, on the CPU; None if there is none."""
    from safetensors import safe_open

    index = _json(folder / WEIGHT_INDEX).get("weight_map", {})
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            present = set(file.keys()) if not index else {name for name, place in index.items() if place == path.name}
            for name in names:
                if name in present:
                    tensor: Tensor = file.get_tensor(name)
                    return tensor
    return None
