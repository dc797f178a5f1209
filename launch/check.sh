#!/usr/bin/env bash
# Static checks: lint, format, types, import contracts. Seconds; pre-commit and launch/test.sh run this.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
.venv/bin/lint-imports --no-logo
