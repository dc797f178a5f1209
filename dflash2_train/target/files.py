"""Where a target lies, a folder or a Hub id of which only what is asked for is fetched; and its tensors by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from dflash2_train.config import ConfigError, TargetConfig, absolute
from dflash2_train.provenance import WEIGHT_INDEX, safetensors_header

CONFIG_FILE = "config.json"
DECODER_PREFIXES = ("model.", "model.language_model.", "language_model.model.", "language_model.")
HEAD_NAMES = (
    "lm_head.weight",
    "language_model.lm_head.weight",
    "model.lm_head.weight",
    "model.language_model.lm_head.weight",
)
_HUB_METADATA = ["*.json", "*.jinja", "*.model", "*.txt", "*.py"]


class TargetTensors:
    """Single tensors of a target by name, out of one safetensors file or an indexed set, without building the model."""

    def __init__(self, target: TargetConfig) -> None:
        self._target = target
        self._folder = metadata_folder(target)
        self._files = self._name_to_file()

    @property
    def names(self) -> list[str]:
        """All tensor names, sorted."""
        return sorted(self._files)

    def __getitem__(self, name: str) -> Tensor:
        """The tensor as stored, on the CPU, a copy of its own.

        Raises:
            KeyError: the target has no such tensor.
        """
        from safetensors import safe_open

        with safe_open(self.path_of(name), framework="pt", device="cpu") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor.clone()  # not a view of the mapped file, which may be replaced

    def path_of(self, name: str) -> Path:
        """The safetensors file that holds the tensor, for readers who take it in pieces.

        Raises:
            KeyError: the target has no such tensor.
        """
        if name not in self._files:
            raise KeyError(f"{self._target.name} has no tensor {name}")
        return self._locate(self._files[name])

    def decoder_prefix(self) -> str:
        """What stands before ``embed_tokens.weight``, ``layers.`` and ``norm.weight`` in the target's names.

        Raises:
            ConfigError: none of the known prefixes fits; lists the names that might be the embedding.
        """
        for prefix in DECODER_PREFIXES:
            if f"{prefix}embed_tokens.weight" in self._files:
                return prefix
        raise self.not_found("embedding", tuple(f"{prefix}embed_tokens.weight" for prefix in DECODER_PREFIXES), "embed")

    def head_name(self) -> str | None:
        """Name of a stored output head, or None where there is none."""
        return next((name for name in HEAD_NAMES if name in self._files), None)

    def not_found(self, what: str, expected: tuple[str, ...], part: str) -> ConfigError:
        """The error for a tensor under none of the ``expected`` names; lists those that contain ``part``."""
        similar = [name for name in self.names if part in name][:10] or self.names[:10]
        return ConfigError(
            f"target.name={self._target.name!r}: no {what} among its tensors. "
            f"Known names: {', '.join(expected)}. Found: {', '.join(similar) or 'none'}."
        )

    def _name_to_file(self) -> dict[str, str]:
        if (self._folder / WEIGHT_INDEX).is_file():
            listed = read_json(self._folder / WEIGHT_INDEX)["weight_map"]
            return {str(name): str(file) for name, file in listed.items()}
        paths = sorted(self._folder.glob("*.safetensors"))
        if not paths and not is_local(self._target):
            paths = [self._locate("model.safetensors")]
        if not paths:
            raise ConfigError(
                f"target.name={self._target.name!r}: {self._folder} holds no .safetensors file. "
                + (setup_hint(self._target) or "Convert the weights to safetensors.")
            )
        headers = ((path.name, json.loads(safetensors_header(path))) for path in paths)
        return {name: file for file, header in headers for name in header if name != "__metadata__"}

    def _locate(self, file: str) -> Path:
        """Path of a weight file; one that a Hub id has not got here yet is fetched alone."""
        path = self._folder / file
        if path.is_file() or is_local(self._target):
            return path
        from huggingface_hub import hf_hub_download

        try:
            return Path(hf_hub_download(self._target.name, file, revision=self._folder.name))
        except (OSError, ValueError) as error:
            raise hub_error(self._target, error) from error


def metadata_folder(target: TargetConfig) -> Path:
    """The folder with config and tokenizer: the local one, or the Hub cache's, fetched without weights.

    Raises:
        ConfigError: there is none.
    """
    if not is_local(target):
        from huggingface_hub import snapshot_download

        try:
            fetched = snapshot_download(target.name, revision=target.revision, allow_patterns=_HUB_METADATA)
        except (OSError, ValueError) as error:
            raise hub_error(target, error) from error
        return Path(fetched)
    folder = absolute(target.name)
    if not folder.is_dir():
        raise ConfigError(
            f"target.name={target.name!r}: no folder {folder}. "
            + (setup_hint(target) or "Give the path of a model folder or a Hub id as owner/name.")
        )
    if not (folder / CONFIG_FILE).is_file():
        raise ConfigError(
            f"target.name={target.name!r}: {folder} holds no {CONFIG_FILE}. "
            + (setup_hint(target) or "Point it at a Hugging Face model folder.")
        )
    return folder


def is_local(target: TargetConfig) -> bool:
    """A folder that exists, or a name that cannot be or is not meant as a Hub id."""
    name = target.name
    return absolute(name).is_dir() or bool(target.setup) or name.startswith((".", "/", "~")) or name.count("/") != 1


def setup_hint(target: TargetConfig) -> str:
    """The command that makes a target that is not there; empty where none is known."""
    return f"Make it with: {target.setup}" if target.setup else ""


def hub_error(target: TargetConfig, error: Exception) -> ConfigError:
    """The error for what the Hub did not give."""
    return ConfigError(
        f"target.name={target.name!r}, target.revision={target.revision!r}: no such folder here, and the Hub did not "
        f"give it: {first_line(error)}. Check name, revision, network and access, or use a local folder."
    )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ConfigError: not readable, or no object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not readable as JSON: {first_line(error)}. Fetch the file again.") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: holds {type(value).__name__}, not an object. Fetch the file again.")
    return value


def first_line(error: Exception) -> str:
    """The first line of what an error says, without its full stop."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
