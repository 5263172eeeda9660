"""What primitives multiply, as counted by hand; in which operands they are linear."""

import jax
import jax.numpy as jnp
import pytest

from autopar.common.jax_compat import struct
from autopar.ir.primitives import linear_operands, multiplications


def convolved(stride, groups=1):
    def run(images, kernel):
        return jax.lax.conv_general_dilated(
            images, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )  # fmt: skip

    return run


def gradients(stride):
    def run(images, kernel):
        result, back = jax.vjp(convolved(stride), images, kernel)
        return back(jnp.ones_like(result))

    return run


def ragged(rows, matrices):
    return jax.lax.ragged_dot(rows, matrices, jnp.array([2, 3, 3], jnp.int32))


def counted(function, *shapes):
    made = jax.make_jaxpr(function)(*(struct(shape, "float32") for shape in shapes))
    return [m for eqn in made.jaxpr.eqns if (m := multiplications(eqn)) is not None]


@pytest.mark.parametrize(
    ("function", "shapes", "expected"),
    [
        (lambda x, y: x @ y, ((6, 4), (4, 5)), [6 * 4 * 5]),
        (lambda x, y: jnp.einsum("bij,bkj->bik", x, y), ((2, 3, 4), (2, 5, 4)), [2 * 3 * 5 * 4]),
        (convolved(1), ((2, 8, 8, 3), (3, 3, 3, 4)), [2 * 64 * 4 * 27]),
        (convolved(2), ((2, 8, 8, 3), (3, 3, 3, 4)), [2 * 16 * 4 * 27]),
        (convolved(1, groups=4), ((2, 8, 8, 4), (3, 3, 1, 4)), [2 * 64 * 4 * 9]),
        # Forward, of the images and of the kernel: each position of the result meets each of the kernel once.
        (gradients(1), ((2, 8, 8, 3), (3, 3, 3, 4)), [2 * 64 * 4 * 27] * 3),
        (gradients(2), ((2, 8, 8, 3), (3, 3, 3, 4)), [2 * 16 * 4 * 27] * 3),
        (ragged, ((8, 4), (3, 4, 5)), [8 * 4 * 5]),
        # Forward, of the rows and of the groups' matrices: each row meets the matrix of its group.
        (lambda x, w: jax.vjp(ragged, x, w)[1](jnp.ones((8, 5))), ((8, 4), (3, 4, 5)), [8 * 4 * 5] * 3),
        (jnp.add, ((2, 3), (2, 3)), []),
    ],
)
def test_multiplications(function, shapes, expected):
    assert sorted(counted(function, *shapes)) == sorted(expected)


def last_equation(function, *dtypes):
    made = jax.make_jaxpr(function)(*(struct((4,), dtype) for dtype in dtypes))
    return made.jaxpr.eqns[-1]


def taking(**options):
    return lambda x: x.at[jnp.array([0, 9])].get(**options)


@pytest.mark.parametrize(
    ("function", "dtypes", "expected"),
    [
        (jax.lax.div, ("float32", "float32"), {0}),
        (jax.lax.div, ("int32", "int32"), None),
        (lambda x: x.astype(jnp.float32), ("bfloat16",), {0}),
        (lambda x: x.astype(jnp.bfloat16), ("float32",), None),
        (lambda x: x.astype(jnp.bfloat16), ("float16",), None),
        (lambda x: x.astype(jnp.float16), ("bfloat16",), None),
        (lambda x: x.astype(jnp.int32), ("float32",), None),
        (lambda x: x.astype(jnp.float32), ("int32",), None),
        (lambda x: x.astype(jnp.float32), ("int4",), None),
        (taking(mode="clip"), ("int32",), {0}),
        (taking(mode="fill", fill_value=0), ("int32",), {0}),
        (taking(mode="fill"), ("float32",), {0}),  # nan
        (taking(mode="fill"), ("int32",), None),  # the smallest number
        (taking(mode="fill", fill_value=1.0), ("float32",), None),
        (lambda x, y: jax.lax.dot(x, y), ("int8", "int8"), {0}),
        (lambda x, y: jax.lax.dot(x, y, preferred_element_type=jnp.int32), ("int8", "int8"), None),
        (lambda x, y: jax.lax.dot(x, y, preferred_element_type=jnp.float32), ("int8", "int8"), None),
        (lambda x, y: jax.lax.dot(x, y, preferred_element_type=jnp.float32), ("bfloat16", "bfloat16"), {0}),
    ],
)
def test_linear_operands(function, dtypes, expected):
    eqn = last_equation(function, *dtypes)
    found = linear_operands(eqn.primitive.name, eqn)
    assert found[:1] == ((frozenset(expected),) if expected else ())
