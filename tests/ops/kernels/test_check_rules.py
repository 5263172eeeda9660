"""`autopar.verify` finds rules that let devices split what a kernel needs whole, whether the plan splits it or not."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.common import jax_compat
from autopar.errors import InvalidArgumentError
from autopar.ops.kernels.check_rules import check_rules


def check(fun, rule, *args, grad=(), **more):
    called = autopar.kernel(fun, rule, **more)
    step = jax.grad(lambda *xs: called(*xs).sum(), grad) if grad else called
    return check_rules(jax_compat.open_jaxpr(jax_compat.plain_jaxpr(step, *args)))


def rms_norm(x, w):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True)) * w


X, W = jnp.ones((4, 6, 8)), jnp.ones(8)


def test_verify_finds_a_rule_that_splits_what_the_kernel_needs_whole():
    norm = autopar.kernel(rms_norm, "b l w, w -> b l w")
    step = autopar.parallelize(lambda w, x: (w, norm(x, w)), cluster="local:2", cache_dir=None)
    with pytest.raises(InvalidArgumentError, match=r"2 parts along factor 'w' .* a largest difference of \d") as caught:
        autopar.verify(step, W, X)
    assert "test_check_rules.py:" in str(caught.value)
    assert "mark it [w]" in str(caught.value)


def test_a_true_rule_and_its_backward_pass_agree_in_parts():
    assert check(rms_norm, "b l [w], [w] -> b l [w]", X, W, grad=(0, 1)) == ()


def test_places_in_an_array_whose_examples_are_split():
    places, rows = jnp.zeros(4, int), jnp.ones((4, 8))
    with pytest.raises(InvalidArgumentError, match="factor 'b'"):
        check(lambda x, i: x[i], "b w, b -> b w", rows, places)
    assert check(lambda x, i: x[i], "[n] w, b -> b w", rows, places) == ()


def test_summands_are_added_up():
    a, b = jnp.ones((3, 8)), jnp.ones((8, 5))
    assert check(jnp.matmul, "m k, k n -> m n", a, b, summed=("k",)) == ()
    with pytest.raises(InvalidArgumentError, match="factor 'k' are added up"):
        check(lambda a, b: a @ b / a.shape[1], "m k, k n -> m n", a, b, summed=("k",))


def test_parts_that_the_kernel_does_not_take_are_no_error():
    def in_eights(x):
        if x.shape[0] % 8:
            raise ValueError("blocks of 8")
        return x - jnp.mean(x)

    assert check(in_eights, "b -> b", jnp.ones(8)) == ()
    with pytest.raises(InvalidArgumentError, match="factor 'b'"):
        check(in_eights, "b -> b", jnp.ones(16))


def test_a_kernel_that_does_not_run_here_is_named():
    def foreign(x):
        return jax.ffi.ffi_call("absent_target", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    (unchecked,) = check(foreign, "b -> b", jnp.ones(8))
    assert "kernel foreign at" in unchecked
    assert "factor 'b'" in unchecked


def test_numbers_that_differ_are_said_plainly():
    step = autopar.parallelize(lambda w, x: (w, x @ w), cluster="local:2", cache_dir=None)
    found = autopar.verify(step, jnp.eye(8), X)
    assert not found.differs
    assert "numbers: at most" in found.text()
    other = dataclasses.replace(found, difference=1e-2)
    assert other.differs
    assert "numbers differ: at most 1.00e-02" in other.text()
