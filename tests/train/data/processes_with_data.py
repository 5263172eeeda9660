"""One of several processes that train on sharded data: the program of tests/train/data/test_data_in_processes.py.

Every task runs in it one after the other. Writes the losses of each, and the examples that this process read.
"""

import json
import sys
from pathlib import Path

import numpy as np

from tests.in_processes import join

EXAMPLES, BATCH, EPOCHS = 70, 16, 4


class Recorded:
    """Examples by number, and the numbers that were read."""

    def __init__(self, data):
        self.data, self.read = data, []

    def __len__(self):
        return EXAMPLES

    def __getitem__(self, number):
        self.read.append(int(number))
        return {name: array[number] for name, array in self.data.items()}


class Stream:
    """The same examples, one after the other."""

    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return ({name: array[i] for name, array in self.data.items()} for i in range(EXAMPLES))


def examples():
    random = np.random.default_rng(3)
    return {
        "x": random.normal(size=(EXAMPLES, 32)).astype(np.float32),
        "y": random.normal(size=(EXAMPLES, 16)).astype(np.float32),
    }


def plan_of(name):
    import autopar

    return {
        "data": autopar.recipes.data_parallel(),
        "zero": autopar.recipes.zero(3),
        "tensor": autopar.recipes.tensor_parallel(),
        "pipeline": autopar.recipes.pipeline(2, "1f1b", num_microbatches=4),
    }[name]


def train(plan, tail, source):
    """(losses, numbers of the examples that were read) of a run that is interrupted in the middle."""
    import jax

    import autopar
    from tests import small_steps

    step = autopar.parallelize(small_steps.mlp_step, plan=plan_of(plan), cache_dir=None)
    recorded = Recorded(examples()) if source == "numbered" else Stream(examples())
    options = {"batch_size": BATCH, "epochs": EPOCHS, "tail": tail, "seed": 7}
    data = autopar.data.shard(recorded, step, **options)
    state = step.init(small_steps.mlp_state, jax.random.key(0))
    losses = []
    for number, batch in enumerate(data):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
        if number == 6:
            break
    position = json.loads(json.dumps(data.position()))
    data.close()
    data = autopar.data.shard(recorded, step, **options)
    data.restore(position)
    for batch in data:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, getattr(recorded, "read", [])


def main(task):
    join(task)
    results = [train(*of) for of in task["tasks"]]
    (Path(task["folder"]) / f"result{task['process']}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
