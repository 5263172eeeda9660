"""The monitor of a training run: step times, goodput over restarts, warnings, and where its rows go."""

import json
import logging
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.errors import InvalidArgumentError
from autopar.train.monitoring.goodput import RUNS_FILE, Goodput, RunRecord, RunsFile, goodput
from autopar.train.monitoring.monitor import Completion, MonitorRow, StepCall, StepTimer, numbers_of, slowness


def step(params, batch):
    loss, gradient = jax.value_and_grad(lambda p: jnp.mean((batch["x"] @ p) ** 2))(params)
    return params - 0.1 * gradient, {"loss": loss, "norms": {"g": jnp.linalg.norm(gradient)}, "all": gradient}


def ended(step, ended_s, called_s=None, data_s=0.0, other_s=0.0):
    call = StepCall(step=step, called_s=called_s, data_s=data_s, other_s=other_s)
    return Completion(call=call, ended_s=ended_s, metrics={"loss": float(step)})


def row_of(step_time_s, predicted_s, data_s, idle_s):
    return MonitorRow(
        step=1, metrics={}, step_time_s=step_time_s, predicted_s=predicted_s, examples_per_s=None, tokens_per_s=None,
        mfu=None, memory_bytes=None, data_s=data_s, idle_s=idle_s,
        goodput=Goodput(fraction=1.0, total_s=1.0, lost_s={}),
    )  # fmt: skip


def test_step_times_are_those_between_ends_without_interruption():
    timer = StepTimer()
    for completion in [
        ended(0, 0.0),
        ended(1, 1.0),
        ended(2, 9.0, other_s=4.0),
        ended(3, 12.0),
        ended(4, 14.0),
    ]:
        timer.add(completion)
    seen = timer.take()
    assert (seen.last.call.step, seen.step_s, seen.idle_s) == (4, 2.0, None)  # of 1, 3 and 2 s
    timer.add(ended(5, 15.0))
    assert timer.take().step_s == 1.0
    assert timer.num_steps == 6


def test_devices_wait_for_data_and_for_python():
    timer = StepTimer()
    timer.add(ended(0, 1.0))
    timer.add(ended(1, 6.0, called_s=4.0, data_s=2.0))  # three seconds without work, two of them for the batch
    timer.add(ended(2, 8.0, called_s=5.0, data_s=0.5))  # called while step 1 ran
    seen = timer.take()
    assert (seen.step_s, seen.idle_s) == (3.5, 1.5)
    assert timer.waited_s == {"waiting for data": 2.0, "waiting for Python": 1.0}
    assert timer.productive_s == 2.0


def run(began_s, last_s, first_step, steps, **spent_s):
    return RunRecord(
        began_s=began_s, last_s=last_s, first_step=first_step, steps=steps, step_time_s=1.0, spent_s=spent_s
    )


def test_goodput_of_one_run():
    made = goodput([run(0.0, 20.0, 0, 10, compiling=6.0, evaluation=3.0)])
    assert (made.fraction, made.total_s) == (0.5, 20.0)
    assert made.lost_s == {"compiling": 6.0, "evaluation": 3.0, "other": 1.0}


def test_goodput_counts_repeated_steps_and_the_time_between_runs():
    # The first run ended at step 10; its last checkpoint was that of step 6, where the second goes on.
    made = goodput([run(0.0, 10.0, 0, 10), run(15.0, 21.0, 6, 6)])
    assert made.lost_s == {"between runs": 5.0, "repeated steps": 4.0}
    assert made.fraction == pytest.approx(12 / 21)


def test_runs_go_on_in_the_file_of_earlier_ones(tmp_path):
    first = RunsFile(tmp_path)
    first.write(run(0.0, 1.0, 0, 1))
    first.write(run(0.0, 5.0, 0, 5))
    second = RunsFile(tmp_path)
    assert second.earlier == (run(0.0, 5.0, 0, 5),)
    second.write(run(6.0, 8.0, 5, 2))
    path = tmp_path / RUNS_FILE
    with path.open("a") as file:
        file.write('{"began_s": 9.0, "la')  # killed while it wrote
    third = RunsFile(tmp_path)
    assert [r.first_step for r in third.earlier] == [0, 5]
    third.write(run(9.0, 9.5, 7, 0))
    assert [json.loads(line)["first_step"] for line in path.read_text().splitlines()] == [0, 5, 7]


def test_a_file_of_another_kind_is_not_taken_for_runs(tmp_path):
    (tmp_path / RUNS_FILE).write_text("[1, 2]\n")
    with pytest.raises(InvalidArgumentError, match="line 1"):
        RunsFile(tmp_path)


@pytest.mark.parametrize(
    ("times", "lane"),
    [
        ((1.19, 1.0, 0.0, 0.0), None),
        ((2.0, 1.0, 0.0, 0.1), "devices"),
        ((2.0, 1.0, 0.9, None), "devices"),
        ((2.0, 1.0, 0.7, 0.9), "data"),
        ((2.0, 1.0, 0.1, 0.9), "host"),
    ],
)
def test_the_lane_of_a_slow_step(times, lane):
    slow = slowness(row_of(*times))
    assert (slow and slow[0]) == lane
    if slow is not None:
        assert "2 s, 2 times the predicted 1 s" in slow[1]


def test_a_step_is_many_times_slower_in_plain_digits():
    lane, text = slowness(row_of(163.0, 1.0, 0.0, 0.1))
    assert lane == "devices"
    assert "163 s, 160 times the predicted 1 s" in text


@pytest.mark.parametrize("times", [(None, 1.0, 0.0, None), (2.0, None, 0.0, 0.0)])
def test_a_step_of_unknown_times_is_not_slow(times):
    assert slowness(row_of(*times)) is None


def test_scalars_of_metrics():
    metrics = {"loss": jnp.float32(1.5), "norms": (np.float64(2.0), 3), "all": jnp.ones(2), "key": jax.random.key(0)}
    assert numbers_of(metrics) == {"loss": 1.5, "norms/0": 2.0, "norms/1": 3.0}
    assert numbers_of(jnp.float32(4.0)) == {"loss": 4.0}


def test_a_run_is_followed(tmp_path, caplog, capfd):
    parallel = autopar.parallelize(step, cache_dir=None)
    written = {}
    with caplog.at_level(logging.WARNING, "autopar"):
        monitor = autopar.Monitor(parallel, log=tmp_path, callback=written.__setitem__, every=4, tokens_per_step=640)
        with monitor:
            params = jnp.ones((8, 8))
            for i, batch in enumerate(monitor.batches({"x": np.ones((64, 8), np.float32)} for _ in range(10))):
                params, metrics = parallel(params, batch)
                monitor(i, metrics)
                if i == 5:
                    with monitor.time("evaluation"):
                        parallel.plain(params, batch)
    assert [row.step for row in monitor.rows] == [3, 7, 9]
    row = monitor.rows[-1]
    assert row.metrics == {"loss": float(metrics["loss"]), "norms/g": float(metrics["norms"]["g"])}
    assert row.predicted_s == parallel.latest_plan.predicted.step_time_s
    assert row.tokens_per_s == pytest.approx(640 / row.step_time_s)
    assert row.examples_per_s == pytest.approx(64 / row.step_time_s)
    assert row.mfu == pytest.approx(parallel.latest_plan.predicted.mfu * row.predicted_s / row.step_time_s)
    assert {"planning", "compiling", "evaluation"} <= set(row.goodput.lost_s)
    assert 0 < row.goodput.fraction < 1
    assert sorted(written) == [3, 7, 9]
    assert written[9]["loss"] == row.metrics["loss"]
    assert written[9]["autopar/goodput"] == row.goodput.fraction
    shown = capfd.readouterr().err.splitlines()
    assert [line.split()[1] for line in shown if line.startswith("step ")] == ["3", "7", "9"]
    assert shown[-1].startswith("goodput ")
    assert "planning" in shown[-1]
    assert list(tmp_path.glob("events.out.tfevents.*"))
    assert RunsFile(tmp_path).earlier[0].steps == 10
    said = [r.getMessage() for r in caplog.records if "times the predicted" in r.getMessage()]
    assert len(said) == len(set(said)) <= 3  # once for each lane


def test_what_is_no_step_is_refused():
    with pytest.raises(InvalidArgumentError, match=r"made by autopar.parallelize"):
        autopar.Monitor(step)
    with pytest.raises(InvalidArgumentError, match="at least 1"):
        autopar.Monitor(autopar.parallelize(step), every=0)
    with pytest.raises(InvalidArgumentError, match="expected a function of a step"):
        autopar.Monitor(autopar.parallelize(step), callback="wandb")
    monitor = autopar.Monitor(autopar.parallelize(step), terminal=False)
    with pytest.raises(InvalidArgumentError, match="expected the number of the step, an integer, got 'x'"):
        monitor("x", {})
    monitor.close()


def test_a_run_without_steps_repeats_none_and_a_later_one_all_behind_its_first():
    assert "repeated steps" not in goodput([run(0.0, 100.0, 0, 100), run(100.0, 101.0, 0, 0)]).lost_s
    made = goodput([run(0.0, 100.0, 0, 100), run(100.0, 110.0, 100, 10), run(110.0, 210.0, 50, 100)])
    assert made.lost_s["repeated steps"] == 50.0 + 10.0


def test_metrics_that_are_state_are_left_out_once_they_are_gone():
    gone = jnp.float32(1.0) + 1
    gone.delete()
    assert numbers_of({"loss": jnp.float32(2.0), "count": gone}) == {"loss": 2.0}
    parallel = autopar.parallelize(step, cache_dir=None)
    monitor = autopar.Monitor(parallel, every=1, terminal=False)
    monitor(0, {"loss": jnp.float32(2.0), "count": gone})
    monitor.close()
    assert [row.metrics for row in monitor.rows] == [{"loss": 2.0}]


@pytest.mark.parametrize("with_batches", [True, False])
def test_devices_do_not_work_while_the_loop_sleeps(with_batches, caplog):
    parallel = autopar.parallelize(step, cache_dir=None)
    params, batch, sleep_s = jnp.ones((8, 8)), {"x": np.ones((64, 8), np.float32)}, 0.05
    with caplog.at_level(logging.WARNING, "autopar"), autopar.Monitor(parallel, every=5, terminal=False) as monitor:
        batches = [batch] * 6
        for i, one in enumerate(monitor.batches(batches) if with_batches else batches):
            time.sleep(sleep_s)  # between the batch and the step
            params, metrics = parallel(params, one)
            monitor(i, metrics)
    assert monitor.rows[0].idle_s > sleep_s / 2
    assert monitor.goodput.lost_s["waiting for Python"] > 3 * sleep_s
    assert "for the loop" in caplog.text
