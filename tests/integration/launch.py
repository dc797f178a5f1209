"""Starting a module as one process a rank, as a launcher would."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence


def rank_environments(ranks: int) -> list[dict[str, str]]:
    """Environment of each rank; a single one starts plainly, without rank variables."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    environments = []
    for rank in range(ranks):
        own = dict(os.environ, OMP_NUM_THREADS="1")
        if ranks > 1:
            own.update(
                RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=port
            )
        environments.append(own)
    return environments


def start_ranks_of(module: str, arguments: Sequence[str], ranks: int) -> list[subprocess.Popen[str]]:
    """Processes of ``python -m module arguments``, one a rank."""
    command = [sys.executable, "-m", module, *arguments]
    return [
        subprocess.Popen(command, env=own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for own in rank_environments(ranks)
    ]
