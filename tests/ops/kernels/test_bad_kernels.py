"""Rules, amounts of work, twins and callbacks that cannot be: errors name the argument, and the line of the call."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import autopar
from autopar.errors import InvalidArgumentError, MixedExamplesError

X = jnp.ones((4, 8))
HERE = r"test_bad_kernels\.py:\d+"


@pytest.mark.parametrize("rule", ["b [w -> b w", "b w] -> b w", "[b w] -> b w", "b [[w]] -> b w", "b [] -> b w"])
def test_brackets_that_do_not_close_around_one_name_are_refused(rule):
    with pytest.raises(InvalidArgumentError, match=f"autopar.kernel.*{HERE}.*each alone or in brackets"):
        autopar.kernel(jnp.tanh, rule)


def test_a_name_in_brackets_is_whole_wherever_it_stands():
    called = autopar.kernel(lambda x, w: x * w, "b [w], w -> b w")
    assert "rule=b [w], [w] -> b [w]" in str(jax.make_jaxpr(called)(X, X[0]))


@pytest.mark.parametrize(
    ("more", "says"),
    [({"summed": ("b",)}, "a result without the factor 'b'"), ({"summed": ("k",), "whole": ("k",)}, "whole or summed")],
)
def test_summed_factors_are_no_others(more, says):
    with pytest.raises(InvalidArgumentError, match=says):
        autopar.kernel(jnp.matmul, "b k, k n -> b n", **more)


@pytest.mark.parametrize("argument", ["flops", "bytes"])
@pytest.mark.parametrize(
    ("amount", "got"),
    [
        (lambda x: -5.0, r"got -5\.0"),
        (lambda x: float("nan"), "got nan"),
        (lambda x: float("inf"), "got inf"),
        (lambda x: "7", "got '7'"),
        (lambda: 0, "got TypeError"),
        (lambda x: 1 / 0, "got ZeroDivisionError"),
    ],
)
def test_amounts_of_work_are_finite_numbers(argument, amount, got):
    called = autopar.kernel(jnp.tanh, "b w -> b w", **{argument: amount})
    with pytest.raises(InvalidArgumentError, match=f"{HERE}.*, {argument}= of autopar.kernel: .*{got}"):
        jax.eval_shape(lambda x: called(x), X)


def test_a_twin_that_takes_other_arguments_is_refused():
    called = autopar.kernel(lambda x, w: x * w, "b w, w -> b w", like=lambda x: x)
    with pytest.raises(InvalidArgumentError, match=f"{HERE}.*like= of autopar.kernel.*takes 1 positional"):
        jax.eval_shape(lambda x, w: called(x, w), X, X[0])


def test_a_callback_that_returns_another_shape_is_named_with_its_line():
    def four_numbers(x):
        return np.zeros(4, np.float32)

    def step(state, batch):
        return state, jax.pure_callback(four_numbers, jax.ShapeDtypeStruct((3,), jnp.float32), jnp.mean(batch * state))

    made = autopar.parallelize(step, cluster="local:2", cache_dir=None)
    with pytest.raises(TypeError, match=rf"pure_callback of four_numbers at .*{HERE}.*float32\[3\].*got float32\[4\]"):
        made(jnp.ones(8), X)


def test_a_pallas_call_that_mixes_examples_is_said_to_need_a_rule():
    def centred(x_ref, o_ref):
        o_ref[...] = x_ref[...] - jnp.mean(x_ref[...], 0)

    def step(state, batch):
        call = pl.pallas_call(centred, out_shape=jax.ShapeDtypeStruct(batch.shape, batch.dtype), interpret=True)
        loss, grads = jax.value_and_grad(lambda w: jnp.mean((call(batch) * w) ** 2))(state)
        return state - grads, loss

    made = autopar.parallelize(step, cluster="local:2", cache_dir=None, search=autopar.Search(num_microbatches=2))
    with pytest.raises(MixedExamplesError, match=re.escape("autopar.kernel(fun,")):
        made.plan(jnp.ones(8), X)


def test_a_recipe_for_experts_says_that_it_does_not_take_ragged_products():
    def step(state, batch):
        sizes = jnp.array([2, 2], jnp.int32)
        loss, grads = jax.value_and_grad(lambda w: jnp.mean(jax.lax.ragged_dot(batch, w, sizes) ** 2))(state)
        return state - grads, loss

    made = autopar.parallelize(step, cluster="local:2", cache_dir=None, plan=autopar.recipes.expert_parallel(2))
    with pytest.raises(InvalidArgumentError, match=rf"ragged_dot_general at .*{HERE}.*experts in a ragged product"):
        made.plan(jnp.ones((2, 8, 8)), X)


def test_a_recipe_for_matrices_says_that_they_are_inside_of_an_island():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("model",))
    columns = jax.sharding.PartitionSpec(None, "model")
    product = jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(jax.sharding.PartitionSpec(), columns), out_specs=columns)

    def step(state, batch):
        loss, grads = jax.value_and_grad(lambda w: jnp.mean(product(batch, w) ** 2))(state)
        return state - grads, loss

    made = autopar.parallelize(step, cluster="local:4", cache_dir=None, plan=autopar.recipes.combine(tp=2, dp=2))
    with pytest.raises(InvalidArgumentError, match=rf"shard_map at .*{HERE}.*inside of kernels and shard_map islands"):
        made.plan(jnp.ones((8, 8)), X)
