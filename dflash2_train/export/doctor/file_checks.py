"""The weight files of a folder: present, whole, and the only ones."""

from __future__ import annotations

from collections.abc import Iterator

from dflash2_train.export.doctor.findings import READERS, SERVERS, VLLM, WARNING
from dflash2_train.export.doctor.opened import DRAFTER_CHECKS, OpenedDrafter

check = DRAFTER_CHECKS.check


@check(
    "weights-file",
    group="files",
    rule="model.safetensors, or the shards that its index names, are there and whole",
    servers=READERS,
    next_step="Copy the file anew or export again",
)
def _weights_file(drafter: OpenedDrafter) -> Iterator[str]:
    yield from drafter.weights.unreadable


@check(
    "weights-index",
    group="files",
    rule="the index and the shards list the same tensors",
    servers=READERS,
    next_step="Take index and shards from one export",
)
def _weights_index(drafter: OpenedDrafter) -> Iterator[str]:
    yield from drafter.weights.index_faults


@check(
    "second-weights",
    group="files",
    rule="no second set of weights stands beside the first",
    servers=SERVERS,
    next_step="Remove it: loaders take every such file, or prefer one of them",
)
def _second_weights(drafter: OpenedDrafter) -> Iterator[str]:
    if drafter.folder is None:
        return
    known = {path.name for path in drafter.weights.files}
    for path in sorted(drafter.folder.iterdir()):
        if path.suffix in (".safetensors", ".bin", ".pth") and path.name not in known:
            yield f"{path.name} is a weights file that does not belong to this drafter"


@check(
    "code-files",
    group="files",
    severity=WARNING,
    rule="a drafter is data: no code comes with it",
    servers=(VLLM,),
    next_step="Remove it unless you know why it is there; no server needs it",
)
def _code_files(drafter: OpenedDrafter) -> Iterator[str]:
    if drafter.folder is not None:
        yield from (f"{path.name} is a program" for path in sorted(drafter.folder.glob("*.py")))
