"""The frozen target: what its folder states, its embedding and output head, the model and the tokenizer.

A target is a Hugging Face folder or a Hub id. :func:`open_target_config` reads its ``config.json`` and holds it against
the shapes that the experiment declares, so that a wrong folder stops before anything is computed. The text part of a
multimodal configuration is taken. :class:`FrozenHead` reads two or three tensors straight out of the safetensors
files: training needs embedding and head, not the target. ``transformers`` and the Hub client load on first use.

Letters: V vocabulary (rows of the embedding), H hidden.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dflash2_train.config import ConfigError, TargetConfig, absolute
from dflash2_train.pretrained import load_pretrained
from dflash2_train.provenance import WEIGHT_INDEX, hash_model_folder, safetensors_header

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "tiktoken.model")
DECODER_PREFIXES = ("model.", "model.language_model.", "language_model.model.", "language_model.")
HEAD_NAMES = (
    "lm_head.weight",
    "language_model.lm_head.weight",
    "model.lm_head.weight",
    "model.language_model.lm_head.weight",
)
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_HUB_METADATA = ["*.json", "*.jinja", "*.model", "*.txt", "*.py"]
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
    raw = _read_json(folder / CONFIG_FILE)
    config, text = _transformers_configs(target, folder)
    raw_text = _raw_text_section(raw, config, text)
    shapes = {
        "hidden_size": _stated(text, "hidden_size", folder),
        "num_layers": _stated(text, "num_hidden_layers", folder),
        "vocab_size": _stated(text, "vocab_size", folder),
    }
    for key, stated in shapes.items():
        declared = getattr(target, key)
        if stated != declared:
            raise ConfigError(
                f"target.{key}={declared}: {folder / CONFIG_FILE} states {stated}. "
                "Correct the declaration or point target.name at the model it describes."
            )
    generation = _read_json(folder / GENERATION_FILE) if (folder / GENERATION_FILE).is_file() else {}
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
        revision=None if _is_local(target) else folder.name,
    )


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
            listed = _read_json(self._folder / WEIGHT_INDEX)["weight_map"]
            return {str(name): str(file) for name, file in listed.items()}
        paths = sorted(self._folder.glob("*.safetensors"))
        if not paths and not _is_local(self._target):
            paths = [self._locate("model.safetensors")]
        if not paths:
            raise ConfigError(
                f"target.name={self._target.name!r}: {self._folder} holds no .safetensors file. "
                + (_setup_hint(self._target) or "Convert the weights to safetensors.")
            )
        headers = ((path.name, json.loads(safetensors_header(path))) for path in paths)
        return {name: file for file, header in headers for name in header if name != "__metadata__"}

    def _locate(self, file: str) -> Path:
        """Path of a weight file; one that a Hub id has not got here yet is fetched alone."""
        path = self._folder / file
        if path.is_file() or _is_local(self._target):
            return path
        from huggingface_hub import hf_hub_download

        try:
            return Path(hf_hub_download(self._target.name, file, revision=self._folder.name))
        except (OSError, ValueError) as error:
            raise _hub_error(self._target, error) from error


@dataclass(eq=False)
class FrozenHead:
    """The target's embedding and output head. Plain tensors, no module: engines neither shard, cast nor save them."""

    embedding: Tensor  # [V, H]
    head: Tensor  # [V, H]; the very same tensor as the embedding where the target ties them
    final_norm_weight: Tensor | None = None  # [H]; None where the target's final norm has another name

    @classmethod
    def load(cls, target: TargetConfig, *, dtype: str | torch.dtype, device: torch.device | str = "cpu") -> FrozenHead:
        """Read the tensors out of the target's safetensors files.

        Args:
            target: folder or Hub id; of the latter only the files that hold these tensors are fetched.
            dtype: to hold them in.
            device: to hold them on.

        Raises:
            ConfigError: a tensor is missing, quantised, of another shape than declared, or the tie flag contradicts
                the stored head.
        """
        info, tensors = open_target_config(target), TargetTensors(target)
        prefix = tensors.decoder_prefix()
        embedding = _table(tensors, f"{prefix}embed_tokens.weight", target)
        head = _resolve_head(info, tensors, embedding, target)
        norm_name = f"{prefix}norm.weight"
        norm = tensors[norm_name] if norm_name in tensors.names else None
        return cls(embedding, head, norm).to(device, torch_dtype(dtype))

    @property
    def tied(self) -> bool:
        """Whether head and embedding are one tensor."""
        return self.head is self.embedding

    def to(self, device: torch.device | str, dtype: torch.dtype) -> FrozenHead:
        """Move and cast in place; a tied head stays the same tensor. Returns this object."""
        tied = self.tied
        self.embedding = self.embedding.detach().to(device, dtype)
        self.head = self.embedding if tied else self.head.detach().to(device, dtype)
        if self.final_norm_weight is not None:
            self.final_norm_weight = self.final_norm_weight.detach().to(device, dtype)
        return self


def load_target_model(
    target: TargetConfig, dtype: str | torch.dtype | None = None, *, device: torch.device | str = "cpu"
) -> PreTrainedModel:
    """The whole target for plain forwards: evaluation mode, no gradients.

    Args:
        target: folder or Hub id.
        dtype: of the weights; None is ``target.dtype``.
        device: to run on; "auto" spreads the layers over all visible GPUs.

    Raises:
        ConfigError: as :func:`open_target_config`, which is asked first.
    """
    info = open_target_config(target)
    return load_pretrained(
        str(absolute(target.name)) if _is_local(target) else target.name,
        torch_dtype(target.dtype if dtype is None else dtype),
        device=device,
        revision=info.revision,
        trust_remote_code=target.trust_remote_code,
    )


def load_tokenizer(target: TargetConfig) -> PreTrainedTokenizerBase:
    """The target's tokenizer.

    Raises:
        ConfigError: the folder holds no tokenizer, or one with more tokens than the embedding has rows.
    """
    from transformers import AutoTokenizer

    folder = metadata_folder(target)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(
            f"target.name={target.name!r}: {folder} holds no tokenizer (none of {', '.join(TOKENIZER_FILES)}). "
            + (_setup_hint(target) or "Copy the tokenizer files of the model into the folder.")
        )
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=target.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"target.name={target.name!r}: its tokenizer does not load: {_first_line(error)}. "
            "A tokenizer with code of its own needs target.trust_remote_code=true."
        ) from error
    if len(tokenizer) > target.vocab_size:
        raise ConfigError(
            f"target.vocab_size={target.vocab_size}: the tokenizer in {folder} has {len(tokenizer)} tokens. "
            "Tokenizer and weights are of different models."
        )
    return tokenizer


def torch_dtype(name: str | torch.dtype) -> torch.dtype:
    """``bfloat16`` or ``float32`` as torch's own; a torch dtype stays as it is."""
    if isinstance(name, torch.dtype):
        return name
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]


def _resolve_head(info: TargetInfo, tensors: TargetTensors, embedding: Tensor, target: TargetConfig) -> Tensor:
    """The embedding itself where tied; stored tensors and the flag must tell the same story."""
    name = tensors.head_name()
    if name is None:
        if info.tie_word_embeddings:
            return embedding
        raise tensors.not_found("output head (and tie_word_embeddings is false)", HEAD_NAMES, "head")
    head = _table(tensors, name, target)
    if not info.tie_word_embeddings:
        return head
    if torch.equal(head, embedding):
        return embedding
    raise ConfigError(
        f"target.name={target.name!r}: tie_word_embeddings is true, yet {name} differs from the embedding, and readers "
        f"disagree on which of them counts. Set the flag to false in {CONFIG_FILE} or remove the tensor."
    )


def _table(tensors: TargetTensors, name: str, target: TargetConfig) -> Tensor:
    """A [V, H] tensor of the target in a plain float dtype."""
    table = tensors[name]
    expected = (target.vocab_size, target.hidden_size)
    if tuple(table.shape) != expected or table.dtype not in _FLOATS:
        raise ConfigError(
            f"target.name={target.name!r}: {name} is {table.dtype} {list(table.shape)}, expected {list(expected)} "
            "(target.vocab_size, target.hidden_size) in a plain float dtype. "
            "Use a folder whose embedding and head are not quantised."
        )
    return table


def _is_local(target: TargetConfig) -> bool:
    """A folder that exists, or a name that cannot be or is not meant as a Hub id."""
    name = target.name
    return absolute(name).is_dir() or bool(target.setup) or name.startswith((".", "/", "~")) or name.count("/") != 1


def metadata_folder(target: TargetConfig) -> Path:
    """The folder with config and tokenizer: the local one, or the Hub cache's, fetched without weights.

    Raises:
        ConfigError: there is none.
    """
    if not _is_local(target):
        from huggingface_hub import snapshot_download

        try:
            fetched = snapshot_download(target.name, revision=target.revision, allow_patterns=_HUB_METADATA)
        except (OSError, ValueError) as error:
            raise _hub_error(target, error) from error
        return Path(fetched)
    folder = absolute(target.name)
    if not folder.is_dir():
        raise ConfigError(
            f"target.name={target.name!r}: no folder {folder}. "
            + (_setup_hint(target) or "Give the path of a model folder or a Hub id as owner/name.")
        )
    if not (folder / CONFIG_FILE).is_file():
        raise ConfigError(
            f"target.name={target.name!r}: {folder} holds no {CONFIG_FILE}. "
            + (_setup_hint(target) or "Point it at a Hugging Face model folder.")
        )
    return folder


def _setup_hint(target: TargetConfig) -> str:
    return f"Make it with: {target.setup}" if target.setup else ""


def _hub_error(target: TargetConfig, error: Exception) -> ConfigError:
    return ConfigError(
        f"target.name={target.name!r}, target.revision={target.revision!r}: no such folder here, and the Hub did not "
        f"give it: {_first_line(error)}. Check name, revision, network and access, or use a local folder."
    )


def _transformers_configs(target: TargetConfig, folder: Path) -> tuple[PretrainedConfig, PretrainedConfig]:
    """The configuration and its text part (the same object for a text model)."""
    from transformers import AutoConfig

    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(str(folder), trust_remote_code=target.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"target.name={target.name!r}: {folder / CONFIG_FILE} does not load: {_first_line(error)}. A model with "
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


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not readable as JSON: {_first_line(error)}. Fetch the file again.") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: holds {type(value).__name__}, not an object. Fetch the file again.")
    return value


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
