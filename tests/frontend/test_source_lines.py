"""The line of the user's code that an operation of a graph names."""

import functools
import importlib
import inspect
import sys
import textwrap

import jax
import jax.numpy as jnp
import optax
import pytest

from autopar.common import jax_compat
from autopar.frontend.build_graph import build_graph
from autopar.frontend.tracing import trace
from autopar.ir.rules import RuleBook


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


PACKAGES = {
    "linted_wrappers": """
        import jax

        def wrapped(function):
            return lambda *args: jax.jit(function)(*args)
        """,
    "linted_layers": """
        import jax
        from linted_wrappers import wrapped

        @wrapped
        def dense(x, weights):
            return x @ weights

        def stacked(layer, x, stack, is_scanned):
            if is_scanned:
                return jax.lax.scan(lambda x, weights: (layer(x, weights), None), x, stack)[0]
            return layer(layer(x, stack[0]), stack[1])
        """,
    "linted_model": """
        import jax
        import jax.numpy as jnp
        import linted_layers
        import linted_wrappers

        def layer(x, weights):
            return linted_layers.dense(x.astype(jnp.bfloat16), weights).astype(jnp.float32)

        def step(stack, x, is_scanned, is_recomputed):
            made = jax.checkpoint(layer) if is_recomputed else layer
            return jax.grad(lambda stack: linted_layers.stacked(made, x, stack, is_scanned).sum())(stack)
        """,
}


@pytest.mark.parametrize("is_scanned", [False, True])
@pytest.mark.parametrize("is_recomputed", [False, True])
def test_of_installed_packages_the_one_that_imports_the_others_has_the_line(
    tmp_path, monkeypatch, is_scanned, is_recomputed
):
    """A model's, not that of layers of a library, nor of wrappers of another."""
    for name, code in PACKAGES.items():
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(code).lstrip())
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(jax_compat, "_INSTALLED", (f"{tmp_path}/", *jax_compat._INSTALLED))
    step = functools.partial(
        importlib.import_module("linted_model").step, is_scanned=is_scanned, is_recomputed=is_recomputed
    )
    args = [jax.ShapeDtypeStruct((2, 4, 4), jnp.float32), jax.ShapeDtypeStruct((4, 4), jnp.float32)]
    graph = build_graph(trace(step, args, names="ab", donate=(), batch=()), RuleBook())
    lines = {op.primitive: jax_compat.source_line(op.eqn) for op in graph.ops()}
    assert lines["dot_general"].startswith(f"{tmp_path}/linted_model.py:7:")
    assert {line.split(":")[0] for line in lines.values() if line} == {f"{tmp_path}/linted_model.py"}
