"""What no tensor of ours takes: interpreter, libraries, and memory that allocators hold without using it.

On a CPU measured by ``python -m tests.bench.bench_planner``, on a GPU assumed (nothing has run there).
"""

from __future__ import annotations

from dflash2_train.planning.setting import Setting
from dflash2_train.planning.timeline import ALWAYS, MOMENTS, Item, Timeline

MIB = 2**20
CPU_IMPORTS = 560 * MIB
CPU_KERNELS = 100 * MIB
CPU_SLACK = 0.1
GPU_CONTEXT = 1024 * MIB
GPU_COLLECTIVES = 1024 * MIB
GPU_SLACK = 0.08
GROUP = "libraries"


def library_items(setting: Setting, tensors: Timeline) -> list[Item]:
    """Lines of the table; the slack of an allocator is a share of what comes and goes within a step."""
    return [*_fixed(setting), *_slack(setting, tensors)]


def _fixed(setting: Setting) -> list[Item]:
    if setting.device == "cpu":
        return [
            Item(group=GROUP, name="interpreter and libraries", size=CPU_IMPORTS, basis="measured"),
            Item(group=GROUP, name="prepared kernels and heap", size=CPU_KERNELS, basis="measured"),
        ]
    collectives = GPU_COLLECTIVES if setting.ranks > 1 else 0
    return [
        Item(group=GROUP, name="CUDA context and libraries", size=GPU_CONTEXT, basis="assumed"),
        Item(group=GROUP, name="buffers of collectives", size=collectives, basis="assumed"),
    ]


def _slack(setting: Setting, tensors: Timeline) -> list[Item]:
    share = CPU_SLACK if setting.device == "cpu" else GPU_SLACK
    basis = "measured" if setting.device == "cpu" else "assumed"
    items = []
    for moment in MOMENTS:
        passing = sum(item.size for item in tensors.at(moment) if item.moments != ALWAYS)
        items.append(
            Item(group=GROUP, name="held by the allocator", size=int(share * passing), moments=(moment,), basis=basis)
        )
    return items
