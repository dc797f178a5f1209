#!/usr/bin/env bash
# Serves a target with a drafter: the doctor looks at the drafter first, its --serve view gives the server's own flags,
# and with them the right number (a block of 8 is 7 for vLLM and llama.cpp and 8 for SGLang).
#
#   bash launch/serve_drafter.sh vllm runs/glm53_flash/export zai-org/GLM-5.3-Flash --tp 8
#   bash launch/serve_drafter.sh sglang runs/glm53_flash/export zai-org/GLM-5.3-Flash --tp 8
#   bash launch/serve_drafter.sh llama.cpp drafter.gguf target.gguf
#
#   --tp N            GPUs that the target is divided over (1; not for llama.cpp)
#   --port N          8000
#   --devices LIST    GPUs, as CUDA_VISIBLE_DEVICES takes them (all)
#   --block-size N    in a dry run: of a drafter that is not there yet, the anchor counted
#   --dry-run         print the commands
#   -- WORDS          go to the server as they are
#
# vLLM comes with the GPU environment. SGLang and llama.cpp need an environment of their own: PYTHON names SGLang's
# interpreter, and llama-server must be on PATH.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() { sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0" >&2; exit 2; }

places=() tp=1 port=8000 devices='' block=() dry=0
while [ $# -gt 0 ]; do
    case "$1" in
        --tp) tp=${2:?--tp needs a number}; shift 2 ;;
        --port) port=${2:?--port needs a number}; shift 2 ;;
        --devices) devices=${2:?--devices needs a list}; shift 2 ;;
        --block-size) block=(--block-size "${2:?--block-size needs a number}"); shift 2 ;;
        --dry-run) dry=1; shift ;;
        --) shift; break ;;
        -*) echo "serve_drafter.sh: unknown option $1" >&2; usage ;;
        *) places+=("$1"); shift ;;
    esac
done
[ ${#places[@]} = 3 ] || usage
server=${places[0]} drafter=${places[1]} target=${places[2]}
[ ${#block[@]} = 0 ] || [ "$dry" = 1 ] || { echo "serve_drafter.sh: --block-size is for a dry run" >&2; exit 2; }

doctor=(.venv/bin/dflash2-export doctor "$drafter" --serve "$server")
if [ "$dry" = 1 ]; then
    printf '%q ' "${doctor[@]}"
    echo
else
    "${doctor[@]}" # an error in the drafter ends here
fi
words=$(.venv/bin/python launch/serving_words.py "$server" "$drafter" "$target" --tp "$tp" --port "$port" \
    ${block[@]+"${block[@]}"})
mapfile -t command <<<"$words"
[ "${command[0]}" != vllm ] || command[0]=.venv/bin/vllm
[ "${command[0]}" != python ] || command[0]=${PYTHON:-python}
[ -z "$devices" ] || command=(env "CUDA_VISIBLE_DEVICES=$devices" "${command[@]}")
if [ "$dry" = 1 ]; then
    printf '%q ' "${command[@]}" "$@"
    echo
    exit
fi
exec "${command[@]}" "$@"
