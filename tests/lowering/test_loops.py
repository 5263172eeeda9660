"""Loops that `vmap` made, sums of loops that stay partial, and random keys from around the step, under plans."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.xla_metadata import set_xla_metadata

import autopar
from autopar import recipes
from tests.small_steps import assert_close


def halved_while_large(x):
    """Each example leaves the loop by itself; `vmap` makes the condition one for each."""

    def one(x, key):
        goes_on, half = (lambda c: c[0].sum() > 0.5), (lambda c: (c[0] * 0.5, jax.random.split(c[1], 2)[0], c[2] + 1))
        made, key, turns = jax.lax.while_loop(goes_on, half, (x, key, 0))
        return made + jax.random.uniform(key), turns

    return jax.vmap(one)(x, jax.random.split(jax.random.key(1), len(x)))


@pytest.mark.parametrize("recipe", [None, recipes.data_parallel()], ids=["search", "data parallel"])
def test_a_while_loop_with_a_condition_for_each_example(recipe):
    def step(state, x):
        made, turns = halved_while_large(x)
        return state + made.sum(), (made, turns)

    step_on_devices = autopar.parallelize(
        step, plan=recipe, cluster=autopar.Cluster.local(4), cache_dir=None, donate_argnums=()
    )
    arguments = jnp.zeros(()), jnp.arange(16.0).reshape(8, 2)
    expected = jax.jit(step)(*arguments)
    assert len(set(expected[1][1].tolist())) > 2  # they leave after different numbers of turns
    assert_close(step_on_devices(*arguments), expected)


def test_such_a_loop_in_micro_batches():
    """The examples of a micro-batch leave it by themselves too."""

    def step(weights, x):
        def loss(weights):
            halved = jax.vmap(lambda row: jax.lax.while_loop(lambda r: r.sum() > 0.5, lambda r: r * 0.5, row))(x)
            made = jnp.tanh(jax.lax.stop_gradient(halved) @ weights)
            return jnp.square(made).mean(), made

        (value, made), gradient = jax.value_and_grad(loss, has_aux=True)(weights)
        return weights - 0.1 * gradient, (value, made)

    step_on_devices = autopar.parallelize(
        step, search=autopar.Search(num_microbatches=2), cluster=autopar.Cluster.local(2), cache_dir=None,
        donate_argnums=(),
    )  # fmt: skip
    arguments = jax.random.normal(jax.random.key(0), (2, 4)), jnp.arange(16.0).reshape(8, 2)
    assert_close(step_on_devices(*arguments), jax.jit(step)(*arguments))


def summed_by_a_scan(first):
    def total(weights, x):
        return jax.lax.scan(lambda total, x: (total + jnp.sum(x @ weights), None), first, x)[0]

    return total


def summed_by_a_while_loop(weights, x):
    return jax.lax.while_loop(lambda c: c[0] < 4, lambda c: (c[0] + 1, c[1] + jnp.sum(x[0] @ weights)), (0, 2.0))[1]


def summed_or_a_number(weights, x):
    return jax.lax.cond(weights[0, 0] > 0.0, lambda: jnp.sum(x @ weights), lambda: 3.0)


def begun_again(weights, x):
    """The body hands a number on in place of the sum of the trip."""
    return jax.lax.scan(lambda total, x: (5.0, total + jnp.sum(x @ weights)), 2.0, x)[1].sum()


@pytest.mark.parametrize(
    "total",
    [summed_by_a_scan(0.0), summed_by_a_scan(2.0), summed_by_a_while_loop, summed_or_a_number, begun_again],
    ids=["scan from 0", "scan from 2", "while", "cond", "begun again"],
)
def test_a_sum_over_the_examples_that_begins_with_a_number(total):
    """Each device adds up a part of the sum: the number is in one of the parts."""

    def step(weights, batch):
        return weights, total(weights, batch.swapaxes(0, 1))

    step_on_devices = autopar.parallelize(
        step, plan=recipes.data_parallel(), cluster=autopar.Cluster.local(4), cache_dir=None,
        donate_argnums=(),
    )  # fmt: skip
    for sign in (1, -1):
        arguments = sign * jnp.ones((3, 2)), jnp.arange(120.0).reshape(8, 5, 3)
        assert_close(step_on_devices(*arguments), jax.jit(step)(*arguments))


def test_typed_keys_in_the_batch():
    def step(number, keys):
        return number + 1, jax.vmap(lambda key: jax.random.normal(key, (4,)))(keys)

    step_on_devices = autopar.parallelize(
        step, cluster=autopar.Cluster.local(2), plan=recipes.data_parallel(), cache_dir=None,
        donate_argnums=(),
    )  # fmt: skip
    arguments = jnp.int32(3), jax.random.split(jax.random.key(0), 8)
    assert_close(step_on_devices(*arguments), jax.jit(step)(*arguments))


def test_a_typed_key_from_around_the_step():
    key = jax.random.key(0)

    def step(number, x):
        return number + 1, x * jax.random.normal(jax.random.fold_in(key, number), x.shape)

    step_on_devices = autopar.parallelize(step, cluster=autopar.Cluster.local(2), cache_dir=None, donate_argnums=())
    arguments = jnp.int32(3), jnp.ones((8, 4))
    assert_close(step_on_devices(*arguments), jax.jit(step)(*arguments))


W = np.linspace(-0.3, 0.4, 8 * 16, dtype=np.float32).reshape(8, 16)
X = np.sin(np.arange(8 * 3 * 8, dtype=np.float32)).reshape(8, 3, 8)


def scanned(w, x, start):
    return jax.lax.scan(lambda a, h: (a + jnp.square(h @ w).sum(), None), start, x.swapaxes(0, 1))[0]


def in_a_tuple(w, x, start):
    def body(carry, h):
        rows, total = carry
        return (rows + jnp.tanh(h @ w), total + jnp.square(rows).sum()), None

    rows, total = jax.lax.scan(body, (jnp.zeros((8, 16)), start), x.swapaxes(0, 1))[0]
    return total + jnp.square(rows).sum()


def counted(w, x, start):
    return jax.lax.fori_loop(0, 3, lambda i, a: a + jnp.square(x[:, i] @ w).sum(), start)


@pytest.mark.cases(3)
@pytest.mark.parametrize("loss", [scanned, in_a_tuple, counted])
@pytest.mark.parametrize("start", [0.0, 2.5, jnp.zeros(())])
@pytest.mark.parametrize("plan", [recipes.data_parallel(), recipes.zero(3), recipes.combine(dp=4, tp=2)])
def test_a_literal_to_which_a_loop_adds_sums(loss, start, plan):
    def step(w, x):
        value, gradient = jax.value_and_grad(loss)(w, x, start)
        return w - 0.1 * gradient, value

    expected = jax.jit(step)(W, X)
    seen = autopar.parallelize(step, plan=plan, cache_dir=None)(W, X)
    for a, b in zip(expected, seen, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5)
        assert (a.dtype, a.weak_type) == (b.dtype, b.weak_type)


@pytest.mark.parametrize("turns", [1, 3])
def test_metadata_for_xla_stays_with_a_loop(turns):
    """As MaxText's, by which a loop of one turn stays one, and what is computed again in it is not what was before."""

    def step(w, x):
        def loss(w):
            with set_xla_metadata(**{"skip-simplify-while-loops_trip-count-one": "true"}):
                turn = jax.checkpoint(lambda h, _: (jnp.tanh(h @ w)[:, :8], None), prevent_cse=False)
                return jnp.square(jax.lax.scan(turn, x[:, 0], None, length=turns)[0]).mean()

        value, gradient = jax.value_and_grad(loss)(w)
        return w - 0.1 * gradient, value

    expected = jax.jit(step)(W, X)
    step_on_devices = autopar.parallelize(step, plan=recipes.data_parallel(), cache_dir=None)
    loops = [line for line in step_on_devices.lower(W, X).as_text().splitlines() if "stablehlo.while" in line]
    assert len(loops) == 2
    assert all('"skip-simplify-while-loops_trip-count-one" = "true"' in loop for loop in loops)
    assert_close(step_on_devices(W, X), expected)


@pytest.mark.parametrize(("inner", "loops"), [(True, 2), (False, 0)], ids=["of loops", "of none"])
def test_a_scan_is_unrolled_where_its_body_has_no_loops(inner, loops):
    def step(total, x):
        def turn(h, row):
            return jax.lax.fori_loop(0, 5, lambda _, h: jnp.tanh(h + row), h) if inner else jnp.tanh(h + row), None

        return total + jax.lax.scan(turn, jnp.zeros(8), x.swapaxes(0, 1).sum(1), unroll=3)[0].sum()

    expected = jax.jit(step)(jnp.zeros(()), X)
    step_on_devices = autopar.parallelize(step, plan=recipes.data_parallel(), cache_dir=None, donate_argnums=())
    assert step_on_devices.lower(jnp.zeros(()), X).as_text().count("stablehlo.while") == loops
    assert_close(step_on_devices(jnp.zeros(()), X), expected)
