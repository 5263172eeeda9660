"""What a call has to have in common with the last one to run its program: configuration, types, memory, threads."""

import contextlib
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.runtime.execute import MOST_IN_FLIGHT, InFlight
from tests import small_steps as steps
from tests.small_steps import grouped

RECIPES = {
    "one program": autopar.recipes.data_parallel(),
    "micro-batches": autopar.recipes.pipeline(1, num_microbatches=4),
    "two stages": autopar.recipes.pipeline(2, num_microbatches=4),
}


def parallel(function, recipe=RECIPES["one program"], **options):
    return autopar.parallelize(
        function, plan=recipe, cluster=steps.slow_cluster(), cache_dir=None, **grouped(**options)
    )


def assert_same(got, expected, tolerance: float = 1e-6) -> None:
    """Values, types and weak types."""
    steps.assert_close(got, expected, tolerance)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert (a.dtype, a.weak_type) == (b.dtype, b.weak_type)


# jax's configuration


def draw(state, batch):
    """Products whose precision is the configuration's, numbers whose type and bits are."""
    noise = jax.random.uniform(jax.random.key(7), batch.shape)
    return state + jnp.sum(batch @ batch.T) + jnp.sum(noise), (jnp.arange(3).sum(), jnp.mean(noise, 1))


CONFIGURATIONS = {
    "64 bits": lambda: jax.enable_x64(True),
    "precision": lambda: jax.default_matmul_precision("bfloat16"),
    "random bits": lambda: jax.threefry_partitionable(not jax.config.jax_threefry_partitionable),
}


@pytest.mark.cases(2)
@pytest.mark.parametrize("change", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_another_configuration_has_another_program(change):
    step, plain = parallel(draw, donate_argnums=()), jax.jit(draw)
    args = np.float32(1), np.linspace(0, 1, 64, dtype=np.float32).reshape(16, 4)
    before = plain(*args)
    assert_same(step(*args), before)
    with change():
        assert_same(step(*args), plain(*args))
        assert_same(step(*args), plain(*args))  # and on the fast path
    assert_same(step(*args), before)
    assert len(step._compiled) == 2


def test_keys_are_drawn_from_as_the_configuration_has_it():
    """The jaxpr is the same, and the sharding rules are not."""
    noisy = lambda state, batch, key: (state + jax.random.normal(key, state.shape), jnp.sum(batch))
    options = dict(plan=autopar.recipes.zero(3), cache_dir=None, donate_argnums=())
    step, plain = autopar.parallelize(noisy, **grouped(**options)), jax.jit(noisy)
    args = jnp.ones((16, 16)), jnp.ones((16, 16)), jax.random.key(5)
    for change in (contextlib.nullcontext, CONFIGURATIONS["random bits"]):
        with change():
            assert_same(step(*args), plain(*args))


def test_the_precision_of_products_is_in_the_program():
    step = parallel(lambda state, batch: (state, batch @ batch.T), donate_argnums=())
    args = np.float32(1), np.ones((16, 4), np.float32)
    assert "bf16" not in step.compile(*args).traced.jaxpr.pretty_print().lower()
    with jax.default_matmul_precision("bfloat16"):
        (product,) = [e for e in step.compile(*args).traced.jaxpr.eqns if e.primitive.name == "dot_general"]
        assert product.params["precision"] == (jax.lax.Precision.DEFAULT,) * 2


# Memory


def distilled(state, batch, teacher):
    """The student comes nearer to the teacher as well."""

    def loss(state):
        apart = [jnp.mean((a - b) ** 2) for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(teacher), strict=True)]
        return steps.mlp_loss(state, batch) + sum(apart)

    value, grads = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value


def in_new_arrays(tree):
    """Other arrays of the same memory."""
    return jax.tree.map(
        lambda x: jax.make_array_from_single_device_arrays(x.shape, x.sharding, [s.data for s in x.addressable_shards]),
        tree,
    )


@pytest.mark.cases(1)
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_what_is_donated_and_given_once_more_is_copied(recipe):
    step, plain, batch = parallel(distilled, recipe), jax.jit(distilled), steps.mlp_batch()
    state, expected = steps.new_mlp_state(), steps.new_mlp_state()
    for _ in range(3):  # the very same arrays, on the slow path and on the fast one
        teacher = state
        state, loss = step(state, batch, state)
        expected, expected_loss = plain(expected, batch, expected)
        steps.assert_close((state, loss), (expected, expected_loss))
        assert not any(x.is_deleted() for x in jax.tree.leaves(teacher))
    alias = in_new_arrays(state)
    state, loss = step(state, batch, alias)
    steps.assert_close((state, loss), plain(expected, batch, expected))
    assert not any(x.is_deleted() for x in jax.tree.leaves(alias))
    steps.assert_close(alias, expected)


def test_two_donated_leaves_of_one_memory():
    def step_of_both(state, batch):
        return jax.tree.map(lambda x: x + jnp.sum(batch), state), jnp.sum(batch)

    step, batch = parallel(step_of_both), np.ones(16, np.float32)
    state = {"a": jnp.ones(8), "b": jnp.zeros(8)}
    state, _ = step(state, batch)
    state = {"a": state["a"], "b": in_new_arrays(state["a"])}
    state, _ = step(state, batch)
    steps.assert_close(state, {"a": np.full(8, 33.0), "b": np.full(8, 33.0)})


def test_a_constant_of_the_step_that_is_donated_too():
    first = steps.new_mlp_state()

    def anchored(state, batch):
        apart = sum(jnp.sum((a - b) ** 2) for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(first), strict=True))
        return jax.tree.map(lambda p: 0.9 * p, state), apart + jnp.sum(batch)

    step, plain, batch = parallel(anchored), jax.jit(anchored), np.ones(16, np.float32)
    expected = jax.tree.map(jnp.copy, first)
    plain(expected, batch)
    state = jax.tree.map(jax.device_put, first, step.plan(first, batch).state_shardings)
    for _ in range(3):
        state, apart = step(state, batch)
        expected, expected_apart = plain(expected, batch)
        steps.assert_close((state, apart), (expected, expected_apart))


# Threads, and what is in flight


def test_two_threads_may_run_steps_at_once():
    train, other = parallel(steps.mlp_step), parallel(steps.mlp_step, RECIPES["two stages"])
    batch = steps.mlp_batch()
    expected = steps.new_mlp_state()
    for _ in range(20):
        expected, _ = jax.jit(steps.mlp_step)(expected, batch)
    found = {}

    def run(name, step):
        state = steps.new_mlp_state()
        for _ in range(20):
            state, _ = step(state, batch)
        found[name] = state

    threads = [threading.Thread(target=run, args=(i, step)) for i, step in enumerate((train, train, other, other))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert sorted(found) == [0, 1, 2, 3]
    for state in found.values():
        steps.assert_close(state, expected)


UNREAD = """
import jax
import autopar
from tests import small_steps as steps

for recipe in (autopar.recipes.data_parallel(), autopar.recipes.pipeline(1, num_microbatches=2)):
    step = autopar.parallelize(
        steps.mlp_step, plan=recipe, cluster=steps.slow_cluster(), cache_dir=None
    )
    state, batch = steps.new_mlp_state(), steps.mlp_batch()
    state, _ = step(state, batch)
    batch = step.put_batch(batch)
    for _ in range(300):
        state, _ = step(state, batch)
    jax.block_until_ready(state)
print("ran")
"""


@pytest.mark.slow
def test_steps_of_which_no_result_is_read():
    """XLA's CPU client hangs, and ends the process after 40 s, with more than 32 programs in flight."""
    child = steps.python(UNREAD)
    assert child.stdout == "ran\n", child.stderr[-2000:]


class Made:
    """Stands for an array that a program makes."""

    def __init__(self) -> None:
        self.deleted, self.waited_for = False, False

    def is_deleted(self) -> bool:
        return self.deleted

    def block_until_ready(self) -> None:
        self.waited_for = True


def test_the_oldest_program_in_flight_is_waited_for():
    in_flight, made = InFlight(), [Made() for _ in range(40)]
    for i, array in enumerate(made):
        in_flight.add(array)
        assert [x.waited_for for x in made] == [n < i + 1 - MOST_IN_FLIGHT for n in range(40)]


def test_nothing_is_held_for_what_is_drained():
    in_flight, array = InFlight(), jnp.zeros(4)
    in_flight.add(array)
    alive = weakref.ref(array)
    del array
    assert alive() is not None
    in_flight.drain()
    assert alive() is None


def test_programs_that_were_all_taken_over_are_bounded_too():
    """A step whose only result is its state: each array is gone when the next program is handed out."""
    in_flight, made = InFlight(), [Made() for _ in range(100)]
    last = 0
    for i, array in enumerate(made):
        in_flight.add(array)
        array.deleted = True
        last = i if array.waited_for else last
        assert i - last <= 2 * MOST_IN_FLIGHT + 1


def test_an_array_that_was_donated_but_for_a_part_that_numpy_views():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    array = jax.device_put(jnp.arange(3), jax.NamedSharding(mesh, jax.P()))
    view = np.asarray(array)
    jax.jit(lambda x: x + 1, donate_argnums=0)(array)
    assert not array.is_deleted()
    assert any(shard.data.is_deleted() for shard in array.addressable_shards)
    in_flight = InFlight(most=1)
    for noted in (array, jnp.zeros(1), array):
        in_flight.add(noted)
    in_flight.drain()
    assert view.tolist() == [0, 1, 2]
