"""What no tensor of ours takes: interpreter, libraries, and memory that allocators hold without using it.

On a CPU measured by ``python -m tests.bench.bench_planner``, on a GPU assumed (nothing has run there).

The heap of a CPU process: blocks below 32 MiB come from it, and what is freed there stays with the process, since
something above it is still in use. So the activations of a step go on counting while the optimizer runs and while a
checkpoint is written, unless their tensors are larger than that; small gradients and gathered state lie there too.
"""

from __future__ import annotations

from dflash2_train.planning.activations import largest_piece, recomputed
from dflash2_train.planning.parameters import parameter_sizes
from dflash2_train.planning.setting import Setting
from dflash2_train.planning.timeline import ALWAYS, MOMENTS, SAVE, STEP, UPDATE, Item, Timeline

MIB = 2**20
FULL = 4  # bytes of fp32
CPU_IMPORTS = 270 * 10**6  # resident after all imports of a training
CPU_ENGINE = 290 * 10**6  # DeepSpeed's and oneDNN's own: process group, kernels made for the shapes, scratch
HEAP_HOLES = 0.33  # of the most that activations take there at once: free pieces between those in use
HEAP_BLOCK = 32 * MIB  # glibc's largest block of the heap (M_MMAP_THRESHOLD's upper limit)
GPU_CONTEXT = 1024 * MIB
GPU_COLLECTIVES = 1024 * MIB
GPU_SLACK = 0.08  # of what comes and goes within a step: fragments of the caching allocator
GROUP = "libraries"


def library_items(setting: Setting, tensors: Timeline) -> list[Item]:
    """Lines of the table, given all tensors."""
    if setting.device == "cpu":
        return [
            Item(group=GROUP, name="interpreter and libraries", size=CPU_IMPORTS, basis="measured"),
            Item(group=GROUP, name="engine, kernels, scratch", size=CPU_ENGINE, basis="measured"),
            *heap_items(setting, tensors),
        ]
    collectives = GPU_COLLECTIVES if setting.ranks > 1 else 0
    return [
        Item(group=GROUP, name="CUDA context and libraries", size=GPU_CONTEXT, basis="assumed"),
        Item(group=GROUP, name="buffers of collectives", size=collectives, basis="assumed"),
        *_fragments(tensors),
    ]


def heap_items(setting: Setting, tensors: Timeline) -> list[Item]:
    """What the heap takes beside a step's activations and losses, and what it keeps of them behind the step.

    With checkpointing a layer's tensors find the places of the layer before still taken, so they count twice.
    """
    if largest_piece(setting) >= HEAP_BLOCK:
        return []
    most = max(_passing(tensors, moment, groups=("activations", "loss")) for moment in STEP)
    holes = int(HEAP_HOLES * most) + recomputed(setting)
    taken = {UPDATE: _small_blocks(setting, setting.itemsize), SAVE: _small_blocks(setting, FULL)}
    left = {moment: max(0, most + holes - again) for moment, again in taken.items()}
    return [
        Item(group=GROUP, name="holes of the heap", size=holes, moments=STEP, basis="measured"),
        *(
            Item(group=GROUP, name="heap left by activations", size=size, moments=(moment,), basis="measured")
            for moment, size in left.items()
        ),
    ]


def _small_blocks(setting: Setting, itemsize: int) -> int:
    """Bytes of the parameters whose tensors, gradients or gathered state come from the heap, and find room there."""
    sizes = [itemsize * size for size in parameter_sizes(setting.shape).values()]
    return sum(size for size in sizes if size < HEAP_BLOCK)


def _passing(tensors: Timeline, moment: str, *, groups: tuple[str, ...] | None = None) -> int:
    """Bytes alive at a moment that are not alive throughout."""
    alive = tensors.at(moment)
    return sum(item.size for item in alive if item.moments != ALWAYS and (groups is None or item.group in groups))


def _fragments(tensors: Timeline) -> list[Item]:
    return [
        Item(
            group=GROUP,
            name="held by the allocator",
            size=int(GPU_SLACK * _passing(tensors, moment)),
            moments=(moment,),
            basis="assumed",
        )
        for moment in MOMENTS
    ]
