#!/usr/bin/env bash
# ruff, the type checker and pytest. Makes an environment of its own on the first run.
# usage: scripts/test.sh [--slow] [pytest arguments]     --slow runs the tests that are left out otherwise
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh

prepare_environment test dev
selection=()
if [ "${1:-}" = --slow ]; then
    selection=(-m slow)
    shift
fi
"$python" -m ruff check .
"$python" -m ruff format --check .
"$python" -m mypy
JAX_PLATFORMS=cpu "$python" -m pytest "${selection[@]}" "$@"
