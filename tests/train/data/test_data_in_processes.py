"""Data for several processes: the losses of plain jit, and no process reads what only others need."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

import autopar
from autopar.train.data.sharded import NUM_COMPARED
from tests import small_steps
from tests.in_processes import launch
from tests.train.data.processes_with_data import BATCH, EPOCHS, EXAMPLES, Stream, examples

PROGRAM = str(Path(__file__).parent / "processes_with_data.py")
TASKS = [
    ("data", "pad", "numbered"),
    ("pipeline", "pad", "numbered"),
    ("zero", "drop", "numbered"),
    ("pipeline", "short", "numbered"),
    ("data", "short", "stream"),
    ("tensor", "mask", "numbered"),
]


def plain_losses(tail, source):
    """Of one device, and the batches that one process gets."""
    data = examples()
    if source == "stream":
        data = Stream(data)
    step = jax.jit(small_steps.mlp_step)
    state, losses = small_steps.new_mlp_state(), []
    unplanned = autopar.parallelize(small_steps.mlp_step)
    for batch in autopar.data.shard(data, unplanned, batch_size=BATCH, epochs=EPOCHS, tail=tail, seed=7):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_losses_in_several_processes_are_those_of_plain_jit(tmp_path, processes):
    ended = launch(tmp_path, processes, 2, 280.0, program=PROGRAM, tasks=TASKS)
    assert [code for code, _, _ in ended] == [0] * processes, "\n".join(text[-3000:] for _, text, _ in ended)
    results = [json.loads((tmp_path / f"result{i}.json").read_text()) for i in range(processes)]
    for number, (_, tail, source) in enumerate(TASKS):
        expected = plain_losses(tail, source)
        for of_process in results:
            np.testing.assert_allclose(of_process[number][0], expected, rtol=0, atol=1e-5)
        if source == "numbered":
            assert set().union(*(of_process[number][1] for of_process in results)) == set(range(EXAMPLES))
    # Data parallelism: besides the first batch's shapes, and what is read ahead of the interruption, its own rows only.
    rows = [len(of_process[0][1]) for of_process in results]
    batches = len(plain_losses("pad", "numbered"))
    compared = 2 * 2 * NUM_COMPARED  # of two loaders, each read twice
    assert max(rows) <= (batches + 4) * BATCH // processes + 2 + compared, rows
