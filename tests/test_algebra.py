"""What primitives multiply, as counted by hand."""

import jax
import jax.numpy as jnp
import pytest

from autopar.algebra import multiplications
from autopar.jax_compat import struct


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
        (jnp.add, ((2, 3), (2, 3)), []),
    ],
)
def test_multiplications(function, shapes, expected):
    assert sorted(counted(function, *shapes)) == sorted(expected)
