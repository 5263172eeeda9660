"""Steps on several numbers of examples: what follows from one trace and the whole step is what a trace gives.

Errors say where two traces are not alike, in words of the user. The program for one example is made from those for two
and for three.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import recipes
from autopar.errors import UnsupportedError
from autopar.frontend.fingerprints import jaxpr_fingerprint
from autopar.frontend.tracing import trace
from autopar.microbatch.smaller_step import SmallerSteps, extrapolated, smaller_step, with_literals_of
from benchmarks.zoo import CASES


def traced_step(step, params, batch):
    return trace(step, (params, batch), names=("params", "batch"), donate=(0,), batch=(1,))


def of_zoo(name, batch):
    case = CASES[name](batch=batch)
    return traced_step(case.step, jax.eval_shape(case.init, jax.random.key(0)), case.batch(0))


def padded(step_of):
    """A step whose program has a size that does not grow evenly with the examples."""

    def step(w, batch):
        examples = batch["x"].shape[0]
        x = jnp.pad(batch["x"], ((0, step_of(examples) - examples), (0, 0)))
        return w - 0.1 * jax.grad(lambda w: jnp.sum((x @ w) ** 2) / examples)(w)

    shapes = jax.ShapeDtypeStruct((4, 4), jnp.float32), {"x": jax.ShapeDtypeStruct((64, 4), jnp.float32)}
    return traced_step(step, *shapes)


def counting_traces(traced, monkeypatch):
    numbers = []
    asked = smaller_step
    monkeypatch.setattr("autopar.microbatch.smaller_step.smaller_step", lambda t, n: numbers.append(n) or asked(t, n))
    return numbers


@pytest.mark.parametrize("name", ["mlp", "gpt", "dropout"])
def test_what_follows_is_what_a_trace_gives(name, monkeypatch):
    traced = of_zoo(name, 32)
    numbers = counting_traces(traced, monkeypatch)
    on_fewer = SmallerSteps()
    on_fewer(traced, 8)
    for examples in (16, 4, 2):
        found = on_fewer(traced, examples)
        expected = smaller_step(traced, examples)
        programs = [with_literals_of(traced.jaxpr, step.jaxpr, name) for step in (found, expected)]
        assert jaxpr_fingerprint(programs[0]) == jaxpr_fingerprint(programs[1])
        assert (found.in_avals, found.out_avals) == (expected.in_avals, expected.out_avals)
    assert numbers == [8]
    assert on_fewer.confirm(traced, 8)
    assert on_fewer.confirm(traced, 4)
    assert numbers == [8, 4]


def test_sizes_that_cannot_grow_evenly_are_traced(monkeypatch):
    traced = padded(lambda n: -(-n // 24) * 24)  # 72 for 64 examples, 24 for 8, and 29 1/7 on the way for 14
    numbers = counting_traces(traced, monkeypatch)
    on_fewer = SmallerSteps()
    assert [on_fewer(traced, n).jaxpr.eqns[0].outvars[0].aval.shape[0] for n in (8, 14)] == [24, 24]
    assert numbers == [8, 14]


def test_what_a_trace_does_not_confirm_is_traced_from_then_on(monkeypatch):
    traced = padded(lambda n: 32 if n == 16 else 2 * n + 8)  # 40 where it grows as from 8 to 64
    numbers = counting_traces(traced, monkeypatch)
    on_fewer = SmallerSteps()
    on_fewer(traced, 8)
    rows = lambda: on_fewer(traced, 16).jaxpr.eqns[0].outvars[0].aval.shape[0]
    assert rows() == 40
    assert not on_fewer.confirm(traced, 16)
    assert rows() == 32
    assert numbers == [8, 16, 16]


def test_results_of_a_scan_body_that_differ_are_told_by_their_types_and_the_line_of_the_scan():
    def step(x):
        def body(carry, _):
            made = jnp.tanh(carry)
            return made, made if len(x) > 2 else carry

        return jax.lax.scan(body, x, None, length=2)

    whole, part = (jax.make_jaxpr(step)(jnp.ones(n)) for n in (4, 2))
    with pytest.raises(UnsupportedError, match="a value of type float32") as caught:
        with_literals_of(whole, part, "step")
    assert "test_smaller_steps.py:93" in caught.value.where
    assert "Var(" not in str(caught.value)


def at(function, examples):
    return jax.make_jaxpr(function)(jax.ShapeDtypeStruct((examples, 4), jnp.float32))


def one(function):
    return extrapolated(at(function, 2), at(function, 3), "function")


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
    with pytest.raises(UnsupportedError, match="2 examples as for 3"):
        one(lambda x: jnp.sin(x) if x.shape[0] == 2 else jnp.cos(x))


def test_a_program_that_needs_two_examples_is_refused():
    with pytest.raises(UnsupportedError, match="2 examples as for 3"):
        one(lambda x: jnp.roll(x, 2, 0))


@pytest.mark.parametrize("name", ["mlp", pytest.param("gpt", marks=pytest.mark.slow)])
def test_micro_batches_of_one_example(name):
    case = CASES[name](batch=4)
    step = autopar.parallelize(case.step, plan=recipes.pipeline(2, num_microbatches=4), cache_dir=None)
    made = autopar.verify(step, jax.jit(case.init)(jax.random.key(0)), case.batch(0))
    assert made.difference <= case.tolerance, made
