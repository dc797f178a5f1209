#!/usr/bin/env bash
# Makes or updates .venv with everything that the four commands, the checks and the tests need.
#
#   bash launch/setup.sh            skips what is up to date; the second run takes a second
#   bash launch/setup.sh --cpu      the CPU environment even where a GPU is present
#
# CPU (no NVIDIA GPU found): launch/requirements/lock-cpu.txt, every version exact, no resolver.
# GPU: launch/requirements/gpu.txt through pip's resolver, since vLLM chooses its torch.
# The project itself is installed as a wheel, so that the commands run what a user would get; a changed source
# file is noticed here and installs it again.
#
# Environment: PYTHON names the interpreter to build .venv with (3.11 or newer). pip's own variables work as
# usual; on x86-64 PyPI's torch is the CUDA build, and PIP_EXTRA_INDEX_URL pointing at PyTorch's index of CPU
# wheels saves several GB, because pip then prefers 2.13.0+cpu.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

force_cpu=0
for word in "$@"; do
    case "$word" in
        --cpu) force_cpu=1 ;;
        *) echo "setup.sh: unknown option $word. The only one is --cpu." >&2; exit 2 ;;
    esac
done

modern() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
        if command -v "$candidate" >/dev/null && modern "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    echo "setup.sh: no Python 3.11 or newer found (looked for ${PYTHON:-python3.11, 3.12, 3.13 and python3})." >&2
    echo "Install one, or name it: PYTHON=/path/to/python3.11 bash launch/setup.sh" >&2
    exit 2
}

digest() { sha256sum | cut -d ' ' -f 1; }

# pip is silent for minutes while it unpacks; say now and then that it is at work.
with_heartbeat() {
    local waited=0 pid
    "$@" &
    pid=$!
    while kill -0 "$pid" 2>/dev/null; do
        sleep 1
        waited=$((waited + 1))
        if [ $((waited % 8)) = 0 ]; then echo "setup: pip is at work, $waited s"; fi
    done
    wait "$pid"
}

if [ "$force_cpu" = 0 ] && command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then
    kind=gpu
else
    kind=cpu
fi

# --- the packages -----------------------------------------------------------------------------------------
if [ ! -x .venv/bin/python ]; then
    python=$(find_python)
    echo "setup: making .venv with $("$python" --version)"
    "$python" -m venv .venv
elif ! modern .venv/bin/python; then
    echo "setup.sh: .venv has $(.venv/bin/python --version), but 3.11 or newer is needed. Remove .venv and run again." >&2
    exit 2
fi
pip=(.venv/bin/python -m pip --disable-pip-version-check --no-input -q)
# Byte code is made where a module is first imported: most of what is installed never is, and compiling all of it takes
# as long as unpacking it.
install=(install --no-compile)

packages=$({ echo "$kind"; .venv/bin/python --version; cat launch/requirements/*.txt
             [ "$kind" = cpu ] || cat pyproject.toml; } | digest)
if [ "$(cat .venv/packages.sha256 2>/dev/null)" = "$packages" ]; then
    echo "setup: packages are up to date ($kind)"
else
    echo "setup: installing the $kind packages; a minute from pip's cache, 5 to 15 with downloads"
    rm -f .venv/packages.sha256 .venv/project.sha256
    if [ "$kind" = cpu ]; then
        with_heartbeat "${pip[@]}" "${install[@]}" torch==2.13.0 # with its dependencies: none but small ones for a CPU build
        with_heartbeat "${pip[@]}" "${install[@]}" --no-deps -r launch/requirements/lock-cpu.txt
    else
        with_heartbeat "${pip[@]}" "${install[@]}" -r launch/requirements/gpu.txt
        with_heartbeat "${pip[@]}" "${install[@]}" --no-deps -r launch/requirements/no-deps.txt
        with_heartbeat "${pip[@]}" "${install[@]}" "setuptools>=77" wheel
    fi
    echo "$packages" >.venv/packages.sha256
fi

# --- the project ------------------------------------------------------------------------------------------
sources=$(find pyproject.toml conf data_gen dflash2_train -type f \
    \( -name '*.py' -o -name '*.yaml' -o -name '*.jsonl' -o -name '*.toml' \) -print0 |
    LC_ALL=C sort -z | xargs -0 sha256sum | digest)
if [ "$(cat .venv/project.sha256 2>/dev/null)" = "$sources" ]; then
    echo "setup: dflash2-train is up to date"
else
    echo "setup: installing dflash2-train"
    rm -rf build ./*.egg-info # setuptools would put files that no longer exist into the wheel
    with_heartbeat "${pip[@]}" "${install[@]}" --no-deps --no-build-isolation --force-reinstall .
    rm -rf build ./*.egg-info
    echo "$sources" >.venv/project.sha256
fi
