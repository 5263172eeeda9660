"""Plans and runs one small model under several recipes on the devices of this machine, in a process of its own.

    python -m benchmarks.auto_vs_manual.measuring MODEL CLUSTER RECIPE...

The devices' constants are measured first. Steps take turns, so that what else the machine does falls on all recipes
alike; the median of each counts, and of each beside the search's the median of what the two took in the same turns.
Recipes that come to the same program as another share it: it runs once a turn. Bytes and peak are those of the program
that XLA made. Each recipe's row goes to the standard output, a line of JSON.
"""

import dataclasses
import re
import statistics
import sys

from benchmarks.predicted_time import Running, take_turns  # first of all: it asks for 8 CPU devices

import jax  # isort: skip

import autopar  # isort: skip
from autopar import measuring
from autopar.verification import peak_bytes, traffic_of
from benchmarks.auto_vs_manual.manual import AUTO
from benchmarks.auto_vs_manual.models import models
from benchmarks.auto_vs_manual.planning import cluster_of, line_of, plan_row
from benchmarks.auto_vs_manual.rows import Row, Status

ROUNDS = 10
WHERE_FROM = re.compile(r", metadata=\{[^}]*\}")


def main(name: str, cluster_text: str, *names: str) -> None:
    model = models()[name]
    case, count = model.build(), cluster_of(cluster_text).num_devices
    cluster = autopar.Cluster.of_measurement(measuring.measure(count, show_progress=False), count)
    batch, rows = case.batch(0), list[Row]()
    programs: dict[str, Running] = {}
    program_of: dict[str, str] = {}  # of each recipe
    for recipe in names:
        row, plan = plan_row(model, cluster_text, recipe, cluster=cluster)
        if plan is not None and row.status is Status.PLANNED:
            step = autopar.parallelize(case.step, cluster=cluster, plan=plan, cache_dir=None, show_progress=False)
            compiled = step.compile(*model.shapes())
            text = program_of[recipe] = f"{row.plan}\n{WHERE_FROM.sub('', compiled.as_text())}"
            if text not in programs:
                programs[text] = Running(step, step.init(case.init, jax.random.key(0)), step.put_batch(batch))
            row = dataclasses.replace(
                row, compiled_bytes=traffic_of(compiled).total_bytes, compiled_peak_bytes=peak_bytes(compiled)
            )
        rows.append(row)
    take_turns(list(programs.values()), ROUNDS)
    for row in rows:
        print(line_of(with_times(row, programs, program_of)), flush=True)


def with_times(row: Row, programs: dict[str, Running], program_of: dict[str, str]) -> Row:
    """A row with what its program took, and the search's beside it."""
    if row.recipe not in program_of:
        return row
    seconds = programs[program_of[row.recipe]].wall_s
    quartiles = statistics.quantiles(seconds, n=4)
    beside = None
    if row.recipe != AUTO and AUTO in program_of:
        beside = statistics.median(s / own for s, own in zip(seconds, programs[program_of[AUTO]].wall_s, strict=True))
    return dataclasses.replace(
        row,
        measured_s=quartiles[1],
        measured_quartiles_s=(quartiles[0], quartiles[2]),
        measured_beside_auto=beside,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
