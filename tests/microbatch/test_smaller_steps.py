"""Steps on several numbers of examples: what follows from one trace and the whole step is what a trace gives."""

import jax
import jax.numpy as jnp
import pytest

from autopar.frontend.fingerprints import jaxpr_fingerprint
from autopar.frontend.tracing import trace
from autopar.microbatch.smaller_step import SmallerSteps, smaller_step, with_literals_of
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
