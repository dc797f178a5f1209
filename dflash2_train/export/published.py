"""A drafter in the published layout, of DFlash 2 or of DFlash 1, from this tool or another, opened for reading.

    DFlash 2    ``DFlash2DraftModel``, sizes of convolution and selector in ``dflash_config``, 6 + 15 L tensors
    DFlash 1    ``DFlashDraftModel``, neither convolution nor selector

Some writers keep a ``model.`` prefix or store the codebooks as embeddings; names are given as they are published.
Tensors are read one at a time.

Letters: H hidden size, L drafter layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from dflash2_train.export.payload import CONFIG, MASK, read_json, read_mask_embedding, tensor_faults
from dflash2_train.export.weight_files import TABLES, WeightFiles, table_shapes
from dflash2_train.model.drafter import Drafter
from dflash2_train.model.drafter_config import ARCHITECTURE, DrafterShape

FIRST_ARCHITECTURE = "DFlashDraftModel"  # the method's first version: no convolution, no selector
SECOND_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
SECOND_TENSORS = ("attention_conv", "mlp_conv", "candidate_selector")
NO_SECOND = (1, 1, 1, 2)  # stands in for SECOND_KEYS where there are none; the tensors they shape are left out
Header = Mapping[str, tuple[str, tuple[int, ...]]]  # tensor -> (safetensors dtype name, shape)


@dataclass(frozen=True, kw_only=True)
class PublishedDrafter:
    """A folder whose tensors are those of its configuration."""

    shape: DrafterShape
    generation: int  # 1 or 2
    files: WeightFiles
    names: dict[str, str]  # published name -> name in the files, of exactly the drafter's tensors
    tables: dict[str, str]  # the same of an embedding and a head of its own
    mask: Tensor | None  # [H]; None: there is no file, so the target's row of shape.mask_token_id

    def read(self, name: str) -> Tensor:
        """A tensor by its published name, as stored."""
        return self.files[self.names[name]]


def open_published(folder: Path, second: Mapping[str, int]) -> PublishedDrafter:
    """Open a folder in the published layout, in one file or in shards.

    Args:
        folder: with ``config.json`` and the weights; ``mask_embedding.pt`` if it was trained with one.
        second: sizes (``SECOND_KEYS``) that a DFlash 1 is given for the parts that it lacks.

    Raises:
        ValueError: a tensor is missing, unexpected, quantised or of another shape than ``config.json`` asks for, or
            that file asks for something that this drafter does not compute.
    """
    files = WeightFiles(folder)
    names = by_published_name(files.header)
    config = read_json(folder / CONFIG)
    generation = generation_of(config, names)
    shape = DrafterShape.from_published(config if generation == 2 else completed(config, second))
    return drafter_in(files, names, shape, generation)


def drafter_in(files: WeightFiles, names: Mapping[str, str], shape: DrafterShape, generation: int) -> PublishedDrafter:
    """The drafter of a folder whose configuration has been read.

    Args:
        files: of the folder, which may also have a ``mask_embedding.pt``.
        names: published name -> name in the files.
        shape: that the tensors must have.
        generation: 1 or 2.

    Raises:
        ValueError: as :func:`refuse_tensors`, or no mask vector of this drafter.
    """
    refuse_tensors({name: files.header[stored] for name, stored in names.items()}, shape, generation)
    mask, path = None, files.folder / MASK
    if path.exists():
        mask = read_mask_embedding(path, hidden_size=shape.hidden_size, mask_token_id=shape.mask_token_id)
    return PublishedDrafter(
        shape=shape,
        generation=generation,
        files=files,
        names={name: stored for name, stored in names.items() if name not in TABLES},
        tables={name: stored for name, stored in names.items() if name in TABLES},
        mask=mask,
    )


def published_name(name: str) -> str:
    """Published name of a tensor whose writer kept a ``model.`` prefix or stored the codebooks as embeddings."""
    return name.removeprefix("model.").replace("_codebook.weight", "_codebook")


def by_published_name(stored: Iterable[str]) -> dict[str, str]:
    """Published name -> stored name.

    Raises:
        ValueError: two tensors have one published name.
    """
    names: dict[str, str] = {}
    for name in stored:
        own = published_name(name)
        if own in names:
            raise ValueError(f"{names[own]} and {name} are both {own}. Remove the one that does not belong there.")
        names[own] = name
    return names


def is_second_generation(name: str) -> bool:
    """Whether a tensor is of convolution or selector."""
    return any(part in name for part in SECOND_TENSORS)


def generation_of(config: Mapping[str, Any], names: Iterable[str]) -> int:
    """2 where configuration or tensors speak of convolution or selector, so that half a DFlash 2 is no DFlash 1."""
    nested = config.get("dflash_config") or {}
    named = ARCHITECTURE in (config.get("architectures") or []) or any(key in nested for key in SECOND_KEYS)
    return 2 if named or any(map(is_second_generation, names)) else 1


def completed(config: Mapping[str, Any], second: Mapping[str, int]) -> dict[str, Any]:
    """The ``config.json`` of a DFlash 1, with what a DFlash 2 adds and what its readers take for granted.

    Full attention is bidirectional inside a block where ``is_causal`` is absent; sliding layers are not, so there the
    key stays required.
    """
    num_layers = int(config.get("num_hidden_layers", 0))
    layer_types = config.get("layer_types") or ["full_attention"] * num_layers
    nested = config.get("dflash_config") or {}
    full = set(layer_types) == {"full_attention"}
    assumed = {"is_causal": False, "use_sliding_window": False} if full else {}
    return {
        **assumed,
        **{key: value for key, value in config.items() if value is not None},
        "architectures": [ARCHITECTURE],
        "layer_types": layer_types,
        "dflash_config": {**nested, **{key: second[key] for key in SECOND_KEYS}},
    }


def shape_of(config: Mapping[str, Any], names: Iterable[str] = ()) -> tuple[DrafterShape, int]:
    """A drafter's shape and its generation.

    A DFlash 1 gets the smallest convolution and selector that there are; a fresh :class:`Drafter` has them as exact
    no-ops, so it computes what the DFlash 1 computes and its selector walks the best unary token of each slot.

    Args:
        config: published ``config.json``.
        names: of the tensors, which also tell the generation.

    Raises:
        ValueError: as :meth:`DrafterShape.from_published`.
    """
    generation = generation_of(config, names)
    whole = int(config.get("hidden_size") or 1)  # one kernel for all channels
    smallest = dict(zip(SECOND_KEYS, (1, whole, 1, 2), strict=True))
    return DrafterShape.from_published(config if generation == 2 else completed(config, smallest)), generation


def expected_tensors(shape: DrafterShape, generation: int) -> dict[str, tuple[int, ...]]:
    """Published name -> shape of a drafter's tensors; of a DFlash 1 without those that it lacks."""
    expected = Drafter.expected_tensors(shape)
    return {name: size for name, size in expected.items() if generation == 2 or not is_second_generation(name)}


def refuse_tensors(header: Header, shape: DrafterShape, generation: int) -> None:
    """Raise ValueError unless ``header``, by published names, has the drafter's tensors and no more than tables."""
    tables = {name: size for name, size in table_shapes(shape).items() if name in header}
    faults = tensor_faults(dict(header), {**expected_tensors(shape, generation), **tables})
    if faults:
        listed = "\n  ".join(faults)
        raise ValueError(f"its weights are not those of its {CONFIG}:\n  {listed}\nFetch it again, or use another one.")
