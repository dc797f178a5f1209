"""Run on a host before a job starts there: ``python -m dflash2_train.launching.probe JOB [--port PORT]``.

Prints one JSON object: what this host sees of the job's folder, its GPUs, its versions, and whether the port is free.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

from dflash2_train.config import UserError
from dflash2_train.launching.checks import check_port, prepare_folder
from dflash2_train.launching.environment import visible_gpus
from dflash2_train.launching.job import Job


def look(path: Path, port: int | None) -> dict[str, Any]:
    """What this host has for the job of ``path``; ``fault`` names what it lacks."""
    found: dict[str, Any] = {"fault": None, "gpus": 0}
    found["versions"] = {name: importlib.metadata.version(name) for name in ("torch", "deepspeed")}
    try:
        job = Job.read(path)
        found["job_id"] = job.job_id
        prepare_folder(job.logs, "run_dir")
        if port is not None:
            check_port(port, "launch.hosts.port")
        found["gpus"] = visible_gpus()
    except UserError as error:
        found["fault"] = str(error)
    return found


def main() -> None:
    """Entry."""
    parser = argparse.ArgumentParser()
    parser.add_argument("job", type=Path)
    parser.add_argument("--port", type=int, default=None)
    options = parser.parse_args()
    sys.stdout.write(json.dumps(look(options.job, options.port)) + "\n")


if __name__ == "__main__":
    main()
