#!/usr/bin/env bash
# The documentation as a site in build/docs: open build/docs/index.html. Makes an environment of its own on the first
# run. Warnings are errors: a link that leads nowhere, a docstring that does not render. Arguments go to Sphinx.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh

prepare_environment docs docs
export JAX_PLATFORMS=cpu
"$python" -m sphinx --fail-on-warning --keep-going --nitpicky --quiet --builder html docs build/docs "$@"
echo "Built: open build/docs/index.html"
