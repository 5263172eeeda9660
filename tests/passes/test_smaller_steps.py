"""Errors say where two traces of a step are not alike, in words of the user. The program for one example is made from
that for two and that of the whole batch.
"""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import recipes
from autopar.errors import UnsupportedError
from autopar.frontend.tracing import trace
from autopar.passes.smaller_step import like_whole, num_examples, with_literals_of
from benchmarks.zoo import CASES


def test_results_of_a_scan_body_that_differ_are_told_by_their_types_and_the_line_of_the_scan():
    def step(x):
        def body(carry, _):
            made = jnp.tanh(carry)
            return made, made if len(x) > 2 else carry

        return jax.lax.scan(body, x, None, length=2)

    whole, part = (jax.make_jaxpr(step)(jnp.ones(n)) for n in (4, 2))
    with pytest.raises(UnsupportedError, match="a value of type float32") as caught:
        with_literals_of(whole, part, "step")
    assert "test_smaller_steps.py:26" in caught.value.where
    assert "Var(" not in str(caught.value)


def at(function, examples):
    return jax.make_jaxpr(function)(jax.ShapeDtypeStruct((examples, 4), jnp.float32))


def one(function, examples=5):
    return with_literals_of(at(function, examples), at(function, 2), "function", Fraction(1 - 2, examples - 2))


def spread(x):
    scale = jnp.sum(x**2, axis=1, keepdims=True)
    return jnp.concatenate([x / scale, jnp.broadcast_to(jnp.arange(4.0), x.shape)], axis=1).reshape(-1, 2)


def looped(x):
    return jax.lax.scan(lambda carry, row: (carry + row, jnp.sin(carry)), jnp.zeros(x.shape[0]), x.T)


@pytest.mark.parametrize("function", [spread, looped, lambda x: jax.jit(jnp.tanh)(x) @ jnp.ones((4, 2))])
def test_it_computes_what_the_function_does(function):
    x = np.random.default_rng(0).normal(size=(1, 4)).astype(np.float32)
    jaxpr = one(function)
    got = jax.core.eval_jaxpr(getattr(jaxpr, "jaxpr", jaxpr), jaxpr.consts, x)
    for expected, found in zip(jax.tree.leaves(function(x)), got, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_shapes_are_one_step_smaller():
    assert [v.aval.shape for v in one(spread).jaxpr.outvars] == [(4, 2)]


def test_programs_that_branch_on_the_number_of_examples_are_refused():
    with pytest.raises(UnsupportedError, match="micro-batches of two examples"):
        one(lambda x: jnp.sin(x) if x.shape[0] == 2 else jnp.cos(x))


def test_a_program_that_needs_two_examples_is_refused():
    with pytest.raises(UnsupportedError, match="micro-batches of two examples"):
        one(lambda x: jnp.roll(x, 2, 0))


def test_a_constant_whose_size_is_that_of_the_batch_is_refused():
    """Its numbers for one example are not known, of a closed jaxpr or of the step's own."""

    def step(x, batch):
        return x - jax.grad(lambda x: jnp.sum(jnp.asarray(np.eye(len(batch), dtype=np.float32)) @ batch @ x))(x)

    shapes = jax.ShapeDtypeStruct((4,), jnp.float32), jax.ShapeDtypeStruct((5, 4), jnp.float32)
    traced = trace(step, shapes, names=("x", "batch"), donate=(0,), batch=(1,))
    with pytest.raises(UnsupportedError, match="constant of shape"):
        like_whole(traced, 1)


def test_literals_are_those_of_the_whole_batch_and_two_examples_are_cut_by_a_trace_on_three():
    traced = trace(
        lambda params, batch: (params, (batch * params).mean()), (jnp.ones(4), jnp.ones((2, 4))),
        names=("params", "batch"), donate=(0,), batch=(1,),
    )  # fmt: skip
    part, few = like_whole(traced, 1)
    assert (num_examples(part), num_examples(few)) == (1, 3)
    assert "div" in str(part.jaxpr)
    assert "8.0:f32" in str(part.jaxpr)


@pytest.mark.parametrize("name", ["mlp", pytest.param("gpt", marks=pytest.mark.slow)])
def test_micro_batches_of_one_example(name):
    case = CASES[name](batch=4)
    step = autopar.parallelize(case.step, plan=recipes.pipeline(2, num_microbatches=4), cache_dir=None)
    made = autopar.verify(step, jax.jit(case.init)(jax.random.key(0)), case.batch(0))
    assert made.difference <= case.tolerance, made
