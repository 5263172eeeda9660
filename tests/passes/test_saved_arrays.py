"""Which activations are arrays that may wait elsewhere between the passes, and which follow from them."""

import jax
import jax.numpy as jnp
import pytest

from autopar.ir.semantics import annotate_semantics
from autopar.passes.saved_arrays import saved_arrays
from tests.sections import sectioned, traced_step

WIDTH, INNER, EXAMPLES = 4, 6, 8


def saved(hidden):
    """(primitive, rows of 4 or 6) of what is saved of two products with `hidden` between them."""

    def loss(params, batch):
        up, down = params
        return jnp.sum(((hidden(batch["x"] @ up)) @ down - batch["y"]) ** 2)

    def step(params, batch):
        gradients = jax.grad(loss)(params, batch)
        return [p - 0.1 * g for p, g in zip(params, gradients, strict=True)]

    params = [jnp.ones((WIDTH, INNER)), jnp.ones((INNER, WIDTH))]
    batch = {"x": jnp.ones((EXAMPLES, WIDTH)), "y": jnp.ones((EXAMPLES, WIDTH))}
    graph = annotate_semantics(sectioned(traced_step(step, params, batch)))
    maker = {v: op for op in graph.ops() for v in op.outputs}
    return sorted((maker[v].primitive, graph.values[v].shape[-1]) for v in saved_arrays(graph) if v in maker)


@pytest.mark.parametrize(
    ("hidden", "expected"),
    [
        # The products themselves are read: what is made of them elementwise is not saved beside them.
        (lambda x: x * jnp.sin(x), [("dot_general", 6)]),
        # Only what is made of the product is read, which would stay on the devices without it.
        (lambda x: jnp.sin(x * 3.0), [("cos", 6), ("sin", 6)]),
    ],
    ids=["read", "scaled"],
)
def test_of_a_product_what_is_read(hidden, expected):
    assert [each for each in saved(hidden) if each[1] == INNER] == expected
