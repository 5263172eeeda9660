"""Gathers and scatters whose rows of indices have rows of their own get batching dimensions, and the same results."""

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import Cluster, recipes
from autopar.common import jax_compat
from autopar.frontend.batched_gathers import with_batched_gathers
from tests.small_steps import grouped, slow_cluster, verified_step

ROWS, COLUMNS, WIDTH = 8, 5, 4


def arrays():
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS, COLUMNS, WIDTH)).astype(np.float32)
    return x, random.integers(-WIDTH, WIDTH, ROWS), random.integers(0, WIDTH, (ROWS, COLUMNS))


def batching_of(jaxpr):
    """The dimensions of the operand that are batching dimensions, of each gather and scatter."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name.startswith(("gather", "scatter")):
            found.append(eqn.params["dimension_numbers"].operand_batching_dims)
        for inner in jax_compat.jaxprs_in(eqn):
            found += batching_of(inner)
    return found


def read_twice(x, labels, tokens):
    picked = x[jnp.arange(ROWS)[:, None], jnp.arange(COLUMNS), tokens]
    return jnp.sum(picked**2)


def read_in_chunks(x, labels, tokens):
    """A loss that a scan sums up: what all trips read, such as the numbers of the rows, comes from around it."""

    def chunk(total, at):
        x, labels = at
        return total + jnp.sum(x[jnp.arange(COLUMNS), labels] ** 2), None

    return jax.lax.scan(chunk, 0.0, (x, tokens))[0]


def read_at_two_numbers(x, labels, tokens):
    """The scan of the backward pass reads both of the forward pass, beside the numbers of the rows."""
    at = tokens.T[:, :, None]
    return jax.lax.scan(lambda total, t: (total + jnp.sum(x[jnp.arange(ROWS), t % 2, t[:, 0]] ** 2), None), 0.0, at)[0]


REWRITTEN = {
    "one dimension": (lambda x, i, t: x[:, 0][jnp.arange(ROWS), i], [(0,)]),
    "numbers of numpy": (lambda x, i, t: x[:, 0][np.arange(ROWS), i], [(0,)]),
    "two dimensions": (lambda x, i, t: x[jnp.arange(ROWS)[:, None], jnp.arange(COLUMNS), t], [(0, 1)]),
    "around a slice": (lambda x, i, t: x[jnp.arange(ROWS), :, i], [(0,)]),
    "two indices stay": (lambda x, i, t: x[jnp.arange(ROWS), t[:, 0], i], [(0,)]),
    "small numbers": (lambda x, i, t: x[:, 0][jnp.arange(ROWS, dtype=jnp.int8), i], [(0,)]),
    "without a sign": (lambda x, i, t: x[:, 0][jnp.arange(ROWS, dtype=jnp.uint32), i], [(0,)]),
    "clipped": (lambda x, i, t: x[:, 0].at[jnp.arange(ROWS), i].get(mode="clip"), [(0,)]),
    "filled": (lambda x, i, t: x[:, 0].at[jnp.arange(ROWS), i + 2].get(mode="fill", fill_value=7), [(0,)]),
    "set": (lambda x, i, t: x[:, 0].at[jnp.arange(ROWS), i].set(3.0), [(0,)]),
    "added to": (lambda x, i, t: x.at[jnp.arange(ROWS)[:, None], jnp.arange(COLUMNS), t].add(1.0 * t), [(0, 1)]),
    "the least of": (lambda x, i, t: x[:, 0].at[jnp.arange(ROWS), i].min(-0.1), [(0,)]),
    "said to be sorted": (
        lambda x, i, t: x[:, 0].at[jnp.arange(ROWS), i].add(1.0, indices_are_sorted=True, unique_indices=True), [(0,)],
    ),
    "gradient": (jax.grad(read_twice), [(0, 1), (0, 1)]),
    "in a call": (lambda x, i, t: jax.jit(lambda x, n, i: x[n, i])(x[:, 0], jnp.arange(ROWS), i), [(0,)]),
    "made in a call": (lambda x, i, t: x[:, 0][jax.jit(lambda: jnp.arange(ROWS))(), i], [(0,)]),
    "recomputed": (jax.grad(jax.checkpoint(read_twice)), [(0, 1)] * 3),
    "for each example": (lambda x, i, t: jax.vmap(lambda x, t: x[jnp.arange(COLUMNS), t])(x, t), [(0, 1)]),
    "in a scan": (
        lambda x, i, t: jax.lax.map(lambda at: at[0][jnp.arange(COLUMNS), at[1]], (x, t)), [(0,)],
    ),
    "numbers for each trip": (
        lambda x, i, t: jax.lax.map(
            lambda at: at[0][at[1], at[2]], (x, jnp.broadcast_to(jnp.arange(COLUMNS), (ROWS, COLUMNS)), t)
        ), [(0,)],
    ),
    "gradient of a scan": (jax.grad(read_in_chunks), [(0,), (0,)]),
    "gradient of a scan of two numbers": (jax.grad(read_at_two_numbers), [(0,), (0,)]),
    "gradient of a call": (jax.grad(jax.jit(read_twice)), [(0, 1), (0, 1)]),
}  # fmt: skip
LEFT = {
    "numbers that wrap": lambda x, i, t: jnp.tile(x[:, 0], (40, 1))[jnp.arange(320, dtype=jnp.uint8), jnp.tile(i, 40)],
    "no numbers": lambda x, i, t: x.sum() + jnp.arange(0).reshape(0, 1).sum(),
    "not counted from 0": lambda x, i, t: x[:, 0][jnp.arange(ROWS) - 1, i],
    "counted backwards": lambda x, i, t: x[:, 0][jnp.arange(ROWS)[::-1], i],
    "some of the rows": lambda x, i, t: x[:, 0][jnp.arange(ROWS // 2), i[: ROWS // 2]],
    "some rows, of numpy": lambda x, i, t: x[:, 0][np.array([0, 1, 2, 2]), i[:4]],
    "changed by a scan": lambda x, i, t: jax.lax.scan(
        lambda n, i: (n[::-1], x[:COLUMNS][n, i]), jnp.arange(COLUMNS), t
    )[1],
    "one number a trip": lambda x, i, t: jax.lax.map(
        lambda at: x[:COLUMNS][at[0], at[1]],
        (jnp.broadcast_to(jnp.arange(COLUMNS)[:, None], (COLUMNS, COLUMNS)), t[:COLUMNS]),
    ),
    "nothing else": lambda x, i, t: x[jnp.arange(ROWS)],
    "read as rows": lambda x, i, t: x[i],
}


@pytest.mark.cases(14)
@pytest.mark.parametrize("function", [f for f, _ in REWRITTEN.values()] + [*LEFT.values()], ids=[*REWRITTEN, *LEFT])
def test_the_results_are_the_same(function):
    closed = with_batched_gathers(jax_compat.plain_jaxpr(function, *arrays()))
    run = jax.jit(jax.extend.core.jaxpr_as_fun(closed))
    np.testing.assert_array_equal(run(*arrays())[0], jax.jit(function)(*arrays()))


@pytest.mark.parametrize(("function", "dims"), REWRITTEN.values(), ids=REWRITTEN)
def test_what_is_counted_is_a_batching_dimension(function, dims):
    closed = jax_compat.plain_jaxpr(function, *arrays())
    found = batching_of(jax_compat.open_jaxpr(with_batched_gathers(closed)))
    if jax.config.jax_remat3 and function is REWRITTEN["recomputed"][0]:
        dims = dims[1:]  # jax computes one of them less again
    assert found == dims


@pytest.mark.parametrize("function", LEFT.values(), ids=LEFT)
def test_all_others_stay_as_they_are(function):
    closed = jax_compat.plain_jaxpr(function, *arrays())
    assert with_batched_gathers(closed) is closed


def test_before_and_after():
    closed = jax.make_jaxpr(REWRITTEN["two indices stay"][0])(*arrays())
    before, after = (jax_compat.open_jaxpr(each).eqns for each in (closed, with_batched_gathers(closed)))
    assert [eqn.primitive.name for eqn in after[-2:]] == ["concatenate", "gather"]
    assert after[-2].invars == before[-2].invars[1:]
    assert after[-1].invars[1] is after[-2].outvars[0]
    numbers, old = after[-1].params["dimension_numbers"], before[-1].params["dimension_numbers"]
    assert (old.collapsed_slice_dims, old.start_index_map) == ((0, 1, 2), (0, 1, 2))
    assert (numbers.collapsed_slice_dims, numbers.start_index_map) == ((1, 2), (1, 2))
    assert (numbers.operand_batching_dims, numbers.start_indices_batching_dims) == ((0,), (0,))


def q_learning(params, batch):
    """Reads the value of the action that was taken, as most code does."""

    def loss(params):
        values = jnp.tanh(batch["seen"] @ params["in"]) @ params["out"]
        taken = values[jnp.arange(values.shape[0]), batch["action"]]
        return jnp.mean(jnp.square(taken - batch["reward"]))

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def q_learning_arguments(examples=32, width=16, actions=6):
    random = np.random.default_rng(0)
    params = {"in": random.normal(size=(width, 32)), "out": random.normal(size=(32, actions))}
    batch = {
        "seen": random.normal(size=(examples, width)).astype(np.float32),
        "action": random.integers(0, actions, examples),
        "reward": random.normal(size=examples).astype(np.float32),
    }
    return jax.tree.map(np.float32, params), batch


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "options",
    [{}, {"num_microbatches": 4}, {"num_microbatches": 32}, {"plan": recipes.data_parallel()}],
    ids=["free", "micro-batches", "one example each", "data parallelism"],
)
def test_the_taken_action_is_read_where_its_example_lies(options):
    step = autopar.parallelize(q_learning, cluster=slow_cluster(4), cache_dir=None, **grouped(**options))
    verified_step(step, q_learning_arguments(), 1e-5)


def chunked_loss(params, batch):
    """A loss over a sequence in chunks, that a scan sums up."""

    def loss(params):
        def chunk(total, at):
            seen, labels = at
            scores = jnp.tanh(seen) @ params["out"]
            picked = scores[jnp.arange(scores.shape[0]), labels]
            return total + jnp.sum(jax.nn.logsumexp(scores, axis=-1) - picked), None

        chunks = batch["seen"].swapaxes(0, 1), batch["labels"].swapaxes(0, 1)
        return jax.lax.scan(chunk, 0.0, chunks)[0] / batch["labels"].size

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "options",
    [{}, {"num_microbatches": 2}, {"plan": recipes.data_parallel()}],
    ids=["free", "micro-batches", "data parallelism"],
)
def test_labels_are_read_in_chunks_where_their_examples_lie(options):
    random = np.random.default_rng(0)
    batch = {"seen": random.normal(size=(8, 6, 16)), "labels": random.integers(0, 10, (8, 6))}
    batch["seen"] = batch["seen"].astype(np.float32)
    params = {"out": random.normal(size=(16, 10)).astype(np.float32)}
    step = autopar.parallelize(chunked_loss, cluster=slow_cluster(4), cache_dir=None, **grouped(**options))
    verified_step(step, (params, batch), 1e-5)


def test_data_parallelism_sends_gradients_alone():
    on = Cluster.preset("dgx-h100")
    step = autopar.parallelize(q_learning, plan=recipes.data_parallel(), cluster=on, cache_dir=None)
    params, batch = jax.eval_shape(lambda: q_learning_arguments(examples=1024, width=256))
    gradient_bytes = 4 * sum(p.size for p in jax.tree.leaves(params))
    sent_bytes = step.plan(params, batch).predicted.sent_bytes
    assert gradient_bytes <= sent_bytes <= 2 * gradient_bytes + 64
