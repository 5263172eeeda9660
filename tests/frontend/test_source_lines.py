"""The line of the user's code that an operation of a graph names."""

import inspect

import jax
import jax.numpy as jnp
import optax

from autopar.common import jax_compat
from autopar.frontend.build_graph import build_graph
from autopar.frontend.tracing import trace
from autopar.sharding.rules import RuleBook


def lines_of(function, *shapes):
    """The lines of the operations of a step, counted from its `def`, and `?` for those that name another file."""
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    graph = build_graph(trace(function, args, names="abcd"[: len(args)], donate=(), batch=()), RuleBook())
    first = inspect.getsourcelines(function)[1]
    found = [jax_compat.source_line(op.eqn) for op in graph.ops()]
    return [int(line.split(":")[1]) - first if line.startswith(__file__) else "?" for line in found]


def test_a_function_of_jax_that_was_traced_before_has_the_line_of_each_call():
    def step(a):
        b = jnp.roll(a, 1)
        return jnp.roll(b, 1)

    assert sorted(set(lines_of(step, (4,)))) == [1, 2]


def test_operations_of_installed_packages_have_the_line_that_calls_them():
    def step(a):
        b = a + 1
        return optax.tree.norm({"a": b})

    assert set(lines_of(step, (4,))) == {1, 2}


def test_functions_of_the_step_that_a_library_calls_have_lines_of_their_own():
    def step(a):
        def inner(b):
            return b * 2

        return jax.jit(jax.checkpoint(inner))(a)

    assert set(lines_of(step, (4,))) == {2}


def test_a_step_of_an_installed_package_has_its_own_lines():
    args = [jax.ShapeDtypeStruct((4,), jnp.float32)]
    graph = build_graph(trace(optax.tree.norm, args, names="a", donate=(), batch=()), RuleBook())
    assert all("optax" in jax_compat.source_line(op.eqn) for op in graph.ops())
