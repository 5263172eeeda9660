"""Tensor parallelism over more devices than key and value heads."""

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar import recipes
from tests.small_steps import assert_close, slow_cluster

B, L, W, H, K, D, F = 2, 128, 32, 8, 2, 4, 64


def repeated(q, k, v):
    k, v = (jnp.repeat(a, H // K, axis=2) for a in (k, v))
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def grouped(q, k, v):
    q = q.reshape(B, L, K, H // K, D)
    weights = jax.nn.softmax(jnp.einsum("bqkgd,bskd->bkgqs", q, k))
    return jnp.einsum("bkgqs,bskd->bqkgd", weights, v).reshape(B, L, H, D)


def step_of(attention):
    def step(state, batch):
        def loss(p):
            x = batch["x"]
            q, k, v = (jnp.einsum("blw,whd->blhd", x, p[n]) for n in "qkv")
            x = x + jnp.einsum("blhd,hdw->blw", attention(q, k, v), p["o"])
            return jnp.mean((x + jax.nn.relu(x @ p["up"]) @ p["down"] - batch["y"]) ** 2)

        value, gradients = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients), value

    return step


def arguments():
    keys = iter(jax.random.split(jax.random.key(0), 8))
    shapes = {"q": (W, H, D), "k": (W, K, D), "v": (W, K, D), "o": (H, D, W), "up": (W, F), "down": (F, W)}
    state = {name: 0.2 * jax.random.normal(next(keys), shape) for name, shape in shapes.items()}
    return state, {name: jax.random.normal(next(keys), (B, L, W)) for name in "xy"}


@pytest.mark.parametrize("attention", [grouped, repeated])
def test_queries_are_split_by_heads_over_two_axes_and_keys_over_the_first(attention):
    step, args = step_of(attention), arguments()
    made = autopar.parallelize(
        step, plan=recipes.tensor_parallel(), cluster=slow_cluster(8), cache_dir=None, show_progress=False
    )
    expected = jax.jit(step)(*args)
    plan = made.plan(*args)
    assert plan.mesh.axis_sizes == (2, 4)
    assert plan.record.axis_names == ("tensor", "tensor group")
    assert_close(made(*jax.tree.map(jnp.copy, args)), expected)
    of_scores = B * H * L * L / 8 * 4  # what a device has of them; sums over the width of heads would send more
    assert all(c.sent_bytes / c.count < of_scores for c in plan.predicted.collectives)


@pytest.mark.parametrize(("size", "axes"), [(2, (2,)), (8, (2, 4))])
def test_an_axis_that_heads_can_share_stays_one(size, axes):
    made = autopar.parallelize(
        step_of(grouped), plan=recipes.tensor_parallel(), cluster=slow_cluster(size), cache_dir=None,
        show_progress=False,
    )  # fmt: skip
    assert made.plan(*arguments()).mesh.axis_sizes == axes
