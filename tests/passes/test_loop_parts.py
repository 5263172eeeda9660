"""Scans over layers of which a part does not depend on the examples: penalties and counts, against plain `jax.jit`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import recipes
from autopar.errors import MixedExamplesError
from autopar.ir.graph import OpKind, walk
from tests.passes.test_microbatch import WIDTH, check, examples
from tests.small_steps import assert_close

LAYERS = 4
START = np.float32(0.75)


def layers() -> jax.Array:
    return 0.4 * jax.random.normal(jax.random.key(3), (LAYERS, WIDTH, WIDTH))


def trained(loss):
    def step(p, b):
        (value, out), grads = jax.value_and_grad(loss, has_aux=True)(p, b["x"])
        return p - 0.1 * grads, {"loss": value, "out": out}

    return step


def penalty_of_each_layer(p, x):
    h, s = jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w), jnp.square(w).sum()), x, p)
    return jnp.square(h).mean() + 0.1 * s.sum(), s


def carried_penalty(p, x):
    def body(carry, w):
        h, s = carry
        return (h + jnp.tanh(h @ w), s + jnp.square(w).sum()), None

    (h, s), _ = jax.lax.scan(body, (x, jnp.zeros(())), p)
    return jnp.square(h).mean() + jnp.sqrt(s), s


def penalty_on_examples_and_weights(p, x):
    """A sum over examples and what is the same for all of them, in one carried value; it does not start at zero."""

    def body(carry, w):
        h, s = carry
        h = h + jnp.tanh(h @ w)
        return (h, 0.9 * (s + jnp.square(h).mean()) + jnp.square(w).sum() + 0.25), None

    (h, s), _ = jax.lax.scan(body, (x, jnp.asarray(START)), p)
    return jnp.square(h).mean() + 0.1 * s, s


def recomputed(p, x):
    def body(h, w):
        return h + jnp.tanh(h @ w), jnp.square(w).sum()

    h, s = jax.lax.scan(jax.checkpoint(body), x, p)
    return jnp.square(h).mean() + 0.1 * s.sum(), None


def scan_in_a_scan(p, x):
    def body(carry, w):
        def twice(carry, _):
            h, s = carry
            h = jnp.tanh(h @ w)
            return (h, s + jnp.abs(h).mean(0) + jnp.square(w).sum(0)), None

        return jax.lax.scan(twice, carry, None, length=2)[0], None

    (h, s), _ = jax.lax.scan(body, (x, jnp.ones(WIDTH)), p)
    return jnp.square(h).mean() + 0.1 * s.sum(), s


def counted_layers(p, x):
    def body(carry, w):
        h, n, even = carry
        return (h + jnp.tanh(h @ w), n + 1, ~even), n

    (h, n, even), each = jax.lax.scan(body, (x, 0, True), p)
    return jnp.square(h).mean() / n, (n, even, each, 2 * n)


def sum_from_a_sum_over_inputs(p, x):
    def body(carry, w):
        h, s = carry
        return (h + jnp.tanh(h @ w), s + jnp.square(h).sum()), None

    (h, s), _ = jax.lax.scan(body, (x, 0.5 * x.sum()), p)
    return jnp.square(h).mean() + 0.1 * s, s


LOSSES = [
    penalty_of_each_layer, carried_penalty, penalty_on_examples_and_weights, recomputed, scan_in_a_scan, counted_layers,
    sum_from_a_sum_over_inputs,
]  # fmt: skip


@pytest.mark.cases(2)
@pytest.mark.parametrize("num_microbatches", [
    pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(6, marks=pytest.mark.slow)
])  # fmt: skip
@pytest.mark.parametrize("loss", LOSSES)
def test_what_all_micro_batches_share_counts_once(loss, num_microbatches):
    check(trained(loss), layers(), examples(12), num_microbatches)


def test_a_count_of_layers_is_made_once_without_the_layers():
    graph = check(trained(counted_layers), layers(), examples(), 4)
    (apart,) = [op for op in graph.block.ops if op.kind is OpKind.SCAN and not op.section.repeats]
    assert (apart.num_consts, apart.num_carry, len(apart.inputs), apart.count) == (0, 2, 2, 1.0)
    assert {op.primitive for op in walk(apart.blocks[0])} == {"add", "not"}


def test_half_precision_keeps_its_type():
    def loss(p, x):
        p, x = p.astype(jnp.bfloat16), x.astype(jnp.bfloat16)
        h, s = jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w), jnp.square(w).sum()), x, p)
        return jnp.square(h.astype(jnp.float32)).mean() + 0.1 * s.sum().astype(jnp.float32), s

    p, b = layers(), examples(12)
    step = autopar.parallelize(trained(loss), cache_dir=None, search=autopar.Search(num_microbatches=2))
    new, metrics = step(jnp.array(p), b)
    expected_new, expected = jax.jit(trained(loss))(p, b)
    assert metrics["out"].dtype == jnp.bfloat16
    assert_close(metrics, expected, 1e-2)
    assert_close(new - p, expected_new - p, 1e-2)


@pytest.mark.parametrize("recipe", [
    recipes.cut(recipes.data_parallel(), num_microbatches=2), recipes.pipeline(2, num_microbatches=4)
])  # fmt: skip
@pytest.mark.parametrize("loss", [penalty_of_each_layer, penalty_on_examples_and_weights, counted_layers])
@pytest.mark.slow
def test_on_devices(loss, recipe):
    args = layers(), examples(32)
    parallel = autopar.parallelize(trained(loss), plan=recipe, cache_dir=None)
    assert_close(parallel(*map(jnp.copy, args[:1]), args[1]), jax.jit(trained(loss))(*args))


def square_of_the_sum(s, h, w):
    return s**2 + jnp.square(h).mean() + jnp.square(w).sum()


def product_of_sum_and_penalty(s, h, w):
    return s + jnp.square(h).mean() * (1.0 + s)


def largest(s, h, w):
    return jnp.maximum(s, jnp.square(h).mean()) + jnp.square(w).sum()


@pytest.mark.parametrize("combine", [square_of_the_sum, product_of_sum_and_penalty, largest])
def test_what_is_not_linear_in_the_sum_is_refused(combine):
    def loss(p, x):
        def body(carry, w):
            h, s = carry
            h = h + jnp.tanh(h @ w)
            return (h, combine(s, h, w)), None

        (h, s), _ = jax.lax.scan(body, (x, jnp.asarray(START)), p)
        return jnp.square(h).mean() + 0.1 * s, s

    with pytest.raises(MixedExamplesError, match="mixes the examples"):
        check(trained(loss), layers(), examples())


def test_a_penalty_times_the_loss():
    """The gradient of the penalty is scaled by the loss of all examples."""

    def loss(p, x):
        value, s = penalty_of_each_layer(p, x)
        return value * s.sum(), None

    check(trained(loss), layers(), examples())


def test_a_count_of_examples_and_layers_is_no_share():
    """Integers have no parts: a count over examples that starts at one in each scan is made behind the loop."""

    def loss(p, x):
        def body(carry, w):
            h, n = carry
            return (h + jnp.tanh(h @ w), n + (h > 0).sum()), None

        (h, n), _ = jax.lax.scan(body, (x, 1), p)
        return jnp.square(h).mean(), n

    check(trained(loss), layers(), examples())
