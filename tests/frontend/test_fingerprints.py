"""Fingerprints of traced functions: equal for one computation, in every trace and process, and for no other."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import autopar
from autopar.common import jax_local
from autopar.frontend.fingerprints import first_difference, jaxpr_fingerprint, module_fingerprint
from tests.small_steps import mlp_batch, mlp_loss, new_mlp_state, python, slow_cluster


@dataclasses.dataclass(frozen=True)
class Solver:
    """Prints its address, as functions kept in parameters of equations do."""

    tolerance: float
    update: object


class Opaque:
    """No text of its own."""


def holding(value):
    """An identity as an equation that keeps a static value, as libraries with primitives of their own do."""
    keeping = jax_local.primitive("keeping", lambda x, **_: [x])
    return lambda x: keeping.bind(x, kept=value)[0]


def doubled(x):
    return x * 2


VALUES = {
    "a function": lambda: doubled,
    "a closure": lambda: lambda x: x,
    "a dataclass with a function": lambda: Solver(1e-3, lambda x: x + 1),
    "an object": Opaque,
    "a tree with functions": lambda: jax.tree.structure(jax.tree_util.Partial(lambda x: x, jnp.zeros(2))),
    "sets of names": lambda: frozenset({"data", "model", "expert"}),
    "numbers and types": lambda: ((1, None), (jnp.float32, np.dtype("int8")), 2.0, True),
}


def prints():
    x = jnp.zeros((3, 3))
    return {name: jaxpr_fingerprint(jax.make_jaxpr(holding(make()))(x)) for name, make in VALUES.items()}


@pytest.mark.slow
def test_they_are_equal_in_every_trace_and_process():
    found = prints()
    assert found == prints()
    assert len(set(found.values())) == len(found)
    other = python("from tests.frontend.test_fingerprints import prints\nprint(prints())")
    assert other.stdout.strip() == str(found), other.stderr


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda x: x + 1, lambda x: x + 2),
        (lambda x: x + np.arange(3000), lambda x: x + np.arange(3000)[::-1]),
        (lambda x: x + x, lambda x: x * x),
        (lambda x: (x + 1, x * 2), lambda x: (x * 2, x + 1)),
        (holding(1e-3), holding(1e-4)),
        (holding(lambda x: x + 1), holding(lambda x: x + 2)),
        (holding(Solver(1e-3, doubled)), holding(Solver(1e-4, doubled))),
        (jax.jit(lambda x: jnp.sin(x)), jax.jit(lambda x: jnp.cos(x))),
    ],
)
def test_two_computations_have_two(one, other):
    x = jnp.zeros(3000, jnp.int32)
    a, b = jax.make_jaxpr(one)(x), jax.make_jaxpr(other)(x)
    assert jaxpr_fingerprint(a) != jaxpr_fingerprint(b)


def test_modules_have_a_fingerprint_of_their_own():
    def of(outer, inner):
        def called(x):
            with jax.named_scope(inner):
                return jnp.sin(x)

        def step(x):
            with jax.named_scope(outer):
                return jax.jit(called)(x) + 1

        jaxpr = jax.make_jaxpr(step)(1.0)
        return jaxpr_fingerprint(jaxpr), module_fingerprint(jaxpr)

    first = of("encoder", "dense")
    assert of("encoder", "dense") == first
    for changed in (of("decoder", "dense"), of("encoder", "embedding")):
        assert (changed[0] == first[0], changed[1] == first[1]) == (True, False)


def test_the_first_equation_that_differs_is_named_with_its_line():
    def computed(scale):
        def inside(x):
            return jnp.tanh(x) * scale

        return jax.make_jaxpr(lambda x: jax.jit(inside)(x + 1))(jnp.zeros(3))

    assert first_difference(computed(2.0), computed(2.0)) == ""
    assert first_difference(computed(2.0), computed(3.0)).startswith("mul at ")
    assert "frontend/test_fingerprints.py" in first_difference(computed(2.0), computed(3.0))


def solving_step(state, batch):
    """A step whose equations keep objects that are new in each trace."""

    def loss(state):
        return mlp_loss({**state, "bias": holding(Solver(1e-3, lambda x: x))(state["bias"])}, batch)

    value = loss(state)
    return jax.tree.map(lambda p: p - 0.1 * value, state), value


CACHED = """
import autopar, logging, sys
from tests.frontend.test_fingerprints import solving_step
from tests.small_steps import mlp_batch, new_mlp_state, slow_cluster
logging.basicConfig(level=logging.WARNING)
step = autopar.parallelize(solving_step, cluster=slow_cluster(2))
step.plan(new_mlp_state(), mlp_batch())
print("graph" in step.last_progress.spent_s)
"""


@pytest.mark.slow
def test_plans_of_such_steps_come_from_the_cache_of_another_process(tmp_path):
    first, second = (python(CACHED, cache=tmp_path, devices=2) for _ in range(2))
    assert (first.stdout.strip(), second.stdout.strip()) == ("True", "False"), first.stderr + second.stderr
    assert "differ" not in first.stderr


def test_such_a_step_is_not_taken_for_impure(caplog):
    parallel = autopar.parallelize(solving_step, cluster=slow_cluster(2), cache_dir=None)
    _, loss = parallel(new_mlp_state(), mlp_batch())
    np.testing.assert_allclose(loss, jax.jit(solving_step)(new_mlp_state(), mlp_batch())[1], rtol=1e-5)
    assert not [r for r in caplog.records if "traces" in r.message]


def test_checkify_runs():
    def step(state, batch):
        def loss(state):
            checkify.check(jnp.all(state["first"] < 9.0), "too large")
            return mlp_loss(state, batch)

        error, (value, grads) = checkify.checkify(jax.value_and_grad(loss))(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value, error

    parallel = autopar.parallelize(step, cluster=slow_cluster(2), cache_dir=None)
    _, loss, error = parallel(new_mlp_state(), mlp_batch())
    np.testing.assert_allclose(loss, mlp_loss(new_mlp_state(), mlp_batch()), rtol=1e-5)
    assert error.get() is None
    _, _, error = parallel(new_mlp_state() | {"first": jnp.full((32, 64), 10.0)}, mlp_batch())
    assert "too large" in error.get()
