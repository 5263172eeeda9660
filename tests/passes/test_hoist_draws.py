"""Random bits in a scan over layers: numbers against plain jit, in micro-batches and in stages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import recipes
from autopar.errors import MixedExamplesError
from autopar.frontend.tracing import trace
from autopar.ir.graph import OpKind, Section
from autopar.ir.rules import RuleBook
from autopar.passes.microbatch import micro_batched
from autopar.passes.plain_loop import run_graph
from tests import small_steps

RULES = RuleBook()
LAYERS, WIDTH, EXAMPLES = 4, 8, 8


def batch_of():
    random = np.random.default_rng(0)
    return {"x": jnp.asarray(random.normal(size=(EXAMPLES, WIDTH)).astype(np.float32)), "y": jnp.arange(8.0)}


def state_of():
    return {"layers": jax.random.normal(jax.random.key(0), (LAYERS, WIDTH, WIDTH)), "out": jnp.ones(WIDTH)}


def dropped(h, key):
    return h * jax.random.bernoulli(key, 0.7, h.shape) / 0.7


def of_sliced_keys(params, x, key):
    def layer(h, xs):
        weight, key = xs
        return dropped(jnp.tanh(h @ weight), key), None

    return jax.lax.scan(layer, x, (params["layers"], jax.random.split(key, LAYERS)))[0]


def of_a_carried_key(params, x, key):
    def layer(carry, weight):
        h, key = carry
        key, first, second = jax.random.split(key, 3)
        return (dropped(jnp.tanh(dropped(h, first) @ weight), second), key), None

    return jax.lax.scan(layer, (x, key), params["layers"])[0][0]


def of_a_folded_key(params, x, key):
    def layer(h, xs):
        weight, number = xs
        return dropped(jnp.tanh(h @ weight), jax.random.fold_in(key, number)), None

    return jax.lax.scan(layer, x, (params["layers"], jnp.arange(LAYERS)))[0]


def of_layers_computed_again(params, x, key):
    """The backward scan reads keys behind a barrier."""

    @jax.checkpoint
    def layer(h, xs):
        weight, key = xs
        return dropped(jnp.tanh(h @ weight), key), None

    return jax.lax.scan(layer, x, (params["layers"], jax.random.split(key, LAYERS)))[0]


def of_a_carried_key_computed_again(params, x, key):
    """The forward scan hands the keys of its layers to the backward scan."""

    @jax.checkpoint
    def layer(carry, weight):
        h, key = carry
        key, drawn = jax.random.split(key)
        return (dropped(jnp.tanh(h @ weight), drawn), key), None

    return jax.lax.scan(layer, (x, key), params["layers"])[0][0]


def of_keys_of_scans_before(params, x, key):
    """One scan makes keys, another one makes others of them, and the layers draw of these."""
    keys = jax.lax.scan(lambda key, _: tuple(jax.random.split(key)), key, None, LAYERS)[1]
    keys = jax.lax.map(lambda key: jax.random.fold_in(key, 7), keys)

    def layer(h, xs):
        weight, key = xs
        return dropped(jnp.tanh(h @ weight), key), None

    return jax.lax.scan(jax.checkpoint(layer), x, (params["layers"], keys))[0]


def of_a_key_that_layers_hand_on(params, x, key):
    """No layer draws; the key is split in each of them, and drawn of behind them."""

    def layer(carry, weight):
        h, key = carry
        return (jnp.tanh(h @ weight), jax.random.split(key)[0]), None

    return dropped(*jax.lax.scan(layer, (x, key), params["layers"])[0])


def of_keys_that_layers_hand_out(params, x, key):
    def layer(carry, weight):
        h, key = carry
        key, made = jax.random.split(key)
        return (jnp.tanh(h @ weight), key), made

    (h, key), keys = jax.lax.scan(jax.checkpoint(layer), (x, key), params["layers"])
    return dropped(dropped(h, key), keys[1])


def of_a_key_for_other_layers(params, x, key):
    """Layers hand on the key of which others draw."""

    def layer(carry, weight):
        h, key = carry
        return (jnp.tanh(h @ weight), jax.random.fold_in(key, 1)), None

    return of_a_carried_key(params, *jax.lax.scan(layer, (x, key), params["layers"])[0])


def of_noise_made_by_a_scan(params, x, key):
    def layer(carry, weight):
        h, key = carry
        return (jnp.tanh(h @ weight), jax.random.split(key)[0]), None

    h, key = jax.lax.scan(layer, (x, key), params["layers"])[0]
    return h * jax.lax.map(lambda key: jax.random.normal(key, x.shape), jax.random.split(key))[1]


def of_a_key_of_layers_all_computed_again(params, x, key):
    """A barrier hands on the key beside the examples."""
    return jax.checkpoint(of_a_key_that_layers_hand_on)(params, x, key)


def of_a_key_beside_a_literal(params, x, key):
    """A barrier in the layers has a literal among its operands, and the layers return one."""

    def layer(carry, weight):
        h, key = carry
        h, scale = jax.lax.optimization_barrier((jnp.tanh(h @ weight), 1.5))
        return (h * scale, jax.random.split(key)[0]), 2.5

    return dropped(*jax.lax.scan(layer, (x, key), params["layers"])[0])


HANDED_ON = [
    of_a_key_that_layers_hand_on, of_keys_that_layers_hand_out, of_a_key_for_other_layers, of_noise_made_by_a_scan,
    of_a_key_of_layers_all_computed_again, of_a_key_beside_a_literal,
]  # fmt: skip
COMPUTED_AGAIN = [of_layers_computed_again, of_a_carried_key_computed_again]


def step_of(body):
    def loss(params, batch):
        return jnp.square(body(params, batch["x"], jax.random.key(3)) @ params["out"] - batch["y"]).mean()

    def step(params, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), {"loss": value}

    return step


@pytest.mark.cases(1)
@pytest.mark.parametrize("body", [of_sliced_keys, of_a_carried_key, of_a_folded_key, *COMPUTED_AGAIN])
def test_random_bits_in_a_scan_are_those_of_the_whole_batch(body):
    step, state, batch = step_of(body), state_of(), batch_of()
    t = trace(step, (state, batch), names=("state", "batch"), donate=(0,), batch=(1,))
    graph = micro_batched(t, 2, RULES)
    got = jax.tree.unflatten(t.out_tree, jax.jit(lambda x: run_graph(graph, x))(jax.tree.leaves((state, batch))))
    small_steps.assert_close(got, jax.jit(step)(state, batch))
    sections = [op.section for op in graph.block.ops if op.kind is OpKind.SCAN]
    in_loop = [section for section in sections if section is not Section.BEFORE]
    assert in_loop == [Section.FORWARD, Section.BACKWARD]
    assert len(sections) == (4 if body in COMPUTED_AGAIN else 3)  # what is computed again is drawn again


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "body",
    [
        of_a_carried_key,
        of_a_carried_key_computed_again,
        of_a_key_that_layers_hand_on,
        pytest.param(of_sliced_keys, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_two_stages(body, num_microbatches):
    step, state, batch = step_of(body), state_of(), batch_of()
    piped = autopar.parallelize(
        step, plan=recipes.pipeline(2, num_microbatches=num_microbatches), cluster=autopar.Cluster.local(4),
        cache_dir=None,
    )  # fmt: skip
    expected = jax.jit(step)(state, batch)
    small_steps.assert_close(piped(jax.tree.map(jnp.copy, state), batch), expected)


@pytest.mark.cases(1)
@pytest.mark.parametrize("body", [of_keys_of_scans_before, *HANDED_ON])
def test_keys_that_scans_make_are_those_of_the_whole_batch(body):
    step, state, batch = step_of(body), state_of(), batch_of()
    t = trace(step, (state, batch), names=("state", "batch"), donate=(0,), batch=(1,))
    graph = micro_batched(t, 2, RULES)
    got = jax.tree.unflatten(t.out_tree, jax.jit(lambda x: run_graph(graph, x))(jax.tree.leaves((state, batch))))
    small_steps.assert_close(got, jax.jit(step)(state, batch))


def of_sorted_features(h):
    return jnp.sort(h, axis=1)


def of_ranks(h):
    return h * jnp.argsort(jnp.argsort(h, axis=1), axis=1)


def of_the_largest_features(h):
    values, places = jax.lax.top_k(h * jnp.arange(1, WIDTH + 1), 2)  # no two of tanh's ones are equal then
    return h.at[jnp.arange(len(h))[:, None], places].add(values)


def of_a_triangle(h):
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (len(h), WIDTH, WIDTH), d) for d in (1, 2))
    return jnp.where(row >= column, h[:, None], 0).sum(2)


def of_every_third_example(h):
    return h * (jnp.arange(len(h)) % 3 > 0)[:, None]


def of_every_third_example_in_a_scan(h):
    return jax.lax.scan(lambda h, _: (jnp.tanh(of_every_third_example(h)), None), h, None, 2)[0]


def of_noise_that_is_alike_in_all_layers(h):
    return dropped(h, jax.random.fold_in(jax.random.key(4), 2))


@pytest.mark.cases(2)
@pytest.mark.parametrize("form", ["scanned", "checkpointed"])
@pytest.mark.parametrize(
    "features",
    [
        of_sorted_features,
        of_ranks,
        of_the_largest_features,
        of_a_triangle,
        of_every_third_example,
        of_every_third_example_in_a_scan,
        of_noise_that_is_alike_in_all_layers,
    ],
)
def test_what_counts_examples_in_layers_counts_those_of_the_whole_batch(features, form):
    def body(params, x, key):
        def layer(h, weight):
            return h + features(jnp.tanh(h @ weight)), None

        return jax.lax.scan(jax.checkpoint(layer) if form == "checkpointed" else layer, x, params["layers"])[0]

    step, state, batch = step_of(body), state_of(), batch_of()
    t = trace(step, (state, batch), names=("state", "batch"), donate=(0,), batch=(1,))
    graph = micro_batched(t, 2, RULES)
    got = jax.tree.unflatten(t.out_tree, jax.jit(lambda x: run_graph(graph, x))(jax.tree.leaves((state, batch))))
    small_steps.assert_close(got, jax.jit(step)(state, batch))


def test_keys_that_depend_on_the_examples_are_refused():
    def body(params, x, key):
        return of_a_carried_key(params, x, jax.random.fold_in(key, (x @ params["out"]).sum().astype(jnp.int32)))

    t = trace(step_of(body), (state_of(), batch_of()), names=("state", "batch"), donate=(0,), batch=(1,))
    with pytest.raises(MixedExamplesError):
        micro_batched(t, 2, RULES)


def random_layers(state, batch):
    """Each layer has a key and a count of its draws in the state, as modules of Flax NNX have them."""

    def loss_of(params):
        def layer(h, xs):
            weight, key, count = xs
            h = dropped(jnp.tanh(h @ weight), jax.random.fold_in(key, count))
            return h, (key, count + 1, jnp.square(h).mean())

        h, (keys, counts, sizes) = jax.lax.scan(layer, batch["x"], (params["layers"], state["keys"], state["counts"]))
        return jnp.square(h @ params["out"] - batch["y"]).mean() + sizes.sum(), (keys, counts)

    (loss, (keys, counts)), grads = jax.value_and_grad(loss_of, has_aux=True)(state["params"])
    params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
    return {"params": params, "keys": keys, "counts": counts}, loss


@pytest.mark.cases(1)
@pytest.mark.parametrize("layers", [4, 3])
def test_keys_and_counts_of_each_layer_are_made_once(layers):
    def state():
        params = {"layers": state_of()["layers"][:layers], "out": jnp.ones(WIDTH)}
        return {"params": params, "keys": jax.random.split(jax.random.key(5), layers), "counts": jnp.arange(layers)}

    step = autopar.parallelize(random_layers, plan=recipes.pipeline(2, num_microbatches=2), cache_dir=None)
    expected, got = state(), state()
    for _ in range(2):
        expected, loss = jax.jit(random_layers)(expected, batch_of())
        got, found = step(got, batch_of())
        np.testing.assert_allclose(found, loss, rtol=1e-5)
    small_steps.assert_close(got["params"], expected["params"])
    assert np.array_equal(np.asarray(got["counts"]), np.arange(layers) + 2)
    keys = [jax.random.key_data(tree["keys"]) for tree in (got, expected)]
    assert np.array_equal(*map(np.asarray, keys))


def test_a_key_of_the_state_that_layers_hand_on():
    """It is drawn of behind the layers, and is the key of the next step."""

    def step(state, batch):
        def loss_of(params):
            def layer(carry, weight):
                h, key = carry
                return (jnp.tanh(h @ weight), jax.random.split(key)[0]), None

            h, key = jax.lax.scan(layer, (batch["x"], state["key"]), params["layers"])[0]
            return jnp.square(dropped(h, key) @ params["out"] - batch["y"]).mean(), key

        (loss, key), grads = jax.value_and_grad(loss_of, has_aux=True)(state["params"])
        return {"params": jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads), "key": key}, loss

    parallel = autopar.parallelize(
        step, search=autopar.Search(num_microbatches=2), cluster=autopar.Cluster.local(2), cache_dir=None
    )
    expected, got = ({"params": state_of(), "key": jax.random.key(5)} for _ in range(2))
    for _ in range(2):
        expected, loss = jax.jit(step)(expected, batch_of())
        got, found = parallel(got, batch_of())
        np.testing.assert_allclose(found, loss, rtol=1e-5)
    small_steps.assert_close(got["params"], expected["params"])
    keys = [jax.random.key_data(state["key"]) for state in (got, expected)]
    assert np.array_equal(*map(np.asarray, keys))
