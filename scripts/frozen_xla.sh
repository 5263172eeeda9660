#!/usr/bin/env bash
# Our plans beside those of XLA's auto-sharding pass, which is no part of today's jax any more: makes an environment
# with the last jax that has it, and one for us, on the first run. Arguments go to benchmarks/xla_auto_sharding.py.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh

frozen=.venv-frozen-xla
if [ ! -e "$frozen/installed" ]; then
    echo "Installing jax 0.10.0 with libtpu 0.0.40 into $frozen ..."
    rm -rf "$frozen"
    "${PYTHON:-python3}" -m venv "$frozen"
    "$frozen/bin/python" -m pip install --quiet --disable-pip-version-check --no-input --progress-bar off \
        "jax[tpu]==0.10.0" "libtpu==0.0.40"
    touch "$frozen/installed"
fi
prepare_environment xla tpu
export FROZEN_PYTHON="$PWD/$frozen/bin/python" JAX_PLATFORMS=cpu
exec "$python" -m benchmarks.xla_auto_sharding "$@"
