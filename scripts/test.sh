#!/usr/bin/env bash
# ruff, the type checker and pytest. Makes an environment of its own on the first run.
# usage: scripts/test.sh [--slow] [pytest arguments]
# --slow runs only the tests that are left out otherwise, with the published models, the TPU and GPU compilers, Perfetto
# and the tools of the documentation that they need. Those of pages need Chromium too.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh

# libtpu and the CUDA plugin make jax look for devices of theirs unless it is told not to.
export JAX_PLATFORMS=cpu
# Many tests start an interpreter: modules are compiled once, not by each of them.
unset PYTHONDONTWRITEBYTECODE
if [ "${1:-}" = --slow ]; then
    shift
    prepare_environment slow dev,docs,perfetto,published,tpu,gpu
    exec "$python" -m pytest -m slow "$@"
fi
prepare_environment test dev
"$python" -m ruff check .
"$python" -m ruff format --check .
types=$(mktemp)
"$python" -m mypy >"$types" 2>&1 &
type_check=$!
# A process for each core; a file's tests stay together as long as no process is idle.
failed=0
"$python" -m pytest -n auto --dist worksteal "$@" || failed=$?
wait "$type_check" || failed=$?
cat "$types"
rm -f "$types"
exit "$failed"
