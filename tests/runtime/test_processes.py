"""Pipelines over several processes, with real ones: the numbers of one process, and what happens when one is lost."""

import pickle
import signal
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import autopar
from benchmarks.zoo import CASES
from tests.in_processes import launch

MLP = {"case": "mlp", "stages": 2, "schedule": "1f1b", "microbatches": 4, "steps": 3}


def train(folder: Path, processes: int, devices: int, time_limit_s: float = 240.0, **task: Any) -> list[Any]:
    """What each process found: (metrics of each step, local parts of each leaf of the state, seconds)."""
    ended = launch(folder, processes, devices, time_limit_s, **task)
    assert [code for code, _, _ in ended] == [0] * processes, "\n".join(text[-3000:] for _, text, _ in ended)
    return [pickle.loads((folder / f"result{i}").read_bytes()) for i in range(processes)]


def run_here(step: Any, case: Any, state: Any, steps: int) -> tuple[list[Any], Any]:
    metrics = []
    for i in range(steps):
        state, made = step(state, case.batch(i % 2))
        metrics.append(jax.tree.map(float, made))
    return metrics, state


def check_numbers(folder: Path, results: list[Any], **task: Any) -> None:
    """Equal to the last bit in all processes and in one process under the same plan; to 1e-5 under plain `jax.jit`."""
    case = CASES[task["case"]]()
    step = autopar.parallelize(case.step, plan=autopar.Plan.load(folder / "plan.json"), cache_dir=None)
    for function, tolerance in ((step, 0.0), (jax.jit(case.step), 1e-5)):
        metrics, state = run_here(function, case, jax.jit(case.init)(jax.random.key(0)), task["steps"])
        leaves = [x for x in jax.tree.leaves(state) if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)]
        for found, parts, _ in results:
            np.testing.assert_allclose(jax.tree.leaves(found), jax.tree.leaves(metrics), rtol=tolerance)
            for leaf, held in zip(leaves, parts, strict=True):
                whole = np.asarray(leaf)
                for index, part in held:
                    np.testing.assert_allclose(part, whole[index], rtol=tolerance, atol=10 * tolerance)
        for i, leaf in enumerate(leaves):
            covered = np.zeros(leaf.shape, bool)
            for _, parts, _ in results:
                for index, _ in parts[i]:
                    covered[index] = True
            assert covered.all(), f"no process holds all of leaf {i}"


def test_two_stages_in_two_processes_give_the_numbers_of_one(tmp_path):
    check_numbers(tmp_path, train(tmp_path, 2, 2, **MLP), **MLP)


@pytest.mark.slow
def test_two_processes_keep_moments_in_the_memory_of_their_hosts(tmp_path):
    task = MLP | {"offloads": True}  # without a plan first: the state is made in another layout, and moved
    check_numbers(tmp_path, train(tmp_path, 2, 2, **task), **task)
    assert autopar.Plan.load(tmp_path / "plan.json").predicted.host_bytes[0] > 0


@pytest.mark.slow
def test_two_launches_on_a_mesh_of_two_axes_give_the_same_bits(tmp_path):
    task = MLP | {"two_axes": True, "steps": 4}
    runs = []
    for folder in (tmp_path / "first", tmp_path / "second"):
        folder.mkdir()
        runs.append(train(folder, 2, 2, **task))
        assert sorted(autopar.Plan.load(folder / "plan.json").record.axis_sizes) == [2, 2]
    for (first, held, _), (second, held_again, _) in zip(*runs, strict=True):
        assert first == second
        for leaf, again in zip(held, held_again, strict=True):
            assert [(i, part.tobytes()) for i, part in leaf] == [(i, part.tobytes()) for i, part in again]


@pytest.mark.slow
def test_a_process_that_dies_is_named_by_the_others(tmp_path):
    task = MLP | {"steps": 1000, "dies": [1, 2], "lost_after_s": 4.0}
    (code, text, ended_s), (died, _, died_s) = launch(tmp_path, 2, 2, 120.0, **task)
    assert died == -9
    assert code == 1, text
    assert "process 1 has shown no sign of life" in text
    assert ended_s - died_s < 30.0  # jax's own limit is 100 s


@pytest.mark.slow
def test_a_process_that_is_stopped_after_the_last_barrier_holds_nobody_up(tmp_path):
    task = MLP | {"steps": 1, "stops_at_its_end": 0}
    (stopped, said, _), (code, text, _) = launch(tmp_path, 2, 2, 120.0, **task)
    assert (stopped, code) == (-9, 0), text
    assert "only C++ is left" in said
    assert "only C++ is left" in text  # it did not leave before what others have registered for the end


@pytest.mark.slow
def test_processes_with_different_steps_are_refused(tmp_path):
    for code, text, _ in launch(tmp_path, 2, 1, 120.0, **MLP, differs=1):
        # JAX may abort a process that has raised its error, when it sees that the other has ended already.
        assert code in (1, -signal.SIGABRT), text
        assert "ProcessMismatchError" in text
        assert "got another one in process 1 than in process 0" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "devices", "task"),
    [
        (4, 2, {"schedule": "zb-h1"}),  # each stage in two processes
        (4, 2, {"stages": 4}),
        (4, 1, {"stages": 2, "schedule": "gpipe"}),
        (2, 4, {"stages": 4}),  # two stages in each process
        (2, 2, {"schedule": "interleaved"}),
        (2, 2, {"plan_first": True, "put_batch": True}),
        (2, 2, {"case": "dropout", "steps": 2}),
        (2, 2, {"case": "gpt", "steps": 2, "schedule": "zb-h1"}),
        (4, 2, {"case": "gpt", "steps": 2}),
    ],
    ids=str,
)
def test_numbers_do_not_depend_on_the_processes(tmp_path, processes, devices, task):
    task = MLP | task
    check_numbers(tmp_path, train(tmp_path, processes, devices, **task), **task)


@pytest.mark.slow
@pytest.mark.parametrize("process", [0, 1])
def test_an_exception_in_one_process_ends_the_others(tmp_path, process):
    task = MLP | {"steps": 1000, "raises": [process, 2], "lost_after_s": 10.0}
    ended = launch(tmp_path, 2, 2, 120.0, **task)
    assert all(code not in (0, -9) for code, _, _ in ended)
    assert f"process {process} ended on an exception" in ended[1 - process][1]
    assert "a fault of the user's" in ended[process][1]


@pytest.mark.slow
def test_the_others_say_so_before_jax_ends_them_when_the_first_process_dies(tmp_path):
    (_, _, died_s), (code, text, ended_s) = launch(tmp_path, 2, 2, 120.0, **MLP | {"steps": 1000, "dies": [0, 2]})
    assert code not in (0, -9), text
    assert "ProcessLostError: process 1, step" in text
    assert "got process 0 takes no connections any more" in text
    assert ended_s - died_s < 30.0
