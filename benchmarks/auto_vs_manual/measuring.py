"""Plans and runs one small model under several recipes on the devices of this machine, in a process of its own.

    python -m benchmarks.auto_vs_manual.measuring MODEL CLUSTER RECIPE...

Steps take turns, so that what else the machine does falls on all recipes alike; the median of each counts. Bytes and
peak are those of the program that XLA made. Each recipe's row goes to the standard output, a line of JSON.
"""

import dataclasses
import statistics
import sys

from benchmarks.predicted_time import Running, take_turns  # first of all: it asks for 8 CPU devices

import jax  # isort: skip

import autopar  # isort: skip
from autopar.verification import peak_bytes, traffic_of
from benchmarks.auto_vs_manual.models import models
from benchmarks.auto_vs_manual.planning import cluster_of, line_of, plan_row
from benchmarks.auto_vs_manual.rows import Row, Status

ROUNDS = 15


def main(name: str, cluster_text: str, *names: str) -> None:
    model = models()[name]
    case, cluster = model.build(), cluster_of(cluster_text)
    batch, rows, running = case.batch(0), list[Row](), dict[int, Running]()
    for recipe in names:
        row, plan = plan_row(model, cluster_text, recipe)
        if plan is not None and row.status is Status.PLANNED:
            step = autopar.parallelize(case.step, cluster=cluster, plan=plan, cache_dir=None, show_progress=False)
            compiled = step.compile(*model.shapes())
            running[len(rows)] = Running(step, step.init(case.init, jax.random.key(0)), step.put_batch(batch))
            row = dataclasses.replace(
                row, compiled_bytes=traffic_of(compiled).total_bytes, compiled_peak_bytes=peak_bytes(compiled)
            )
        rows.append(row)
    take_turns(list(running.values()), ROUNDS)
    for number, row in enumerate(rows):
        if number in running:
            quartiles = statistics.quantiles(running[number].wall_s, n=4)
            row = dataclasses.replace(row, measured_s=quartiles[1], measured_quartiles_s=(quartiles[0], quartiles[2]))
        print(line_of(row), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
