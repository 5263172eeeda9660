"""Traces of a step on a batch and on a micro-batch that are not alike: the error says where, in words of the user."""

import jax
import jax.numpy as jnp
import pytest

from autopar.errors import UnsupportedError
from autopar.microbatch.smaller_step import with_literals_of


def test_results_of_a_scan_body_that_differ_are_told_by_their_types_and_the_line_of_the_scan():
    def step(x):
        def body(carry, _):
            made = jnp.tanh(carry)
            return made, made if len(x) > 2 else carry

        return jax.lax.scan(body, x, None, length=2)

    whole, part = (jax.make_jaxpr(step)(jnp.ones(n)) for n in (4, 2))
    with pytest.raises(UnsupportedError, match="a value of type float32") as caught:
        with_literals_of(whole, part, "step")
    assert "test_alignment.py:17" in caught.value.where
    assert "Var(" not in str(caught.value)
