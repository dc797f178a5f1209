#!/usr/bin/env bash
# A drafter from prompts to its measured acceptance on one node of eight GPUs: the recipe of glm53_flash on 8x B300.
#
#   bash launch/b300_8.sh --dry-run                print every command
#   bash launch/b300_8.sh                          run them; again after an interruption: finished work is recognised
#   bash launch/b300_8.sh name=second train.lr=2e-4   words go to every command, as they are
#
# 1. Two servers of the target, four GPUs each, answer the prompts.
# 2. Four GPUs capture what the answers' tokens leave in the target, four train on it at the same time, through a ring of
#    bounded size: 1e9 tokens of states would be 74 TB. Training exports at its end.
# 3. The doctor looks at the export; it is served, and measured against the same server without a drafter.
#
# Environment: EXPERIMENT (glm53_flash), TARGET (its Hub id or folder), HARDWARE (for the report).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

dry=0 words=() name=''
experiment=${EXPERIMENT:-glm53_flash} target=${TARGET:-zai-org/GLM-5.3-Flash} hardware=${HARDWARE:-8x B300}
run_dir=''
for word in "$@"; do
    case "$word" in
        --dry-run) dry=1; continue ;;
        --*) echo "b300_8.sh: unknown option $word. The only one is --dry-run." >&2; exit 2 ;;
        name=*) name=${word#name=} ;;
        run_dir=*) run_dir=${word#run_dir=} ;;
    esac
    words+=("$word")
done
run_dir=${run_dir:-runs/${name:-$experiment}}
served=target first=http://127.0.0.1:8000 second=http://127.0.0.1:8001
# Every command gets the same words, so that all compose one and the same experiment. Four ranks of two micro-batches
# take the eight sequences a step that eight GPUs would.
common=("+experiment=$experiment" "target.name=$target" data.backend=server "data.servers.urls=[$first,$second]"
    "data.servers.model=$served" data.capture_backend=vllm data.mode=stream train.accumulation=2
    ${words[@]+"${words[@]}"})
background=()

show() { printf '%q ' "$@"; }
run() {
    show "$@"; echo
    [ "$dry" = 1 ] || "$@"
}
# serve LOG SCRIPT WORDS: a server in the background. A dry run shows the server's own command too.
serve() {
    local log=$1 script=$2
    shift 2
    show bash "$script" "$@"; echo "> $log &"
    if [ "$dry" = 1 ]; then
        bash "$script" --dry-run "$@" # first: what stands behind -- is the server's
        return
    fi
    mkdir -p "$(dirname "$log")"
    bash "$script" "$@" >"$log" 2>&1 &
    background+=("$!")
}
# ready URL LOG: wait until the server started last answers.
ready() {
    show curl --fail --silent --retry 1000 --retry-delay 5 --retry-all-errors "$1/health"; echo
    [ "$dry" = 1 ] && return
    until curl --fail --silent --output /dev/null "$1/health"; do
        kill -0 "${background[-1]}" 2>/dev/null || { echo "b300_8.sh: the server ended; see $2" >&2; exit 1; }
        sleep 5
    done
}
stop() {
    echo "kill the servers, and wait for their memory to be free"
    local pid
    for pid in ${background[@]+"${background[@]}"}; do kill "$pid" 2>/dev/null || true; done
    for pid in ${background[@]+"${background[@]}"}; do wait "$pid" || true; done
    background=()
}
trap '[ ${#background[@]} = 0 ] || stop' EXIT

echo "# 1. answers"
run bash launch/setup.sh
serve "$run_dir/logs/target-8000.log" launch/serve_target.sh "$target" --name "$served" --tp 4 --port 8000 --devices 0,1,2,3
serve "$run_dir/logs/target-8001.log" launch/serve_target.sh "$target" --name "$served" --tp 4 --port 8001 --devices 4,5,6,7
ready "$first" "$run_dir/logs/target-8000.log"
ready "$second" "$run_dir/logs/target-8001.log"
run .venv/bin/dflash2-gen-data "${common[@]}" stage=regenerate
stop

echo "# 2. capture and training, side by side"
producer=(env "CUDA_VISIBLE_DEVICES=0,1,2,3" .venv/bin/dflash2-gen-data "${common[@]}" stage=stream)
show "${producer[@]}"; echo "> $run_dir/logs/stream.log &"
if [ "$dry" = 0 ]; then
    mkdir -p "$run_dir/logs"
    "${producer[@]}" >"$run_dir/logs/stream.log" 2>&1 &
    background+=("$!")
fi
run env "CUDA_VISIBLE_DEVICES=4,5,6,7" .venv/bin/dflash2-train "${common[@]}"
if [ "$dry" = 0 ]; then
    wait "${background[@]}" # the producer ends with the training
    background=()
fi
run .venv/bin/dflash2-export "${common[@]}"

echo "# 3. what it is worth"
drafter=(launch/serve_drafter.sh vllm "$run_dir/export" "$target" --tp 8)
[ "$dry" = 0 ] || drafter+=(--block-size 8)
same=(--no-enable-prefix-caching) # of both servers: only the drafter may differ
flags=(--served-model-name "$served" "${same[@]}" --per-request-spec-decode-metrics summary)
measure=(.venv/bin/dflash2-eval "${common[@]}" +eval/protocol=holdout500 "eval.server.url=$first"
    "eval.server.hardware='$hardware'")
if [ "$dry" = 1 ]; then
    bash "${drafter[@]}" --dry-run -- "${flags[@]}"
else
    serve "$run_dir/logs/drafter-8000.log" "${drafter[@]}" -- "${flags[@]}"
fi
ready "$first" "$run_dir/logs/drafter-8000.log"
run "${measure[@]}" eval.server.label=drafter
stop
serve "$run_dir/logs/plain-8000.log" launch/serve_target.sh "$target" --name "$served" --tp 8 --port 8000 -- "${same[@]}"
ready "$first" "$run_dir/logs/plain-8000.log"
run "${measure[@]}" eval.server.method=autoregressive eval.server.label=plain
stop
echo "drafter: $run_dir/export"
echo "report:  $run_dir/eval/holdout500/server/report.md"
