"""Micro-batches on devices that split the batch: which examples a micro-batch takes, against plain jit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import recipes
from autopar.errors import BatchMismatchError, MemoryLimitError
from tests.small_steps import assert_close

WIDTH = 6


def state():
    random = np.random.default_rng(0)
    return {"a": random.normal(size=(WIDTH, WIDTH)).astype(np.float32), "c": random.normal(size=WIDTH)}


def batch(examples):
    return {"x": np.random.default_rng(1).normal(size=(examples, WIDTH)).astype(np.float32)}


def trained(loss):
    def step(p, b):
        (value, out), grads = jax.value_and_grad(loss, has_aux=True)(p, b)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, grads), {"loss": value, "out": out}

    return step


def check(step, recipe, examples):
    args = jax.tree.map(jnp.asarray, (state(), batch(examples)))
    expected = jax.jit(step)(*args)
    parallel = autopar.parallelize(step, plan=recipe, cache_dir=None)
    assert_close(parallel(*args), expected)


def data_parallel(num_microbatches):
    return recipes.cut(recipes.data_parallel(), num_microbatches=num_microbatches)


@pytest.mark.cases(1)
@pytest.mark.parametrize(("examples", "num_microbatches"), [(16, 2), (32, 4)])
def test_neighbouring_examples_stay_together(examples, num_microbatches):
    """Pairs of a preferred and another answer, one behind the other."""

    def loss(p, b):
        pairs = jnp.tanh(b["x"] @ p["a"]).reshape(-1, 2, WIDTH)
        return jnp.mean(jax.nn.softplus((pairs[:, 0] - pairs[:, 1]) @ p["c"])), None

    check(trained(loss), data_parallel(num_microbatches), examples)


@pytest.mark.parametrize("num_microbatches", [2, 8])
def test_a_result_that_is_flat_over_examples(num_microbatches):
    """With fewer examples in a micro-batch than devices, one at the least."""

    def loss(p, b):
        hidden = jnp.tanh(b["x"] @ p["a"])
        return jnp.mean(hidden @ p["c"]), hidden.reshape(-1)

    check(trained(loss), recipes.pipeline(1, num_microbatches=num_microbatches), 8)


@pytest.mark.slow
def test_the_search_does_not_cut_a_batch_that_is_addressed_by_position():
    """A limit under which it would: the first example counts double."""

    def step(p, b):
        def loss(p):
            x = b["x"]
            for w in p:
                x = jnp.tanh(x @ w)
            return jnp.mean(x.at[0].multiply(2.0) ** 2)

        value, grads = jax.value_and_grad(loss)(p)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, grads), value

    random = np.random.default_rng(0)
    args = (
        [jnp.asarray(random.normal(size=(WIDTH, WIDTH)) / 2, jnp.float32) for _ in range(6)],
        {"x": random.normal(size=(1024, WIDTH)).astype(np.float32)},
    )
    expected = jax.jit(step)(*args)
    for limit in (2**16, 2**14):
        parallel = autopar.parallelize(step, search=autopar.Search(memory_limit_bytes=limit), cache_dir=None)
        try:
            assert_close(parallel(*jax.tree.map(jnp.array, args)), expected)
        except MemoryLimitError:
            return
    pytest.fail("the last limit is too high to try the search")


def averaged(p, b):
    """Nothing that is kept comes of the examples."""
    return jax.tree.map(lambda p: 0.9 * p, p), {"mean": b["x"].mean()}


def penalised(p, b):
    """The gradient comes of the parameters alone, which go through products."""
    penalty, grads = jax.value_and_grad(lambda p: jnp.sum(jnp.tanh(jnp.tanh(p["a"] @ p["a"]) @ p["a"]) @ p["c"]))(p)
    return jax.tree.map(lambda p, g: p - 0.1 * g, p, grads), {"penalty": penalty, "mean": (b["x"] @ p["a"]).mean()}


def replayed(p, b):
    """Examples are kept where the last ones ended."""
    place = (p["c"].astype(jnp.int32).sum() + jnp.arange(len(b["x"]))) % WIDTH
    return p | {"a": p["a"].at[place].set(b["x"])}, {"mean": b["x"].mean()}


@pytest.mark.cases(5)
@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("step", [averaged, penalised, replayed])
def test_gradients_that_do_not_pass_through_examples(step, num_microbatches):
    check(step, recipes.pipeline(1, num_microbatches=num_microbatches), 4)


@pytest.mark.cases(1)
@pytest.mark.parametrize("limit", [2**14, 3 * 2**11, 2**12])
def test_a_penalty_that_grows_with_the_steps_under_a_tight_limit(limit):
    """Weights of the penalty are known before the first micro-batch, and cheap to compute again in each."""

    def step(state, b):
        def loss(p):
            growing = jnp.minimum(1.0, state["steps"] / 10.0)
            fit = jnp.mean((jnp.tanh(jnp.tanh(b["x"] @ p["a"]) @ p["b"]) - 1.0) ** 2)
            return fit + growing * sum(jnp.sum(w**2) for w in jax.tree.leaves(p))

        value, grads = jax.value_and_grad(loss)(state["p"])
        return {"p": jax.tree.map(lambda p, g: p - 0.1 * g, state["p"], grads), "steps": state["steps"] + 1}, value

    weights = {"a": jnp.ones((WIDTH, 32)) / 8, "b": jnp.ones((32, WIDTH)) / 8}
    args = {"p": weights, "steps": jnp.int32(3)}, batch(16)
    expected = jax.jit(step)(*args)
    parallel = autopar.parallelize(step, search=autopar.Search(memory_limit_bytes=limit), cache_dir=None)
    try:
        assert_close(parallel(*args), expected)
    except MemoryLimitError:
        assert limit < 2**14


def test_an_empty_batch_is_not_cut():
    def loss(p, b):
        return jnp.sum(jnp.tanh(b["x"] @ p["a"]) @ p["c"]), None

    with pytest.raises(BatchMismatchError, match="a batch without examples"):
        check(trained(loss), recipes.pipeline(2), 0)
    check(trained(loss), None, 0)


@pytest.mark.cases(1)
@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_equations_of_each_example_are_solved_and_its_products_taken(num_microbatches):
    def loss(p, b):
        hidden = jnp.tanh(b["x"] @ p["a"])
        matrices = 2 * jnp.eye(WIDTH) + hidden[:, :, None] * hidden[:, None, :]
        solved = jnp.linalg.solve(matrices, hidden[..., None])[..., 0] @ p["c"]
        return jnp.mean(jnp.square(solved) + jnp.prod(1 + hidden / 3, axis=-1)), jnp.linalg.slogdet(matrices)[1]

    check(trained(loss), data_parallel(num_microbatches), 8)
