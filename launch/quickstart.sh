#!/usr/bin/env bash
# The whole pipeline on a laptop: a real 135M-parameter target answers prompts, its states are captured, a DFlash 2
# drafter is trained and exported, and held-out prompts are decoded with and without it. No GPU is needed, and the
# target's weights come with a Python package.
#
#   bash launch/quickstart.sh                                  the experiment smollm2_cpu
#   bash launch/quickstart.sh train.steps=50                   words go to every command, as they are
#   bash launch/quickstart.sh name=second_try                  another run folder, runs/second_try
#
# Interrupted? The same command continues: finished stages are recognised and unfinished ones resume.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

experiment=smollm2_cpu

bash launch/setup.sh
echo "[setup] done after $SECONDS s"
# The configuration alone knows the folder: name=, run_dir= and +scale= all change it.
run_dir=$(.venv/bin/dflash2-train "+experiment=$experiment" "$@" --cfg job --resolve | sed -n 's/^run_dir: //p')
record=$run_dir/stages.jsonl
timed() { # stage, command ...
    local stage=$1
    shift
    .venv/bin/python launch/timed.py --stage "$stage" --record "$record" -- "$@"
}

timed target bash launch/target.sh
timed gen-data .venv/bin/dflash2-gen-data "+experiment=$experiment" "$@"
timed train .venv/bin/dflash2-train "+experiment=$experiment" "$@" # exports at its end
timed eval .venv/bin/dflash2-eval "+experiment=$experiment" "$@"

echo
.venv/bin/python launch/timed.py --table "$record"
echo
echo "drafter: $run_dir/export"
echo "report:  $run_dir/eval/report.md"
