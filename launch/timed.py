"""Run one stage of a pipeline, measure it, and keep the measurement.

``python launch/timed.py --stage train --record runs/x/stages.jsonl -- COMMAND ...`` runs COMMAND, passes signals
on, ends with its exit code, and appends one JSON line: seconds of wall time and peak resident memory in GiB.
``python launch/timed.py --table runs/x/stages.jsonl`` prints the last line of every stage as a table.

Peak memory is that of the command and everything it started: once a second the resident sizes of the whole
process tree are added up (pages that processes share count once for each), and the largest sum is kept, or the
kernel's own high-water mark of one process where that is larger. It is null on systems without /proc.
Needs the standard library only, so that it costs the stage nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

SAMPLE_SECONDS = 1.0
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def process_tree(root: int) -> list[int]:
    """Process ids of ``root`` and all its living descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            # Fields after the command's closing bracket: state, parent, ...
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError, ValueError):  # it ended while we looked
            continue
        children.setdefault(parent, []).append(int(entry.name))
    found = [root]
    for process in found:  # grows while we walk it
        found.extend(children.get(process, []))
    return found


def resident_kib(process: int) -> tuple[int, int]:
    """Resident size now and at its highest, KiB; zeros for a process that has ended."""
    now = highest = 0
    try:
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                now = int(line.split()[1])
            elif line.startswith("VmHWM:"):
                highest = int(line.split()[1])
    except OSError:
        pass
    return now, highest


def sample_peak_kib(root: int, peak: int) -> int:
    """``peak`` or the tree's present size, whichever is larger."""
    sizes = [resident_kib(process) for process in process_tree(root)]
    return max([peak, sum(now for now, _ in sizes), *(highest for _, highest in sizes)])


def run_timed(command: list[str]) -> tuple[int, float, float | None]:
    """Run ``command``; return exit code (128 + signal if killed), seconds and peak GiB."""
    started = time.monotonic()
    # A process group of its own: Ctrl-C reaches this process alone, which hands it over exactly once.
    child = subprocess.Popen(command, process_group=0)

    def pass_on(number: int, frame: FrameType | None) -> None:
        if child.poll() is None:
            child.send_signal(number)

    for number in PASSED_ON:
        signal.signal(number, pass_on)
    peak = 0
    while True:
        peak = sample_peak_kib(child.pid, peak)
        try:
            code = child.wait(timeout=SAMPLE_SECONDS)
        except subprocess.TimeoutExpired:
            continue
        break
    seconds = time.monotonic() - started
    return (code if code >= 0 else 128 - code), seconds, (peak / 2**20 if peak else None)


def append_line(path: Path, row: dict[str, object]) -> None:
    """Append one JSON line in a single write."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def format_gib(peak: object) -> str:
    """Peak memory for people."""
    return f"{peak:.1f} GiB" if isinstance(peak, float) else "unknown"


def format_seconds(seconds: float) -> str:
    """Seconds below two minutes, else minutes and seconds."""
    return f"{seconds:.1f} s" if seconds < 120 else f"{int(seconds) // 60} min {int(seconds) % 60:02d} s"


def format_table(path: Path) -> str:
    """Last measurement of every stage, in the order of first appearance."""
    last: dict[str, dict[str, object]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        last[row["stage"]] = row
    lines = [f"{'stage':<12}{'time':>16}{'peak memory':>16}{'exit':>6}"]
    for stage, row in last.items():
        seconds = float(str(row["seconds"]))
        peak = format_gib(row["peak_rss_gib"])
        lines.append(f"{stage:<12}{format_seconds(seconds):>16}{peak:>16}{row['exit_code']!s:>6}")
    total = sum(float(str(row["seconds"])) for row in last.values())
    lines.append(f"{'total':<12}{format_seconds(total):>16}")
    return "\n".join(lines)


def main() -> int:
    """Parse the command line and run or report."""
    parser = argparse.ArgumentParser(description="Measure one stage of a pipeline, or show the measurements.")
    parser.add_argument("--stage", help="name of the stage")
    parser.add_argument("--record", type=Path, help="JSON-lines file that the measurement is appended to")
    parser.add_argument("--table", type=Path, help="print the measurements of this file and stop")
    parser.add_argument("command", nargs="*", help="after --: the command and its words")
    options = parser.parse_args()
    if options.table:
        print(format_table(options.table))
        return 0
    if not (options.stage and options.record and options.command):
        parser.error("--stage, --record and a command after -- are needed")
    print(f"[{options.stage}] {' '.join(options.command)}", flush=True)
    code, seconds, peak = run_timed(options.command)
    append_line(
        options.record,
        {
            "stage": options.stage,
            "seconds": round(seconds, 2),
            "peak_rss_gib": None if peak is None else round(peak, 3),
            "exit_code": code,
            "ended_utc": datetime.now(UTC).isoformat(timespec="seconds"),
            "cores": os.cpu_count(),
            "command": [Path(options.command[0]).name, *options.command[1:]],
        },
    )
    outcome = "done" if code == 0 else f"failed with exit code {code}"
    print(f"[{options.stage}] {outcome} after {format_seconds(seconds)}, peak {format_gib(peak)}", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
