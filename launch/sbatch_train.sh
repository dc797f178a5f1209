#!/usr/bin/env bash
# Trains on several nodes of a Slurm cluster. The command itself writes the job's script into the run folder and hands
# it to sbatch; what stands in it, and why, is told in launch/README.md.
#
#   bash launch/sbatch_train.sh --nodes 4 --partition gpu +experiment=glm53_flash
#   bash launch/sbatch_train.sh --nodes 4 --dry-run +experiment=glm53_flash
#
#   --nodes N         1
#   --gpus N          of a node (8)
#   --time LIMIT      of one start (04:00:00); a run that takes longer is queued again by itself
#   --partition NAME  the cluster's default
#   --account NAME    yours
#   --dry-run         print the command and the script; write and submit nothing
# Further words go to dflash2-train as they are.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

slurm=(launch=slurm) words=() dry=0
while [ $# -gt 0 ]; do
    case "$1" in
        --nodes) slurm+=("launch.slurm.nodes=${2:?--nodes needs a number}"); shift 2 ;;
        --gpus) slurm+=("launch.slurm.gpus_per_node=${2:?--gpus needs a number}"); shift 2 ;;
        --time) slurm+=("launch.slurm.time='${2:?--time needs a limit}'"); shift 2 ;;
        --partition) slurm+=("launch.slurm.partition=${2:?--partition needs a name}"); shift 2 ;;
        --account) slurm+=("launch.slurm.account=${2:?--account needs a name}"); shift 2 ;;
        --dry-run) slurm+=(launch.dry_run=true); dry=1; shift ;;
        --*) echo "sbatch_train.sh: unknown option $1" >&2; exit 2 ;;
        *) words+=("$1"); shift ;;
    esac
done
[ ${#words[@]} -gt 0 ] || { echo "sbatch_train.sh: name an experiment, as +experiment=glm53_flash" >&2; exit 2; }

command=(.venv/bin/dflash2-train "${words[@]}" "${slurm[@]}")
if [ "$dry" = 1 ]; then
    printf '%q ' "${command[@]}"
    echo
fi
exec "${command[@]}"
