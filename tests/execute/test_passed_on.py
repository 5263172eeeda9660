"""Pipelines and micro-batches: results that are arguments, and arguments that the first task does not see."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import recipes
from tests.small_steps import assert_close, grouped

FORMS = {
    "micro-batches": {"num_microbatches": 2},
    "stages": {"plan": recipes.pipeline(2, num_microbatches=2)},
}
OF_ALL_FORMS = pytest.mark.parametrize("options", FORMS.values(), ids=FORMS)


def parallel(function, options, **more):
    return autopar.parallelize(function, cache_dir=None, **grouped(**options, **more))


def new_state():
    return {"a": jnp.eye(16) * 0.5, "b": jnp.eye(16) * 0.5, "n": jnp.int32(0), "rate": jnp.float32(0.1)}


def new_batch():
    return {"x": np.sin(np.arange(256, dtype=np.float32)).reshape(16, 16)}


def updated(state, batch, scale=1.0):
    def loss(a, b):
        return scale * jnp.mean((jnp.tanh(batch["x"] @ a) @ b) ** 2)

    value, (a, b) = jax.value_and_grad(loss, (0, 1))(state["a"], state["b"])
    new = {"a": state["a"] - state["rate"] * a, "b": state["b"] - state["rate"] * b}
    return new | {"n": state["n"] + 1, "rate": state["rate"]}, value


@OF_ALL_FORMS
def test_results_that_are_arguments_are_arrays_of_their_own(options):
    def step(state, batch):
        new, loss = updated(state, batch)
        return new, {"loss": loss} | {name: batch[name] for name in ("x", "ids", "share", "count")}

    one, jitted = parallel(step, options), jax.jit(step)
    batch = new_batch() | {"x": new_batch()["x"].astype(np.float64), "ids": np.arange(16), "share": 0.5, "count": 3}
    state, plain = new_state(), new_state()
    for _ in range(3):
        (state, seen), expected = one(state, batch), jitted(plain, batch)
        plain = expected[0]
        assert_close((state, seen), expected)
        avals = [(x.dtype, x.weak_type) for x in jax.tree.leaves(seen)]
        assert avals == [(x.dtype, x.weak_type) for x in jax.tree.leaves(expected[1])]
    batch["ids"][:] = 7
    assert_close(seen["ids"], np.arange(16))


@OF_ALL_FORMS
def test_results_that_are_state_outlive_it(options):
    def evaluate(state, batch):  # of one layer, which makes one stage
        return {"n": state["n"], "a": state["a"], "mean": jnp.mean(batch["x"] @ state["b"])}

    train = parallel(updated, options)
    evaluation = autopar.parallelize(
        evaluate, search=autopar.Search(num_microbatches=2), donate_argnums=(), cache_dir=None
    )
    state, _ = train(new_state(), new_batch())
    seen = []
    for _ in range(3):
        seen.append(evaluation(state, new_batch()))
        state, _ = train(state, new_batch())
    assert [int(each["n"]) for each in seen] == [1, 2, 3]
    assert not any(each["a"].is_deleted() for each in seen)


@pytest.mark.cases(1)
@OF_ALL_FORMS
def test_an_argument_of_which_only_the_type_matters(options):
    def step(state, batch):
        half = jnp.float32(batch["like"].dtype == jnp.bfloat16)
        new, loss = updated(state, batch, 1 / batch["window"].shape[0])
        return new, {"loss": loss, "half": half}

    one, jitted, state, plain = parallel(step, options), jax.jit(step), new_state(), new_state()
    first = new_batch() | {"window": jnp.zeros(4), "like": jnp.zeros(16)}
    other = new_batch() | {"window": jnp.zeros(64), "like": jnp.zeros(16, jnp.bfloat16)}
    for batch in (first, first, other, first):
        (state, seen), (plain, expected) = one(state, batch), jitted(plain, batch)
        assert_close((state, seen), (plain, expected))


@pytest.mark.cases(1)
@OF_ALL_FORMS
@pytest.mark.parametrize(
    "change",
    [
        lambda rate: jax.device_put(rate, jax.devices()[1]),
        lambda rate: np.float64(0.2),
        lambda rate: rate.astype(jnp.bfloat16),
        lambda rate: jnp.full(16, rate),
    ],
    ids=["another device", "a number", "another type", "another shape"],
)
def test_a_leaf_of_the_state_that_was_changed_by_hand(options, change):
    """The last task reads it, when the first ones have taken over the rest of the state."""
    one, jitted = parallel(updated, options), jax.jit(updated)
    state, expected = new_state(), new_state()
    for _ in range(2):
        (state, _), (expected, _) = one(state, new_batch()), jitted(expected, new_batch())
    state, expected = ({**each, "rate": change(each["rate"])} for each in (state, expected))
    for _ in range(2):
        (state, _), (expected, _) = one(state, new_batch()), jitted(expected, new_batch())
    assert_close(state, expected)


@pytest.mark.cases(1)
@OF_ALL_FORMS
def test_a_compiled_step_takes_arrays_as_those_of_jit_do(options):
    """On no device in particular it places them; those on another one it refuses before the first task runs."""
    compiled = parallel(updated, options).compile(new_state(), new_batch())
    expected = jax.jit(updated)(new_state(), new_batch())
    assert_close(compiled(new_state(), new_batch()), expected)
    placed = jax.device_put((new_state(), new_batch()), compiled.shardings)
    elsewhere = jax.device_put(jnp.float32(0.1), jax.devices()[1])
    for wrong, got in (jnp.full(16, 0.1), r"float32\[16\]"), (elsewhere, r"float32\[\] in Single"):
        with pytest.raises(TypeError, match=rf"state\['rate'\]: expected float32\[\] .* got {got}"):
            compiled({**placed[0], "rate": wrong}, placed[1])
    assert not any(x.is_deleted() for x in jax.tree.leaves(placed))
    assert_close(compiled(*placed), expected)


@pytest.mark.cases(2)
@pytest.mark.parametrize("options", [{}, *FORMS.values()], ids=["one program", *FORMS])
def test_an_array_in_two_places_of_a_compiled_step(options):
    array = np.asarray(jnp.eye(16) * 0.5)
    compiled = parallel(updated, options).compile(new_state(), new_batch())
    expected = jax.jit(updated)({**new_state(), "a": array, "b": array}, {"x": array})
    shared = jnp.array(array)
    assert_close(compiled({**new_state(), "a": shared, "b": shared}, {"x": shared}), expected)


@pytest.mark.cases(2)
@pytest.mark.parametrize("options", [{}, *FORMS.values()], ids=["one program", *FORMS])
def test_an_array_of_the_code_that_is_deleted_later(options):
    scale = jnp.full((16, 16), 0.5)

    def step(state, batch):
        return updated(state, {"x": batch["x"] * scale})

    one = parallel(step, options)
    state, expected = one(new_state(), new_batch())[0], jax.jit(step)(new_state(), new_batch())[0]
    expected = jax.jit(step)(expected, new_batch())
    scale.delete()
    assert_close(one(state, new_batch()), expected)


@pytest.mark.cases(1)
@OF_ALL_FORMS
def test_types_of_64_bits_in_the_code_of_a_step(options):
    def step(state, batch):
        with jax.enable_x64(True):
            tokens = jnp.sum(batch["tokens"].astype(jnp.int64) * 1_000_000_000)
        return *updated(state, batch), tokens

    batch = new_batch() | {"tokens": np.full(16, 7, np.int32)}
    expected = jax.jit(step)(new_state(), batch)
    seen = parallel(step, options)(new_state(), batch)
    assert (seen[2].dtype, int(seen[2])) == (expected[2].dtype, 112_000_000_000)
    assert_close(seen, expected)


@pytest.mark.parametrize("options", [{}, FORMS["micro-batches"]], ids=["one program", "micro-batches"])
def test_arrays_that_share_a_buffer_in_a_compiled_step(options):
    compiled = parallel(updated, options).compile(new_state(), new_batch())
    state, batch = jax.device_put((new_state(), new_batch()), compiled.shardings)
    expected = jax.jit(updated)({**new_state(), "b": new_state()["a"]}, new_batch())
    shards = [shard.data for shard in state["a"].addressable_shards]
    state["b"] = jax.make_array_from_single_device_arrays((16, 16), state["a"].sharding, shards)
    assert_close(compiled(state, batch), expected)
