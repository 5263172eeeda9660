"""Batches joined to one array, and arrays with time in front: examples in blocks are split, in the loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import recipes
from autopar.errors import MixedExamplesError, UnsupportedError
from autopar.frontend.tracing import trace
from autopar.ir.graph import Section, walk
from autopar.ir.rules import RuleBook
from autopar.passes.microbatch import micro_batched
from autopar.passes.plain_loop import run_graph
from tests.small_steps import assert_close

WIDTH, EXAMPLES, TIMES, CLASSES = 16, 8, 6, 10
RULES = RuleBook()


def state():
    keys = jax.random.split(jax.random.key(0), 2)
    return {"layers": jax.random.normal(keys[0], (4, WIDTH, WIDTH)) / 4, "out": jax.random.normal(keys[1], (16, 10))}


def batch():
    numbers = np.random.default_rng(0)
    rows = {name: numbers.normal(size=(EXAMPLES, WIDTH)).astype(np.float32) for name in ("a", "b")}
    tokens = {"times": numbers.normal(size=(EXAMPLES, TIMES, WIDTH)).astype(np.float32)}
    return rows | tokens | {"labels": numbers.integers(0, CLASSES, (EXAMPLES, TIMES))}


def written_out(params, h):
    for layer in params["layers"]:
        h = jnp.tanh(h @ layer)
    return h @ params["out"]


def scanned(params, h):
    return jax.lax.scan(lambda h, layer: (jnp.tanh(h @ layer), None), h, params["layers"])[0] @ params["out"]


def likelihood(logits, labels):
    return jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=-1)[:, 0]


def preferred(params, batch, model=written_out):
    """Direct preference optimisation: one forward pass of the chosen and the rejected answers."""
    labels = jnp.concatenate([batch["labels"][:, 0], batch["labels"][:, 1]])
    found = likelihood(model(params, jnp.concatenate([batch["a"], batch["b"]])), labels)
    half = len(found) // 2
    return jnp.mean(jax.nn.softplus(found[:half] - found[half:]))


def preferred_by_a_scan(params, batch):
    return preferred(params, batch, scanned)


def three_views(params, batch):
    views = written_out(params, jnp.concatenate([batch["a"], batch["b"], 2 * batch["a"]]))
    first, second, third = jnp.split(views, 3)
    return jnp.mean(jnp.square(first - second) + jnp.abs(third))


def two_views_in_front(params, batch):
    views = written_out(params, jnp.stack([batch["a"], batch["b"]]).reshape(-1, WIDTH)).reshape(2, -1, CLASSES)
    return jnp.square(views[0] - views[1]).mean()


def recurrent(params, batch):
    """Time in front; logits and labels of all times in one dimension."""

    def cell(h, x):
        h = jnp.tanh(h @ params["layers"][0] + x @ params["layers"][1])
        return h, h

    times = batch["times"].swapaxes(0, 1)
    hidden = jax.lax.scan(cell, jnp.zeros(times.shape[1:]), times)[1]
    return -likelihood(hidden.reshape(-1, WIDTH) @ params["out"], batch["labels"].T.reshape(-1)).mean()


def all_times_at_once(params, batch):
    times = batch["times"].swapaxes(0, 1) @ params["layers"][0]
    return jnp.square(times.reshape(-1, WIDTH) @ params["out"]).mean()


def masked_and_repeated(params, batch):
    """A mask that is joined of constants, and a batch that is repeated."""
    rows = written_out(params, jnp.concatenate([batch["a"], batch["b"]]))
    mask = jnp.concatenate([jnp.ones(len(batch["a"])), jnp.zeros(len(batch["b"]))])
    again = written_out(params, jnp.tile(batch["a"], (3, 1)))
    return jnp.mean(rows * mask[:, None]) + jnp.square(again).mean()


def dropped_out(params, batch):
    """Masks that are drawn for the joined rows, and weights for them that are known before the loop."""
    rows = jnp.concatenate([batch["a"], batch["b"]])
    keys = jax.random.split(jax.random.key(1), 2)
    for key, layer in zip(keys, params["layers"], strict=False):
        rows = jnp.tanh(rows @ layer)
        rows = jnp.where(jax.random.bernoulli(key, 0.5, rows.shape), 2 * rows, 0.0)
    weights = jnp.concatenate([batch["a"][:, 0], batch["b"][:, 1]])
    drawn = jax.random.uniform(jax.random.key(2), weights.shape)
    return jnp.mean(jnp.square(rows @ params["out"]).sum(1) * (weights + drawn))


def of_mixed_inputs(params, batch):
    """What is mixed before the first product is made once; the products are of each micro-batch."""
    rows = 0.7 * batch["a"] + 0.3 * batch["a"][::-1]
    return jnp.square(written_out(params, (rows - rows.mean(axis=0)) / rows.std(axis=0))).mean()


def walk_op(op):
    return [op, *(inner for block in op.blocks for inner in walk(block))]


LOSSES = [
    preferred, preferred_by_a_scan, three_views, two_views_in_front, recurrent, all_times_at_once,
    masked_and_repeated, dropped_out, of_mixed_inputs,
]  # fmt: skip


def step_of(loss):
    def step(params, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.5 * g, params, grads), value

    return step


@pytest.mark.cases(2)
@pytest.mark.parametrize("num_microbatches", [2, 4])
@pytest.mark.parametrize("loss", LOSSES)
def test_products_run_for_each_micro_batch(loss, num_microbatches):
    step, args = step_of(loss), (state(), batch())
    t = trace(step, args, names=("state", "batch"), donate=(0,), batch=(1,))
    graph = micro_batched(t, num_microbatches, RULES)
    got = jax.tree.unflatten(t.out_tree, jax.jit(lambda x: run_graph(graph, x))(jax.tree.leaves(args)))
    assert_close(got, jax.jit(step)(*args))
    products = {op.section for op in graph.block.ops if any(inner.primitive == "dot_general" for inner in walk_op(op))}
    assert products == {Section.FORWARD, Section.BACKWARD}


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "recipe", [recipes.pipeline(2, num_microbatches=2), recipes.pipeline(2, "gpipe", num_microbatches=1)]
)
@pytest.mark.parametrize("loss", [preferred, dropped_out, of_mixed_inputs])
def test_two_stages(loss, recipe):
    step, args = step_of(loss), (state(), batch())
    piped = autopar.parallelize(step, plan=recipe, cache_dir=None)
    expected = jax.jit(step)(*args)
    assert_close(piped(*args), expected)


def test_joined_arrays_that_leave_the_step_are_made_of_the_whole_batch():
    def step(params, batch):
        joined, hidden = jnp.concatenate([batch["a"], batch["b"]]), batch["a"] @ params["out"]
        both = jnp.tanh(jnp.concatenate([hidden, batch["b"] @ params["out"]]))
        return params, jnp.sum(joined @ params["out"]) + jnp.square(both).sum(), joined, both

    piped = autopar.parallelize(
        step, plan=recipes.data_parallel(), search=autopar.Search(num_microbatches=2), cache_dir=None
    )
    args = state(), batch()
    expected = jax.jit(step)(*args)
    assert_close(piped(*args), expected)


def test_products_of_joined_arrays_that_leave_the_step_are_refused():
    def step(params, batch):
        return params, written_out(params, jnp.concatenate([batch["a"], batch["b"]]))

    t = trace(step, (state(), batch()), names=("state", "batch"), donate=(0,), batch=(1,))
    with pytest.raises(UnsupportedError, match="in which examples lie inside of a dimension"):
        micro_batched(t, 2, RULES)
    args = state(), batch()
    graph = micro_batched(t, 1, RULES)  # one micro-batch is the whole
    got = jax.tree.unflatten(t.out_tree, jax.jit(lambda x: run_graph(graph, x))(jax.tree.leaves(args)))
    assert_close(got, jax.jit(step)(*args))


def test_products_between_the_examples_of_a_batch_are_refused():
    def loss(params, batch):
        return jnp.mean((batch["a"] @ batch["a"].T) @ (batch["a"] @ params["layers"][0]))

    t = trace(step_of(loss), (state(), batch()), names=("state", "batch"), donate=(0,), batch=(1,))
    with pytest.raises(MixedExamplesError, match="dot_general"):
        micro_batched(t, 2, RULES)


def convolved(images, kernel, groups=1):
    return jax.lax.conv_general_dilated(
        images, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups
    )


@pytest.mark.parametrize("groups", [1, 2])
def test_gradients_of_each_example_through_a_convolution(groups):
    """Differentially private training: gradients are clipped one by one (Abadi et al., 2016)."""

    def loss(params, image):
        hidden = jnp.tanh(convolved(image[None], params["kernel"], groups))
        return jnp.square(hidden.reshape(-1) @ params["out"]).sum()

    def step(params, batch):
        grads = jax.vmap(jax.grad(loss), (None, 0))(params, batch["images"])
        norms = jnp.sqrt(sum(jnp.square(g).sum(axis=range(1, g.ndim)) for g in grads.values()))
        clipped = jax.tree.map(lambda g: jnp.tensordot(jnp.minimum(1, 0.5 / norms), g, 1), grads)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, clipped), norms

    numbers = np.random.default_rng(0)
    shapes = {"kernel": (3, 3, 4 // groups, 4), "out": (4 * 4 * 4, 3)}
    params = {name: numbers.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    args = params, {"images": numbers.normal(size=(EXAMPLES, 4, 4, 4)).astype(np.float32)}
    t = trace(step, args, names=("params", "batch"), donate=(0,), batch=(1,))
    graph = micro_batched(t, 4, RULES)
    got = jax.tree.unflatten(t.out_tree, jax.jit(lambda x: run_graph(graph, x))(jax.tree.leaves(args)))
    assert_close(got, jax.jit(step)(*args))
    sections = {op.section for op in graph.block.ops if op.primitive == "conv_general_dilated"}
    assert sections <= {Section.FORWARD, Section.BACKWARD}


def test_a_kernel_for_each_example():
    def loss(params, batch):
        kernels = jnp.tanh(batch["a"] @ params["layers"][0]).reshape(-1, 2, 2, 2, 2)
        images = batch["b"].reshape(-1, 1, 4, 2, 2)
        return jnp.square(jax.vmap(convolved)(images, kernels)).mean()

    step, args = step_of(loss), (state(), batch())
    t = trace(step, args, names=("state", "batch"), donate=(0,), batch=(1,))
    graph = micro_batched(t, 2, RULES)
    got = jax.tree.unflatten(t.out_tree, jax.jit(lambda x: run_graph(graph, x))(jax.tree.leaves(args)))
    assert_close(got, jax.jit(step)(*args))


def by_product(params, noise, rows):
    return (noise @ params["out"] * rows.sum(-1, keepdims=True)).sum()


def by_layers(params, noise, rows):
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w) * noise, None), rows, params["layers"])[0].sum()


def by_examples(params, noise, rows):
    return jax.lax.map(lambda x: (jnp.tanh(x[0] @ params["out"]) * x[1].sum()).sum(), (noise, rows)).sum()


def by_branch(params, noise, rows):
    def product(a, b):
        return (a @ params["out"]).sum(-1) @ b[:, 0]

    return jax.lax.cond(params["out"][0, 0] < 9, product, lambda *_: 0.0, noise, rows)


def behind_a_barrier(params, noise, rows):
    noise, rows = jax.lax.optimization_barrier((noise, rows))
    return (jnp.tanh(noise * rows) @ params["out"]).sum()


@pytest.mark.cases(3)
@pytest.mark.parametrize("first", [True, False], ids=["first", "second"])
@pytest.mark.parametrize("reads", [by_product, by_layers, by_examples, by_branch, behind_a_barrier])
def test_noise_is_not_cut_in_blocks_that_something_reads_beside_examples_in_order(reads, first):
    def step(params, batch):
        noise = jax.random.normal(jax.random.key(7), (2 * EXAMPLES, WIDTH))
        in_order = jnp.stack([batch["a"], batch["b"]], 1).reshape(2 * EXAMPLES, WIDTH)
        joined = jnp.concatenate([batch["a"], batch["b"]])
        others = [reads(params, noise, in_order)] if first else []
        blocks = (joined * noise @ params["out"]).sum(0)
        return params, others, blocks, [] if first else reads(params, noise, in_order)

    args = state(), batch()
    t = trace(step, args, names=("state", "batch"), donate=(0,), batch=(1,))
    try:
        graph = micro_batched(t, 2, RULES)
    except UnsupportedError:
        assert not first or reads is not by_product
        return
    got = jax.tree.unflatten(t.out_tree, jax.jit(lambda x: run_graph(graph, x))(jax.tree.leaves(args)))
    assert_close(got, jax.jit(step)(*args))
