"""The dimension of a batch that counts examples: named, or found where a loop of the step goes over the first one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar import recipes
from autopar.errors import InvalidArgumentError
from tests.small_steps import assert_close, grouped

STEPS, EXAMPLES, LENGTH, WIDTH = 3, 4, 5, 6
CLUSTER = autopar.Cluster.local(2)


def state():
    first, second = jax.random.split(jax.random.key(0))
    return {"a": jax.random.normal(first, (WIDTH, WIDTH)) / 3, "b": jax.random.normal(second, (WIDTH, WIDTH)) / 3}


def array(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def updated(p, grads):
    return jax.tree.map(lambda p, g: p - 0.1 * g, p, grads)


def accumulating(p, batch):
    """Gradients of each of STEPS parts of the batch, with a key that goes from one to the next."""

    def loss(p, x, key):
        h = jnp.tanh(x @ p["a"])
        h = jnp.where(jax.random.bernoulli(key, 0.8, h.shape), h, 0.0)
        return jnp.square(h @ p["b"]).sum()

    def body(carry, x):
        grads, key = carry
        key, own = jax.random.split(key)
        return (jax.tree.map(jnp.add, grads, jax.grad(loss)(p, x, own)), key), None

    (grads, _), _ = jax.lax.scan(body, (jax.tree.map(jnp.zeros_like, p), jax.random.key(1)), batch["x"])
    return updated(p, jax.tree.map(lambda g: g / batch["x"].size, grads)), {}


def recurrent(p, batch):
    """A time-major batch."""

    def loss(p):
        start = jnp.zeros((batch["x"].shape[1], WIDTH))
        h, _ = jax.lax.scan(lambda h, x: (jnp.tanh(h @ p["a"] + x), None), start, batch["x"])
        return jnp.square(h @ p["b"]).mean()

    return updated(p, jax.grad(loss)(p)), {}


def mixing_times(p, batch):
    """A time-major batch without a loop, with a weight for each time."""

    def loss(p):
        h = jnp.einsum("tbf,sbf->tbs", batch["x"], batch["x"] @ p["a"])
        return (
            jnp.einsum("tbs,sbf->tbf", jax.nn.softmax(h), batch["x"]) @ p["b"] * batch["times"][:, None, None]
        ).mean()

    return updated(p, jax.grad(loss)(p)), {}


def run(step, batch, **options):
    """The step on two devices, once it is known to give what plain jax.jit gives."""
    expected = jax.jit(step)(state(), batch)
    parallel = autopar.parallelize(step, cluster=CLUSTER, cache_dir=None, **grouped(**options))
    plan = parallel.plan(state(), batch)
    assert_close(parallel(state(), batch), expected)
    return plan


def layout_of(plan, name="x"):
    return plan.batch_shardings[name].spec


@pytest.mark.cases(2)
@pytest.mark.parametrize("step", [accumulating, recurrent])
@pytest.mark.parametrize("options", [{}, {"batch_axis": 1}])
def test_the_examples_of_a_batch_whose_first_dimension_a_loop_goes_over_are_split(step, options):
    plan = run(step, {"x": array(STEPS, EXAMPLES, WIDTH)}, plan=recipes.data_parallel(), **options)
    assert layout_of(plan) == P(None, "data")


def test_a_batch_of_which_a_loop_goes_over_parts_in_another_order():
    """No dimension counts examples; the last one is also a dimension of the matrix that is read first."""

    def step(p, batch):
        values = (jnp.tanh(batch["x"] @ p["a"]) @ p["b"])[..., 0]
        summed = jax.lax.scan(lambda h, y: (h + y, h), jnp.zeros(EXAMPLES), batch["y"])[1]
        rows = {"x": batch["x"].reshape(-1, WIDTH), "y": (values + summed).reshape(-1)}

        def update(p, part):
            grads = jax.grad(lambda p: jnp.square((jnp.tanh(part["x"] @ p["a"]) @ p["b"])[:, 0] - part["y"]).mean())(p)
            return updated(p, grads), None

        def epoch(p, key):
            order = jax.random.permutation(key, STEPS * EXAMPLES)
            return jax.lax.scan(update, p, jax.tree.map(lambda x: x[order].reshape(2, -1, *x.shape[1:]), rows))

        return jax.lax.scan(epoch, p, jax.random.split(jax.random.key(1), 2))[0], {}

    args = {"a": array(WIDTH, 10), "b": array(10, 1)}, {"x": array(STEPS, EXAMPLES, WIDTH), "y": array(STEPS, EXAMPLES)}
    expected = jax.jit(step)(*args)
    parallel = autopar.parallelize(step, cluster=CLUSTER, cache_dir=None)
    assert_close(parallel(*args), expected)


def test_state_is_split_too():
    plan = run(accumulating, {"x": array(STEPS, EXAMPLES, WIDTH)}, plan=recipes.zero(3))
    assert layout_of(plan) == P(None, "data")
    assert "the batch and the state split" in str(plan)


@pytest.mark.cases(1)
@pytest.mark.parametrize("step", [accumulating, recurrent])
def test_micro_batches_have_fewer_of_the_examples(step):
    plan = run(step, {"x": array(STEPS, EXAMPLES, WIDTH)}, num_microbatches=2)
    assert plan.record.pipeline.num_microbatches == 2


@pytest.mark.cases(1)
@pytest.mark.parametrize("axis", [{"x": 1, "times": None}, {"x": -2, "times": None}])
def test_a_tree_of_axes(axis):
    batch = {"x": array(LENGTH, EXAMPLES, WIDTH), "times": array(LENGTH)}
    plan = run(mixing_times, batch, plan=recipes.data_parallel(), batch_axis=axis)
    assert (layout_of(plan), layout_of(plan, "times")) == (P(None, "data"), P())
    run(mixing_times, batch, num_microbatches=4, batch_axis=axis)


def test_axes_of_several_arguments():
    def step(p, x, times):
        return mixing_times(p, {"x": x, "times": times})

    args = state(), array(LENGTH, EXAMPLES, WIDTH), array(LENGTH)
    expected = jax.jit(step)(*args)
    parallel = autopar.parallelize(
        step,
        batch_argnums=(1, 2),
        batch_axis=(1, None),
        search=autopar.Search(num_microbatches=2),
        cluster=CLUSTER,
        cache_dir=None,
    )
    assert_close(parallel(*args), expected)


@pytest.mark.parametrize("axis", [2, -3, True, "x", {"y": 1}, {"x": 1.0}])
def test_axes_that_a_batch_does_not_have_are_refused(axis):
    with pytest.raises(InvalidArgumentError, match=r"batch_axis=.*expected a dimension of each leaf"):
        autopar.plan(recurrent, state(), {"x": array(STEPS, EXAMPLES)}, cluster=CLUSTER, batch_axis=axis)


def test_a_step_planned_anew_keeps_its_axis():
    named = autopar.parallelize(mixing_times, batch_axis={"x": 1, "times": None}, cache_dir=None)
    batch = {"x": array(LENGTH, EXAMPLES, WIDTH), "times": array(LENGTH)}
    plan = autopar.plan(named, state(), batch, cluster=CLUSTER, plan=recipes.data_parallel())
    assert layout_of(plan) == P(None, "data")


def test_fit_varies_the_dimension_that_is_named():
    batch = {"x": jax.ShapeDtypeStruct((LENGTH, EXAMPLES, WIDTH), jnp.float32), "times": array(LENGTH)}
    step = autopar.parallelize(
        mixing_times,
        batch_axis={"x": 1, "times": None},
        search=autopar.Search(memory_limit_bytes=2**20),
        cache_dir=None,
    )
    found = autopar.fit(step, state(), batch, clusters=[CLUSTER], multiple=64)
    assert found.largest(CLUSTER.name) > EXAMPLES


def test_axes_of_another_tree_are_told_by_the_leaves_of_the_batch():
    with pytest.raises(
        InvalidArgumentError, match=r"batch_axis=\{'y': 0\}.*another tree than that of the leaves \['x'\]"
    ):
        autopar.plan(recurrent, state(), {"x": array(STEPS, EXAMPLES)}, cluster=CLUSTER, batch_axis={"y": 0})
