"""Losses that a scan sums over chunks of tokens or of examples, in micro-batches, against plain `jax.jit`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import recipes
from autopar.errors import MixedExamplesError, UnsupportedError
from tests.passes.test_microbatch import RULES, check, micro_batched, traced
from tests.small_steps import assert_close

WIDTH, WORDS, LENGTH = 6, 12, 4


def state(dtype=jnp.float32):
    first, second = jax.random.split(jax.random.key(0))
    weights = {"e": jax.random.normal(first, (WORDS, WIDTH)), "w": jax.random.normal(second, (2, WIDTH, WIDTH)) / 3}
    return jax.tree.map(lambda x: x.astype(dtype), weights)


def batch(count: int = 8):
    """Half of the labels do not count, and no example has as many that do as another one."""
    random = np.random.default_rng(0)
    labels = random.integers(0, WORDS, (count, LENGTH)).astype(np.int32)
    masked = random.uniform(size=labels.shape) < np.linspace(0.2, 0.8, count)[:, None]
    return {"x": random.integers(0, WORDS, (count, LENGTH)).astype(np.int32), "y": np.where(masked, -1, labels)}


def hidden(p, x):
    return jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), p["e"][x], p["w"])[0]


def of_chunk(p, h, y):
    """(sum of the losses, number of labels) of a chunk."""
    logits = (h @ p["e"].T).astype(jnp.float32)
    losses = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, jnp.maximum(y, 0)[..., None], -1)[..., 0]
    return (losses * (y >= 0)).sum(), (y >= 0).sum()


def carried(chunk, p, xs):
    """Both sums in the carry of a scan."""

    def body(carry, x):
        loss, number = chunk(p, *x)
        return (carry[0] + loss, carry[1] + number), None

    (loss, number), _ = jax.lax.scan(body, (0.0, 0), xs)
    return loss / jnp.maximum(number, 1)


def mapped(chunk, p, xs):
    losses, numbers = jax.lax.map(lambda x: chunk(p, *x), xs)
    return losses.sum() / jnp.maximum(numbers.sum(), 1)


def unrolled(chunk, p, xs):
    sums = [chunk(p, h, y) for h, y in zip(*xs, strict=True)]
    return sum(loss for loss, _ in sums) / jnp.maximum(sum(number for _, number in sums), 1)


def flat(h, y):
    """Chunks of the flattened tokens: two examples each."""
    return h.reshape(-1, 2 * LENGTH, WIDTH), y.reshape(-1, 2 * LENGTH)


def along_time(h, y):
    """Chunks of the time of all examples."""
    halves = h.reshape(len(h), 2, LENGTH // 2, WIDTH), y.reshape(len(y), 2, LENGTH // 2)
    return tuple(jnp.moveaxis(half, 1, 0) for half in halves)


def time_major(h, y):
    """Chunks of half of the examples, at one time each."""
    return h.swapaxes(0, 1).reshape(-1, len(h) // 2, WIDTH), y.T.reshape(-1, len(y) // 2)


def training(loss):
    def step(p, b):
        value, grads = jax.value_and_grad(lambda p: loss(p, hidden(p, b["x"]), b["y"]))(p)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, grads), {"loss": value}

    return step


def chunked(sums, chunks, chunk=of_chunk):
    return training(lambda p, h, y: sums(chunk, p, chunks(h, y)))


@pytest.mark.cases(1)
@pytest.mark.parametrize("chunk", [of_chunk, jax.checkpoint(of_chunk)], ids=["saved", "recomputed"])
@pytest.mark.parametrize("chunks", [flat, along_time, time_major])
@pytest.mark.parametrize("sums", [carried, mapped])
def test_a_mean_over_chunks(sums, chunks, chunk):
    check(chunked(sums, chunks, chunk), state(), batch())


@pytest.mark.cases(1)
@pytest.mark.parametrize("sums", [carried, unrolled])
def test_unrolled_chunks_of_time(sums):
    check(chunked(sums, along_time), state(), batch(), 4)


def test_the_count_of_labels_is_known_before_the_loop():
    """So that gradients are divided by it in the first micro-batch."""
    graph = check(chunked(carried, flat), state(), batch(), 4)
    (count,) = [op for op in graph.block.ops if op.primitive == "scan" and op.section.value == "before"]
    assert all(inner.primitive != "dot_general" for inner in count.blocks[0].ops)
    assert count.trips == 4


def test_maps_over_examples_by_the_batch():
    def loss(p, h, y):
        losses, numbers = jax.lax.map(lambda x: of_chunk(p, *x), (h, y), batch_size=2)
        return losses.sum() / numbers.sum()

    check(training(loss), state(), batch(), 4)


def test_rows_that_a_loop_over_examples_makes():
    def step(p, b):
        rows = jax.lax.map(lambda x: jnp.tanh(p["e"][x]).sum(0), b["x"])
        return p, {"rows": rows, "sum": rows.sum(0)}

    check(step, state(), batch(), 4)


def test_a_casted_table():
    def chunk(p, h, y):
        return of_chunk(jax.tree.map(lambda x: x.astype(jnp.bfloat16), p), h.astype(jnp.bfloat16), y)

    check(chunked(mapped, flat, chunk), state(), batch())


def test_sums_that_start_from_something():
    """From a penalty on the weights, that counts once, and from a sum over examples."""

    def loss(p, h, y):
        def body(carry, x):
            return (carry[0] + of_chunk(p, *x)[0], carry[1] + jnp.square(x[0]).sum()), None

        (value, squares), _ = jax.lax.scan(body, (jnp.square(p["w"]).sum(), h.sum()), flat(h, y))
        return value + 0.1 * squares

    check(training(loss), state(), batch(), 4)


def test_loops_and_branches_in_a_chunk():
    def chunk(p, h, y):
        def add(carry, x):
            loss, number = of_chunk(p, *x)
            more = jax.lax.cond(number > 1, lambda c: c + loss, lambda c: c + 0.5, carry[0])
            return (more, carry[1] + number), None

        return jax.lax.scan(add, (0.0, 0), (h.reshape(2, -1, WIDTH), y.reshape(2, -1)))[0]

    check(chunked(carried, flat, chunk), state(), batch())


def test_branches_that_add_to_a_sum():
    """Each branch of the backward pass hands the cotangent of the sum on."""

    def loss(p, h, y):
        def body(total, x):
            def more(total):
                return total + of_chunk(p, *x)[0]

            return jax.lax.cond(x[1].sum() > 9, more, lambda total: total, total), None

        return jax.lax.scan(body, jnp.square(p["w"]).sum(), flat(h, y))[0]

    check(training(loss), state(), batch(), 4)


def test_sums_that_an_inner_loop_goes_on_with():
    def loss(p, h, y):
        def add(carry, x):
            value, number = of_chunk(p, *x)
            return (carry[0] + value, carry[1] + number), None

        def body(carry, x):
            return jax.lax.scan(add, carry, (x[0].reshape(2, -1, WIDTH), x[1].reshape(2, -1)))[0], None

        (value, number), _ = jax.lax.scan(jax.checkpoint(body), (0.0, 0), flat(h, y))
        return value / number

    check(training(loss), state(), batch(), 4)


def scanned(body, start):
    """A loss that reads what a body carries over chunks of two examples."""

    def loss(p, h, y):
        carry, _ = jax.lax.scan(lambda c, x: (body(p, c, x), None), start, flat(h, y))
        return sum(jnp.sum(x.astype(jnp.float32)) for x in jax.tree.leaves(carry))

    return training(loss)


READING = {
    "a decaying mean": scanned(lambda p, c, x: 0.9 * c + 0.1 * of_chunk(p, *x)[0], 0.0),
    "the largest": scanned(lambda p, c, x: jnp.maximum(c, of_chunk(p, *x)[0]), 0.0),
    "the last": scanned(lambda p, c, x: of_chunk(p, *x)[0], 0.0),
    "a place": scanned(lambda p, c, x: (c[0] + c[1] * of_chunk(p, *x)[0], c[1] + 1.0), (0.0, 0.0)),
    "sums of sums": scanned(lambda p, c, x: (c[0] + c[1], c[1] + of_chunk(p, *x)[0]), (0.0, 0.0)),
    "exchanged": scanned(lambda p, c, x: (c[1], c[0] + of_chunk(p, *x)[0]), (0.0, 0.0)),
    "twice": scanned(lambda p, c, x: c + c + of_chunk(p, *x)[0], 0.0),
    "whole numbers that start from one": scanned(lambda p, c, x: c + of_chunk(p, *x)[1], 1),
    "in a branch": scanned(
        lambda p, c, x: jax.lax.cond(x[1].sum() > 9, lambda c: 2.0 * c, lambda c: c + of_chunk(p, *x)[0], c), 0.0
    ),
    "a state": scanned(lambda p, c, x: jnp.tanh(c @ p["w"][0] + x[0].sum(0)), jnp.zeros(WIDTH)),
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", READING)
def test_a_trip_that_reads_what_those_before_made_is_refused(name):
    with pytest.raises(MixedExamplesError, match="mixes the examples of the batch"):
        micro_batched(traced(READING[name], state(), batch()), 2, RULES)
    if name != "whole numbers that start from one":
        check(READING[name], state(), batch(), 1)


@pytest.mark.cases(1)
@pytest.mark.parametrize("weight", [lambda n: jnp.arange(float(n)), lambda n: jnp.array([1.0, 2.0, 3.0, 4.0])])
def test_weights_of_chunks_by_their_position(weight):
    """They are known for the whole batch, and each micro-batch takes its own."""

    def loss(p, h, y):
        h, y = flat(h, y)
        return jax.lax.map(lambda x: x[0] * of_chunk(p, *x[1:])[0], (weight(len(h)), h, y)).sum()

    check(training(loss), state(), batch())


def test_sums_over_all_examples_in_each_trip_are_refused():
    def loss(p, h, y):
        return jax.lax.map(lambda x: of_chunk(p, *x)[0] * h.sum(), flat(h, y)).sum()

    with pytest.raises(MixedExamplesError):
        micro_batched(traced(training(loss), state(), batch()), 2, RULES)


def test_chunks_larger_than_a_micro_batch_are_refused():
    with pytest.raises(UnsupportedError):
        micro_batched(traced(chunked(carried, flat), state(), batch()), 8, RULES)


@pytest.mark.cases(1)
@pytest.mark.parametrize("recipe", ["pipeline", "data_parallel"])
def test_on_devices(recipe):
    plans = {
        "pipeline": recipes.pipeline(2, num_microbatches=2),
        "data_parallel": recipes.cut(recipes.data_parallel(), num_microbatches=2),
    }
    step = chunked(carried, flat, jax.checkpoint(of_chunk))
    expected = jax.jit(step)(state(), batch())
    parallel = autopar.parallelize(step, plan=plans[recipe], cluster=autopar.Cluster.local(2), cache_dir=None)
    assert_close(parallel(state(), batch()), expected)


def halves(h, y):
    """Two chunks of the flattened tokens, of half of the examples each."""
    return jnp.split(h.reshape(-1, WIDTH), 2), jnp.split(y.reshape(-1), 2)


def slices_of_examples(h, y):
    size = len(h) // 2
    return [h[:size], h[size:]], [y[:size], y[size:]]


@pytest.mark.cases(1)
@pytest.mark.parametrize("chunk", [of_chunk, jax.checkpoint(of_chunk)], ids=["saved", "recomputed"])
@pytest.mark.parametrize("chunks", [halves, slices_of_examples])
def test_chunks_that_are_written_out(chunks, chunk):
    """A micro-batch has a part of each chunk."""
    check(chunked(unrolled, chunks, chunk), state(), batch(), 4)


@pytest.mark.cases(1)
@pytest.mark.parametrize("weights", [(1.0, 2.0), (0.0, 1.0)])
def test_chunks_that_are_written_out_with_weights(weights):
    def loss(p, h, y):
        return sum(
            weight * of_chunk(p, *x)[0] for weight, x in zip(weights, zip(*halves(h, y), strict=True), strict=True)
        )

    check(training(loss), state(), batch(), 2)


def test_chunks_that_read_one_another_are_refused():
    def loss(p, h, y):
        first, second = slices_of_examples(h, y)[0]
        return jnp.square(first @ p["w"][0] * second[::-1]).sum()

    with pytest.raises(UnsupportedError):
        micro_batched(traced(training(loss), state(), batch()), 2, RULES)
