"""Micro-batches on devices that split the batch: which examples a micro-batch takes, against plain jit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import recipes
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
    parallel = autopar.parallelize(step, plan=recipe, cache_dir=None, show_progress=False)
    assert_close(parallel(*args), expected)


def data_parallel(num_microbatches):
    return recipes.cut(recipes.data_parallel(), num_microbatches=num_microbatches)


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
