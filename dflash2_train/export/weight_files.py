"""The weights of a published folder: one ``model.safetensors``, or shards with an index; read one tensor at a time.

Beside the drafter's own tensors a folder may carry *tables*: an input embedding and an output head of its own.

    embed_tokens.weight, lm_head.weight    [V, H] each

vLLM and the llama.cpp converter take them in place of the target's, SGLang, the reference and this project's runner
never do. So a table is either equal to the target's, which changes nothing, or differs in the one row of the mask
token, which for the readers of ``mask_embedding.pt`` changes nothing either.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open
from torch import Tensor

from dflash2_train.export.payload import WEIGHTS
from dflash2_train.export.tensor_file import TensorFile
from dflash2_train.model.drafter_config import EMBEDDING, HEAD
from dflash2_train.provenance import WEIGHT_INDEX as INDEX

if TYPE_CHECKING:
    from dflash2_train.model.drafter_config import DrafterShape

__all__ = ["EMBEDDING", "HEAD", "INDEX", "TABLES", "FoundWeights", "WeightFiles", "read_tensor", "table_shapes"]
TABLES = (EMBEDDING, HEAD)


def table_shapes(shape: DrafterShape) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the optional tables."""
    return dict.fromkeys(TABLES, (shape.vocab_size, shape.hidden_size))


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Where a tensor lies and what its file says of it."""

    file: Path
    dtype: str  # safetensors' name of it
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that is wrong with the files: in a line of a list, and as an error of its own."""

    short: str
    text: str


class FoundWeights:
    """What stands in the weight files of ``folder``, whatever is wrong with them.

    Attributes:
        files: the weight files that belong to the drafter, be they there or not.
        open_files: those of them that could be read, by path.
        tensors: every tensor that was found, in whichever file.
        unreadable: a fault for each file that is missing, empty, cut or damaged.
        index_faults: a fault for each way in which the index and its files disagree.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: list[Path] = []
        self.open_files: dict[Path, TensorFile] = {}
        self.tensors: dict[str, StoredTensor] = {}
        self.unreadable: list[Fault] = []
        self.index_faults: list[Fault] = []
        listed = self._read_index(folder / INDEX) if (folder / INDEX).exists() else None
        names = [WEIGHTS] if listed is None else sorted(set(listed.values()))
        self.files = [folder / name for name in names]
        for path in self.files:
            self._enter(path)
        if listed is not None:
            self._compare(listed)

    def _read_index(self, path: Path) -> dict[str, str] | None:
        """Tensor name -> file name, or None (and a fault) if the index is no such list."""
        try:
            listed = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
            named = {str(name): str(file) for name, file in listed.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            short = f"{INDEX}: no readable weight_map ({type(error).__name__}: {error})"
            self.index_faults.append(Fault(short=short, text=f"{path}: has no weight_map. Export the drafter again."))
            return None
        if not named:
            text = f"{path}: has no weight_map. Export the drafter again."
            self.index_faults.append(Fault(short=f"{INDEX}: an empty weight_map", text=text))
            return None
        outside = sorted({file for file in named.values() if Path(file).name != file})
        if outside:  # a path out of the folder is no shard of this drafter, and is not opened
            text = f"{path}: names files outside its folder: {', '.join(outside)}. Export the drafter again."
            shorts = [f"{INDEX} names {file}, which is no file name in this folder" for file in outside]
            self.index_faults += [Fault(short=short, text=text) for short in shorts]
            return None
        return named

    def _enter(self, path: Path) -> None:
        try:
            file = TensorFile(path)
        except ValueError as error:
            short = str(error).split(". ")[0] if path.exists() else f"{path.name}: no such file"
            self.unreadable.append(Fault(short=short, text=str(error)))
            return
        self.open_files[path] = file
        for name, (dtype, shape) in file.header.items():
            if name in self.tensors:
                first = self.tensors[name].file.name
                text = f"{path}: {name} stands in {first} too. Export the drafter again."
                self.index_faults.append(Fault(short=f"{name} stands in {first} and in {path.name}", text=text))
            self.tensors[name] = StoredTensor(file=path, dtype=dtype, shape=shape)

    def _compare(self, listed: Mapping[str, str]) -> None:
        found = {name: tensor.file.name for name, tensor in self.tensors.items()}
        wrong = sorted(name for name in listed.keys() | found.keys() if listed.get(name) != found.get(name))
        text = (
            f"{self.folder / INDEX}: does not say what the files hold: {', '.join(wrong[:5])}"
            f"{' …' if len(wrong) > 5 else ''}. Readers of the index miss tensors; export the drafter again."
        )
        read = {path.name for path in self.open_files}
        for name in wrong:
            if name not in listed:
                short = f"{name} stands in {found[name]}, but not in {INDEX}"
            elif listed[name] in read:
                short = f"{INDEX} says that {name} stands in {listed[name]}, but it does not"
            else:  # its file cannot be read, which is said already
                continue
            self.index_faults.append(Fault(short=short, text=text))


class WeightFiles:
    """Which tensor stands in which file of ``folder``, and reading each by itself; nothing about them may be wrong.

    Nothing is mapped or kept: memory is that of the tensor asked for.

    Raises:
        ValueError: no weights, a missing or cut file, or an index that does not list exactly what its files hold; the
            text names file and tensors.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        index = self.folder / INDEX
        if index.exists() and (self.folder / WEIGHTS).exists():
            raise ValueError(
                f"{index}: stands beside {WEIGHTS}, and readers differ in which they take. Remove one of them."
            )
        found = FoundWeights(self.folder)
        for fault in (*found.index_faults, *found.unreadable):
            raise ValueError(fault.text)
        self.paths = found.files
        self.header = {name: (tensor.dtype, tensor.shape) for name, tensor in found.tensors.items()}
        self._tensors = found.tensors

    def path_of(self, name: str) -> Path:
        """The file that holds a tensor.

        Raises:
            KeyError: there is no such tensor.
        """
        return self._tensors[name].file

    def __getitem__(self, name: str) -> Tensor:
        """The tensor as stored, a copy of its own on the CPU.

        Raises:
            KeyError: there is no such tensor.
            ValueError: its file went away or was damaged meanwhile.
        """
        return read_tensor(self.path_of(name), name)


def read_tensor(path: Path, name: str) -> Tensor:
    """One tensor of a safetensors file, read rather than mapped: the file may be replaced afterwards.

    Raises:
        ValueError: the file or the tensor cannot be read.
    """
    try:
        with safe_open(path, framework="pt", backend="pread") as file:
            tensor: Tensor = file.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: {name} cannot be read ({error}). Copy the file anew or make it again.") from error
    return tensor
