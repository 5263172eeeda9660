"""Batches for a step on 8 devices: in the layouts of its plan, ahead of it, and without new programs at the tail."""

import threading
import time

import jax
import numpy as np
import pytest

import autopar
from autopar.errors import InvalidArgumentError
from tests.small_steps import MLP_BATCH, MLP_STATE, mlp_loss, mlp_step, new_mlp_state, slow_cluster

EXAMPLES = {
    "x": np.random.default_rng(0).normal(size=(41, 32)).astype(np.float32),
    "y": np.random.default_rng(1).normal(size=(41, 16)).astype(np.float32),
}
PIPELINE = autopar.recipes.pipeline(2, "1f1b", num_microbatches=4)


def new_step(plan=None, function=mlp_step):
    cluster = slow_cluster() if plan is None else None
    return autopar.parallelize(function, plan=plan, cluster=cluster, cache_dir=None)


def shard(step, **options):
    return autopar.data.shard(EXAMPLES, step, **{"batch_size": 16, "epochs": 2, **options})


def masked_step(state, batch):
    def loss_of(state):
        errors = mlp_errors(state, batch)
        return (errors * batch["mask"]).sum() / batch["mask"].sum()

    loss, grads = jax.value_and_grad(loss_of)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), {"loss": loss}


def mlp_errors(state, batch):
    return jax.vmap(lambda x, y: mlp_loss(state, {"x": x, "y": y}))(batch["x"], batch["y"])


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("plan", "tail"),
    [(None, "pad"), (None, "short"), (PIPELINE, "mask"), pytest.param(PIPELINE, "short", marks=pytest.mark.slow)],
)
def test_losses_are_those_of_plain_jit(plan, tail):
    function = masked_step if tail == "mask" else mlp_step
    step, plain = new_step(plan, function), jax.jit(function)
    state, expected_state = new_mlp_state(), new_mlp_state()
    for batch, expected in zip(shard(step, tail=tail), shard(new_step(), tail=tail, prefetch=0), strict=True):
        state, metrics = step(state, batch)
        expected_state, expected_metrics = plain(expected_state, expected)
        np.testing.assert_allclose(metrics["loss"], expected_metrics["loss"], rtol=0, atol=1e-5)
    if tail != "short":
        assert len(step._compiled) == 1  # the last batch of an epoch is no new program


def test_batches_come_in_the_layouts_of_the_plan():
    step = new_step(autopar.recipes.data_parallel())
    data = shard(step)
    assert isinstance(next(data)["x"], np.ndarray)  # before there is a plan
    plan = step.plan(MLP_STATE, MLP_BATCH)
    batch = next(data)
    for name in ("x", "y"):
        assert batch[name].sharding == plan.batch_shardings[name]
        assert batch[name].committed
    assert any(not s.is_fully_replicated for s in plan.batch_shardings.values())


def test_a_new_plan_changes_the_layouts_and_no_example():
    step, others = new_step(autopar.recipes.data_parallel()), new_step(autopar.recipes.tensor_parallel())
    for s in (step, others):
        s.plan(MLP_STATE, MLP_BATCH)
    data, expected = shard(step), list(shard(new_step(), prefetch=0))
    batches = [next(data), next(data)]
    data._step = others  # as after `step.replan`
    batches += list(data)
    assert batches[1]["x"].sharding != batches[2]["x"].sharding
    for batch, wanted in zip(batches, expected, strict=True):
        np.testing.assert_array_equal(batch["x"], wanted["x"])


def test_batches_are_read_ahead_of_the_step_as_many_as_asked_for():
    reads, threads = [], set(threading.enumerate())

    class Source:
        def __len__(self):
            return 160

        def __getitem__(self, number):
            reads.append(number)
            return {name: array[number % 41] for name, array in EXAMPLES.items()}

    step = new_step(autopar.recipes.data_parallel())
    step.plan(MLP_STATE, MLP_BATCH)
    data = autopar.data.shard(Source(), step, batch_size=16, prefetch=3)
    next(data)
    deadline = time.monotonic() + 20
    while len(reads) < 1 + 4 * 16 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    assert len(reads) == 1 + 4 * 16  # an example for its shapes, the batch, and three more
    data.close()
    assert len(list(data)) == 9
    deadline = time.monotonic() + 20
    while set(threading.enumerate()) - threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not set(threading.enumerate()) - threads


def test_an_error_of_the_source_reaches_the_loop_and_no_batch_is_left_out():
    broken = [True]

    class Source:
        def __len__(self):
            return 64

        def __getitem__(self, number):
            if number == 40 and broken[0]:
                raise OSError("the disk is gone")
            return {name: array[number % 41] for name, array in EXAMPLES.items()}

    step = new_step(autopar.recipes.data_parallel())
    step.plan(MLP_STATE, MLP_BATCH)
    data = autopar.data.shard(Source(), step, batch_size=16, seed=None)
    assert [len(next(data)["x"]) for _ in range(2)] == [16, 16]
    with pytest.raises(OSError, match="the disk is gone"):
        next(data)
    broken[0] = False
    np.testing.assert_array_equal(next(data)["x"], EXAMPLES["x"][np.arange(32, 48) % 41])


@pytest.mark.parametrize("begins_again", [True, False], ids=["iterable", "generator"])
def test_a_stream_is_read_ahead_in_order_before_and_after_there_is_a_plan(begins_again):
    class Stream:
        def __iter__(self):
            return ({name: array[i] for name, array in EXAMPLES.items()} for i in range(41))

    step, source = new_step(autopar.recipes.data_parallel()), Stream()
    data = autopar.data.shard(source if begins_again else iter(source), step, batch_size=16, epochs=1)
    seen = [next(data)]
    step.plan(MLP_STATE, MLP_BATCH)
    seen.append(next(data))
    data._step = new_step(autopar.recipes.tensor_parallel())
    data._step.plan(MLP_STATE, MLP_BATCH)
    seen += list(data)
    wanted = [np.arange(16), np.arange(16, 32), [*range(32, 41), *range(32, 39)]]
    for batch, numbers in zip(seen, wanted, strict=True):
        np.testing.assert_array_equal(batch["x"], EXAMPLES["x"][numbers])
    if begins_again:
        assert len(list(data)) == 3
        data.restore({**data.position(), "epoch": 0, "batch": 2})
        np.testing.assert_array_equal(next(data)["x"], seen[2]["x"])
    else:
        with pytest.raises(InvalidArgumentError, match="another pass: expected a source that can begin again"):
            iter(data)


def test_a_loop_after_the_last_batch_is_another_pass_and_one_that_was_left_goes_on():
    data = autopar.data.shard(np.arange(32), new_step(), batch_size=8, seed=3, epochs=2)
    first = [batch.tolist() for batch in data]
    assert [len(first), data.position()["epoch"], data.position()["batch"]] == [8, 2, 0]
    assert next(data, None) is None
    end = data.position()
    assert [batch.tolist() for batch in data] == first
    again = iter(data)
    assert [next(again).tolist() for _ in range(3)] == first[:3]
    position = data.position()
    assert [batch.tolist() for batch in data] == first[3:]
    data.restore(position)
    assert [batch.tolist() for batch in data] == first[3:]
    data.restore(end)  # of a run that is done
    assert list(data) == []
    assert len(list(data)) == 8


def test_reading_goes_on_after_close_but_for_an_iterator():
    step = new_step(autopar.recipes.data_parallel())
    step.plan(MLP_STATE, MLP_BATCH)
    rows = [{name: array[i] for name, array in EXAMPLES.items()} for i in range(32)]
    data = autopar.data.shard(rows, step, batch_size=16, seed=None)
    next(data)
    data.close()
    np.testing.assert_array_equal(next(data)["x"], EXAMPLES["x"][16:32])
    data = autopar.data.shard(iter(rows), step, batch_size=16)
    next(data)
    data.close()
    with pytest.raises(autopar.errors.InvalidArgumentError, match="an iterable that can begin again"):
        next(data)


def test_no_batch_is_lost_where_the_loop_was_interrupted(monkeypatch):
    step = new_step(autopar.recipes.data_parallel())
    step.plan(MLP_STATE, MLP_BATCH)
    data = shard(step, seed=None)
    next(data)
    following = data._following

    def interrupted():
        following()
        raise KeyboardInterrupt

    monkeypatch.setattr(data, "_following", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(data)
    monkeypatch.undo()
    np.testing.assert_array_equal(next(data)["x"], EXAMPLES["x"][16:32])


def test_a_stream_without_a_whole_batch_ends():
    data = autopar.data.shard(iter_of(3), new_step(), batch_size=4, tail="drop", epochs=None, seed=None)
    assert list(data) == []


def iter_of(count):
    class Stream:
        def __iter__(self):
            return (np.array([i]) for i in range(count))

    return Stream()
