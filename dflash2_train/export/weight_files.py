"""The weights of a published folder: one ``model.safetensors``, or shards with an index; read one tensor at a time.

Beside the drafter's own tensors a folder may carry *tables*: an input embedding and an output head of its own.

    embed_tokens.weight, lm_head.weight    [V, H] each

vLLM and the llama.cpp converter take them in place of the target's, SGLang, the reference and this project's runner
never do. So a table is either equal to the target's, which changes nothing, or differs in the one row of the mask
token, which for the readers of ``mask_embedding.pt`` changes nothing either.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open
from torch import Tensor

from dflash2_train.export.payload import WEIGHTS, read_header, read_json

if TYPE_CHECKING:
    from dflash2_train.model.drafter_config import DrafterShape

INDEX = "model.safetensors.index.json"
EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
TABLES = (EMBEDDING, HEAD)


def table_shapes(shape: DrafterShape) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the optional tables."""
    return dict.fromkeys(TABLES, (shape.vocab_size, shape.hidden_size))


class WeightFiles:
    """Which tensor stands in which file of ``folder``, and reading each by itself.

    Nothing is mapped or kept: memory is that of the tensor asked for.

    Raises:
        ValueError: no weights, a missing or cut file, or an index that does not list exactly what its files hold; the
            text names file and tensors.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        indexed = _read_index(self.folder)
        names = sorted(set(indexed.values())) if indexed is not None else [WEIGHTS]
        self.paths = [self.folder / name for name in names]
        self.header: dict[str, tuple[str, tuple[int, ...]]] = {}  # name -> (safetensors dtype name, shape)
        self._path: dict[str, Path] = {}
        for path in self.paths:
            for name, entry in read_header(path).items():
                if name in self._path:
                    raise ValueError(f"{path}: {name} stands in {self._path[name].name} too. Export the drafter again.")
                self.header[name], self._path[name] = entry, path
        if indexed is not None:
            self._refuse_other_index(indexed)

    def _refuse_other_index(self, indexed: Mapping[str, str]) -> None:
        found = {name: path.name for name, path in self._path.items()}
        wrong = sorted(name for name in indexed.keys() | found.keys() if indexed.get(name) != found.get(name))
        if wrong:
            raise ValueError(
                f"{self.folder / INDEX}: does not say what the files hold: {', '.join(wrong[:5])}"
                f"{' …' if len(wrong) > 5 else ''}. Readers of the index miss tensors; export the drafter again."
            )

    def __getitem__(self, name: str) -> Tensor:
        """The tensor as stored, a copy of its own on the CPU.

        Raises:
            KeyError: there is no such tensor.
            ValueError: its file went away or was damaged meanwhile.
        """
        return read_tensor(self._path[name], name)


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


def _read_index(folder: Path) -> dict[str, str] | None:
    """Tensor -> file name of a sharded folder; None for one file."""
    path = folder / INDEX
    if not path.exists():
        return None
    if (folder / WEIGHTS).exists():
        raise ValueError(f"{path}: stands beside {WEIGHTS}, and readers differ in which they take. Remove one of them.")
    listed = read_json(path).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise ValueError(f"{path}: has no weight_map. Export the drafter again.")
    outside = sorted({str(file) for file in listed.values() if Path(str(file)).name != file})
    if outside:
        raise ValueError(f"{path}: names files outside its folder: {', '.join(outside)}. Export the drafter again.")
    return {str(name): str(file) for name, file in listed.items()}
