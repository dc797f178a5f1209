#!/usr/bin/env bash
# Serves a target with vLLM, to regenerate answers from, or as the plain baseline of an evaluation.
#
#   bash launch/serve_target.sh zai-org/GLM-5.3-Flash --tp 4 --port 8000 --devices 0,1,2,3
#   bash launch/serve_target.sh targets/SmolLM2-135M-Instruct --dry-run -- --max-model-len 2048
#
#   --tp N          GPUs that the target is divided over (1)
#   --port N        8000
#   --devices LIST  GPUs, as CUDA_VISIBLE_DEVICES takes them (all)
#   --name NAME     under which it is served: data.servers.model (the target as given)
#   --dry-run       print the command
#   -- WORDS        go to vllm serve as they are
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() { sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0" >&2; exit 2; }

target='' tp=1 port=8000 devices='' name='' dry=0
while [ $# -gt 0 ]; do
    case "$1" in
        --tp) tp=${2:?--tp needs a number}; shift 2 ;;
        --port) port=${2:?--port needs a number}; shift 2 ;;
        --devices) devices=${2:?--devices needs a list}; shift 2 ;;
        --name) name=${2:?--name needs a name}; shift 2 ;;
        --dry-run) dry=1; shift ;;
        --) shift; break ;;
        -*) echo "serve_target.sh: unknown option $1" >&2; usage ;;
        *) [ -z "$target" ] || usage; target=$1; shift ;;
    esac
done
[ -n "$target" ] || usage

command=(.venv/bin/vllm serve "$target" --served-model-name "${name:-$target}"
    --tensor-parallel-size "$tp" --port "$port" "$@")
[ -z "$devices" ] || command=(env "CUDA_VISIBLE_DEVICES=$devices" "${command[@]}")
if [ "$dry" = 1 ]; then
    printf '%q ' "${command[@]}"
    echo
    exit
fi
exec "${command[@]}"
