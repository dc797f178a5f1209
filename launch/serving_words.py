"""The words of a server's launch command for one drafter, a word a line; ``serve_drafter.sh`` runs them.

    python launch/serving_words.py vllm runs/NAME/export TARGET --tp 8 --port 8000

The flags that concern the drafter are those of ``dflash2-export doctor --serve``. ``--block-size`` asks for them
without looking at a drafter, which may not be there yet.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys

from dflash2_train.export.serving import serving_commands

NAMES = {"vllm": "vLLM", "sglang": "SGLang", "llama.cpp": "llama.cpp"}
DIVIDES = {"vllm": ["--tensor-parallel-size"], "sglang": ["--tp-size"], "llama.cpp": []}


def doctors_command(server: str, drafter: str) -> str:
    """The launch command of the doctor's view."""
    words = [sys.executable, "-m", "dflash2_train.export.cli", "doctor", drafter, "--serve", server, "--json"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if not done.stdout:
        sys.exit(done.stderr.strip() or f"the doctor ended with {done.returncode} and said nothing")
    view = json.loads(done.stdout)["serve"]
    if view is None:
        sys.exit(f"{drafter}: the doctor has no launch command for it; its configuration names no block size")
    command: str = view["command"]
    return command


def with_places(server: str, command: str, drafter: str, target: str) -> list[str]:
    """The command's words with the target and the drafter as given here."""
    words = shlex.split(command)
    if server == "vllm":
        words[words.index("serve") + 1] = target
    elif server == "sglang":
        words[words.index("--model-path") + 1] = target
    else:
        words[words.index("-m") + 1] = target
        words[words.index("--spec-draft-model") + 1] = drafter
    return words


def main() -> None:
    """Entry."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("server", choices=sorted(NAMES))
    parser.add_argument("drafter")
    parser.add_argument("target")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--block-size", type=int, default=None)
    options = parser.parse_args()
    if options.block_size is None:
        command = doctors_command(options.server, options.drafter)
    else:
        command = serving_commands(options.target, options.drafter, options.block_size)[NAMES[options.server]]
    words = with_places(options.server, command, options.drafter, options.target)
    for flag in DIVIDES[options.server]:
        words += [flag, str(options.tp)]
    print("\n".join([*words, "--port", str(options.port)]))


if __name__ == "__main__":
    main()
