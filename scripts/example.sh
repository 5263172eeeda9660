#!/usr/bin/env bash
# Trains a small GPT in parallel and prints the plan. Makes an environment of its own on the first run.
# Where there is no accelerator it runs on 8 virtual CPU devices; JAX_PLATFORMS=cuda or tpu takes the real ones (with a
# jax for them in .venv-example). Arguments go to examples/train_gpt.py.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh

prepare_environment example examples
export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}"
exec "$python" examples/train_gpt.py "$@"
