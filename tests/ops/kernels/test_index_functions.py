"""Functions of one index, known by their values, whatever the operations are by which they are computed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.common import jax_compat
from autopar.ir.graph import Constant, Op, OpKind, Role
from autopar.ops.kernels.index_functions import Known, constant, known_of


def known(function, size, *more):
    """What is known of a function's result where its operand is an index of `size` places."""
    jaxpr = jax_compat.plain_jaxpr(function, jnp.zeros(size, jnp.int32), *more)
    found = {jaxpr.invars[0]: Known(source="places", table=np.arange(size, dtype=np.int32))}

    def walk(inner, env):
        for eqn in inner.eqns:
            of = [Constant(v) if isinstance(v, jax_compat.Literal) else v for v in eqn.invars]
            reads = [constant(a) if isinstance(a, Constant) else env.get(a) for a in of]
            if (called := eqn.params.get("jaxpr")) is not None:
                body = jax_compat.open_jaxpr(called)
                inside = dict(zip(body.invars, reads, strict=True))
                walk(body, inside)
                env.update(zip(eqn.outvars, (inside.get(v) for v in body.outvars), strict=True))
                continue
            op = Op(
                id=0, kind=OpKind.EQUATION, primitive=eqn.primitive.name, eqn=eqn, inputs=(), outputs=(0,), rule=None,
                role=Role.FORWARD, module="", count=1.0,
            )  # fmt: skip
            env[eqn.outvars[0]] = known_of(op, reads, tuple(eqn.outvars[0].aval.shape))

    walk(jaxpr, found)
    return found[jaxpr.outvars[0]]


@pytest.mark.parametrize(
    ("function", "table"),
    [
        (lambda i: i // 3, np.arange(12) // 3),
        (lambda i: jnp.clip(i, 2, 7)[:, None], np.clip(np.arange(12), 2, 7)),
        (lambda i: jnp.where(i < 0, i + 12, i).reshape(3, 4), np.arange(12)),
        (lambda i: (i % 5).astype(jnp.int8), np.arange(12) % 5),
    ],
)
def test_a_function_is_known_by_its_values(function, table):
    assert known(function, 12).is_same(table)


def test_a_row_of_zeros_and_ones_for_each_index():
    found = known(lambda i: jax.nn.one_hot(i, 12, dtype=jnp.int32), 12)
    np.testing.assert_array_equal(found.table, np.eye(12))
    assert found.wide == 1


@pytest.mark.parametrize(
    "function",
    [
        lambda i: i + jnp.arange(12),
        lambda i: jnp.cumsum(i),
        lambda i: i[::-1],
        lambda i: jnp.broadcast_to(i, (2, 12)).T,
        lambda i: jax.lax.select_n(i // 4, i, i + 1, i + 2),
    ],
    ids=["by its place", "a sum", "in another order", "repeated", "of three cases"],
)
def test_other_functions_are_not(function):
    found = known(function, 12)
    assert found is None or not found.is_same(found.table)


def test_numbers_of_many_rows_are_known_and_masks_are_not():
    assert known(lambda i: jnp.arange(1 << 23) // 2 % 4, 12) is not None
    assert known(lambda i: jnp.repeat(jnp.arange(1 << 22), 2), 12) is not None
    assert known(lambda i: jnp.arange(1 << 12) >= jnp.arange(1 << 12)[:, None], 12) is None
