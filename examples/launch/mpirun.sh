#!/bin/bash
# Open MPI: one process a GPU. `bash examples/launch/mpirun.sh HOSTS PROCESSES train.py ...`, such as
#
#   bash examples/launch/mpirun.sh node1:8,node2:8 16 train.py --epochs 3
#
# autopar.initialize() finds the processes by the variables of Open MPI 4, which JAX knows. Nothing of MPI is used to
# move arrays, and restarts are this loop: each goes on from the last checkpoint of the script.

set -euo pipefail

if (($# < 3)); then
  echo "usage: $0 HOSTS PROCESSES train.py ..." >&2
  exit 2
fi
HOSTS=$1 PROCESSES=$2
shift 2

RESTARTS=${RESTARTS:-3}
for ((AUTOPAR_RESTART = 0; ; AUTOPAR_RESTART++)); do
  export AUTOPAR_RESTART
  code=0
  mpirun --host "$HOSTS" -np "$PROCESSES" --tag-output --bind-to none \
    -x AUTOPAR_RESTART -x PATH -x PYTHONPATH python "$@" || code=$?
  if ((code == 0 || AUTOPAR_RESTART >= RESTARTS)); then
    exit "$code"
  fi
  echo "restart $((AUTOPAR_RESTART + 1)) of $RESTARTS after exit code $code" >&2
done
