"""Steps with several loops: which of them go over layers, and how many stages each gets."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import recipes
from autopar.passes.scan_stacks import find_stacks
from autopar.passes.split_scan import split_scans
from tests.passes.test_split_scan import assert_same_numbers, traced
from tests.sections import BOOK
from tests.small_steps import assert_close

WIDTH, BATCH, ROWS = 8, 8, 48


def weights(key, *shape):
    return jax.random.normal(jax.random.key(key), shape) / 3


def trained(loss):
    def step(state, batch):
        value, grads = jax.value_and_grad(loss)(state, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value

    return step


def make_batch():
    return {"x": np.random.default_rng(0).normal(size=(BATCH, WIDTH)).astype(np.float32)}


def layer(x, w):
    return x + jnp.tanh(x @ w), None


def encoder_decoder(wrap=lambda body: body):
    def loss(params, batch):
        memory, _ = jax.lax.scan(wrap(layer), batch["x"], params["encoder"])

        def decode(x, p):
            return x + jnp.tanh(x @ p["own"] + memory @ p["cross"]), None

        x, _ = jax.lax.scan(wrap(decode), jnp.roll(batch["x"], 1, axis=1), params["decoder"])
        return jnp.mean((x @ params["head"]) ** 2)

    return trained(loss)


def encoder_decoder_state(encoder=4, decoder=4):
    stacks = {"own": weights(1, decoder, WIDTH, WIDTH), "cross": weights(2, decoder, WIDTH, WIDTH)}
    return {"encoder": weights(0, encoder, WIDTH, WIDTH), "decoder": stacks, "head": weights(3, WIDTH)}


def parts_of_leaves(step, state, parts, **options):
    """The number of parts of each leaf of the state, by its path, and the split step."""
    cut = split_scans(traced(step, state, make_batch()), parts, BOOK, **options)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    return {paths[p.leaf]: p.parts for p in cut.arguments if p.leaf < len(paths)}, cut


def test_stages_are_shared_out_by_arithmetic():
    step = encoder_decoder()
    of, cut = parts_of_leaves(step, encoder_decoder_state(4, 4), 6)
    assert of == {"['encoder']": 2, "['decoder']['own']": 4, "['decoder']['cross']": 4, "['head']": 1}
    assert cut.scopes == ("layers[0:2]", "layers[2:4]", *(f"layers.2[{i}:{i + 1}]" for i in range(4)))
    assert cut.is_even
    of, _ = parts_of_leaves(step, encoder_decoder_state(2, 16), 4)  # the encoder has too little for a stage
    assert of["['encoder']"] == 1
    assert of["['decoder']['own']"] == 4
    _, cut = parts_of_leaves(step, encoder_decoder_state(4, 4), 2, groups=(0, 1))
    assert cut.scopes == ("layers[0:4]", "layers.2[0:4]")


@pytest.mark.cases(1)
@pytest.mark.parametrize("wrap", [lambda body: body, jax.checkpoint], ids=["plain", "checkpoint"])
def test_numbers_of_an_encoder_and_a_decoder(wrap):
    assert_same_numbers(encoder_decoder(wrap), encoder_decoder_state(), parts=4)


def test_a_group_of_devices_holds_state_of_both_stacks():
    of, cut = parts_of_leaves(encoder_decoder(), encoder_decoder_state(8, 4), 8, groups=(0, 1, 0, 1, 0, 1, 0, 1))
    assert of == {"['encoder']": 2, "['decoder']['own']": 2, "['decoder']['cross']": 2, "['head']": 1}
    assert {cut.part_of_argument[i] % 2 for i, p in enumerate(cut.arguments) if p.leaf == 2} == {0, 1}


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("stages", "schedule"),
    [(4, "1f1b"), (2, "zb-v"), pytest.param(2, "interleaved", marks=pytest.mark.slow)],
)
def test_a_pipeline_through_both_gives_the_plain_steps_numbers(stages, schedule):
    plain, state, batch = encoder_decoder(), encoder_decoder_state(), make_batch()
    step = autopar.parallelize(plain, plan=recipes.pipeline(stages, schedule, num_microbatches=4))
    got = step(encoder_decoder_state(), batch)
    assert_close(jax.tree.map(np.asarray, got), jax.tree.map(np.asarray, jax.jit(plain)(state, batch)))
    of = {v.path: v.stages for v in step.plan(state, batch).record.arguments}
    assert of["state['encoder']"] == (0, 1)
    assert of["state['decoder']['own']"] == (2, 3)


def test_chunks_of_a_table_in_which_examples_look_up_rows_are_no_layers():
    def loss(params, batch):
        rows = params["table"][jnp.abs(batch["x"][:, 0] * 10).astype(jnp.int32)]
        x, _ = jax.lax.scan(layer, rows, params["layers"])

        def chunk(most, rows):
            return jnp.logaddexp(most, jax.nn.logsumexp(x @ rows.T, -1)), None

        start = jnp.full(x.shape[:1], -1e9)
        total, _ = jax.lax.scan(chunk, start, params["table"].reshape(4, -1, WIDTH))
        return jnp.mean(total)

    state = {"layers": weights(0, 4, WIDTH, WIDTH), "table": weights(1, ROWS, WIDTH)}
    of, _ = parts_of_leaves(trained(loss), state, 4)
    assert of == {"['layers']": 4, "['table']": 1}
    assert_same_numbers(trained(loss), state, parts=4, microbatches=(2,))


@pytest.mark.cases(1)
@pytest.mark.parametrize("width", [WIDTH, 4 * WIDTH])  # less of the arithmetic than the layers have, and most of it
def test_a_loop_over_time_in_front_of_the_layers_stays_whole(width):
    def loss(params, batch):
        times = jnp.stack([batch["x"] * t for t in range(1, 6)])

        def cell(h, x):
            return jnp.tanh(x @ params["in"] + h @ params["again"]), None

        h, _ = jax.lax.scan(cell, jnp.zeros((batch["x"].shape[0], width)), times)
        x, _ = jax.lax.scan(layer, h @ params["out"], params["layers"])
        return jnp.mean(x**2)

    shapes = {"in": (WIDTH, width), "again": (width, width), "out": (width, WIDTH), "layers": (8, WIDTH, WIDTH)}
    state = {name: weights(key, *shape) for key, (name, shape) in enumerate(shapes.items())}
    of, _ = parts_of_leaves(trained(loss), state, 4)
    assert of == {"['in']": 1, "['again']": 1, "['out']": 1, "['layers']": 4}
    assert_same_numbers(trained(loss), state, parts=4, microbatches=(2,))


def test_layers_that_examples_pass_twice_are_not_cut():
    def loss(params, batch):
        x, _ = jax.lax.scan(layer, batch["x"], params["layers"])
        x, _ = jax.lax.scan(layer, x, params["layers"])
        return jnp.mean(x**2)

    assert find_stacks(traced(trained(loss), {"layers": weights(0, 4, WIDTH, WIDTH)}, make_batch()), BOOK) is None
