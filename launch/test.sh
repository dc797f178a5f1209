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
bash launch/target.sh
bash launch/check.sh
exec .venv/bin/python -m pytest -m "$marks" ${words[@]+"${words[@]}"}
