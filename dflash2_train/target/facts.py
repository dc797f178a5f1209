"""What a target's own files state, held against the shapes that the experiment declares.

So a wrong folder stops before anything is computed. The text part of a multimodal configuration is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash2_train.config import ConfigError, TargetConfig
from dflash2_train.provenance import hash_model_folder
from dflash2_train.target.files import CONFIG_FILE, first_line, is_local, metadata_folder, read_json

if TYPE_CHECKING:
    from transformers import PretrainedConfig

GENERATION_FILE = "generation_config.json"
_NORM_EPS_KEYS = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_eps")


@dataclass(frozen=True, kw_only=True)
class TargetInfo:
    """What the target's own files state. Everything is filled by :func:`open_target_config`."""

    hidden_size: int  # H
    num_layers: int
    vocab_size: int  # V
    max_position_embeddings: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]  # of generation_config.json first, then of config.json, without repeats
    pad_token_id: int | None
    license: str  # as declared
    target_hash: str  # hex sha256, see ``provenance.hash_model_folder``
    tie_word_embeddings: bool = False  # the head is the embedding
    final_norm_eps: float | None = None
    rope_theta: float | None = None  # of full attention, where layer types differ
    revision: str | None = None  # the commit behind a Hub id; None for a local folder


def open_target_config(target: TargetConfig) -> TargetInfo:
    """Read the target's configuration and check it against the declared shapes.

    Raises:
        ConfigError: no such folder or Hub id, no or an unreadable ``config.json``, or a stated value that differs from
            the declared one, is missing, or contradicts another.
    """
    folder = metadata_folder(target)
    raw = read_json(folder / CONFIG_FILE)
    config, text = _transformers_configs(target, folder)
    raw_text = _raw_text_section(raw, config, text)
    shapes = {
        "hidden_size": _stated(text, "hidden_size", folder),
        "num_layers": _stated(text, "num_hidden_layers", folder),
        "vocab_size": _stated(text, "vocab_size", folder),
    }
    for key, stated in shapes.items():
        declared = vars(target)[key]
        if stated != declared:
            raise ConfigError(
                f"target.{key}={declared}: {folder / CONFIG_FILE} states {stated}. "
                "Correct the declaration or point target.name at the model it describes."
            )
    generation = read_json(folder / GENERATION_FILE) if (folder / GENERATION_FILE).is_file() else {}
    layers = (generation, raw_text, raw)
    return TargetInfo(
        **shapes,
        max_position_embeddings=_stated(text, "max_position_embeddings", folder),
        bos_token_id=_first_id(layers, "bos_token_id"),
        eos_token_ids=_eos_ids(layers, folder),
        pad_token_id=_first_id(layers, "pad_token_id"),
        license=target.license,
        target_hash=hash_model_folder(folder),
        tie_word_embeddings=bool(config.tie_word_embeddings),
        final_norm_eps=next((float(raw_text[key]) for key in _NORM_EPS_KEYS if key in raw_text), None),
        rope_theta=_rope_theta(raw_text, folder),
        revision=None if is_local(target) else folder.name,
    )


def _transformers_configs(target: TargetConfig, folder: Path) -> tuple[PretrainedConfig, PretrainedConfig]:
    """The configuration and its text part (the same object for a text model)."""
    from transformers import AutoConfig

    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(str(folder), trust_remote_code=target.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"target.name={target.name!r}: {folder / CONFIG_FILE} does not load: {first_line(error)}. A model with "
            "code of its own needs target.trust_remote_code=true; a newer architecture a newer transformers."
        ) from error
    return config, config.get_text_config(decoder=True)


def _raw_text_section(raw: dict[str, Any], config: PretrainedConfig, text: PretrainedConfig) -> dict[str, Any]:
    """The part of the file that ``text`` was made from. The object has defaults filled in, the file says what is so."""
    sections = (value for key, value in raw.items() if isinstance(value, dict) and config.__dict__.get(key) is text)
    return next(sections, raw)


def _stated(text: PretrainedConfig, key: str, folder: Path) -> int:
    if not hasattr(text, key):
        raise ConfigError(f"{folder / CONFIG_FILE}: no {key}. The target must be a decoder with this key.")
    return int(getattr(text, key))


def _first_id(layers: tuple[dict[str, Any], ...], key: str) -> int | None:
    return next((int(layer[key]) for layer in layers if isinstance(layer.get(key), int)), None)


def _eos_ids(layers: tuple[dict[str, Any], ...], folder: Path) -> tuple[int, ...]:
    found: dict[int, None] = {}
    for layer in layers:
        stated = layer.get("eos_token_id")
        ids = stated if isinstance(stated, list) else [] if stated is None else [stated]
        found.update(dict.fromkeys(int(token) for token in ids))
    if not found:
        raise ConfigError(
            f"{folder}: neither {GENERATION_FILE} nor {CONFIG_FILE} states eos_token_id, so no answer would ever end. "
            f"Add it to {GENERATION_FILE}."
        )
    return tuple(found)


def _rope_theta(raw_text: dict[str, Any], folder: Path) -> float | None:
    """The one stated base; a missing one would silently become a library's default. None: no layer rotates."""
    stated = dict(_stated_thetas(raw_text))
    if not stated and raw_text.get("qk_rope_head_dim") == 0:
        return None
    if len(set(stated.values())) == 1:
        return next(iter(stated.values()))
    if not stated:
        raise ConfigError(
            f"{folder / CONFIG_FILE}: no rope_theta, neither at the top nor in rope_parameters, and programs fill in "
            "different defaults. Write the base that the model was trained with into rope_parameters."
        )
    raise ConfigError(
        f"{folder / CONFIG_FILE}: rope_theta is stated in different ways: {stated}. Keep the trained one."
    )


def _stated_thetas(raw_text: dict[str, Any]) -> Iterator[tuple[str, float]]:
    if raw_text.get("rope_theta") is not None:
        yield "rope_theta", float(raw_text["rope_theta"])
    for name in ("rope_parameters", "rope_scaling"):
        section = raw_text.get(name)
        if not isinstance(section, dict):
            continue
        by_type = {key: value for key, value in section.items() if isinstance(value, dict)}
        if "full_attention" in by_type:  # one base a layer type: that of full attention counts
            by_type = {"full_attention": by_type["full_attention"]}
        for key, part in by_type.items() or [("", section)]:
            if part.get("rope_theta") is not None:
                yield ".".join(filter(None, (name, key, "rope_theta"))), float(part["rope_theta"])
