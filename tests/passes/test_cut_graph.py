"""Graphs of micro-batches that are cut out of that of the whole batch: beside traced ones, and numbers against jit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.errors import MixedExamplesError
from autopar.frontend.build_graph import build_graph
from autopar.frontend.tracing import trace
from autopar.ir.graph import walk
from autopar.ir.rules import RuleBook
from autopar.ops.attention.score_kernels import mark_score_kernels
from autopar.passes.cut_graph import cut_graph
from autopar.passes.microbatch import micro_batched
from autopar.passes.plain_loop import run_graph
from autopar.passes.smaller_step import example_leaves, num_examples, smaller_step, with_literals_of
from benchmarks.zoo import CASES
from tests import small_steps

RULES = RuleBook()
EXAMPLES, WIDTH = 8, 6


def traced(step, state, batch):
    return trace(step, (state, batch), names=("state", "batch"), donate=(0,), batch=(1,))


@pytest.mark.cases(1)
@pytest.mark.parametrize("blockwise", [False, True])
@pytest.mark.parametrize(
    "name",
    ["gpt", *(pytest.param(n, marks=pytest.mark.slow) for n in ("lstm", "dropout", "moe", "bert", "unet"))],
)
def test_a_graph_that_is_cut_is_the_one_that_is_traced(name, blockwise):
    case = CASES[name]()
    t = traced(case.step, jax.eval_shape(case.init, jax.random.key(0)), small_steps.shapes(case.batch(0)))
    t = dataclasses.replace(t, attention_kernel="BLOCKS" if blockwise else "")
    whole = build_graph(t, RULES)
    first = len(whole.block.inputs) - len(t.in_avals)
    cut = cut_graph(whole, {first + i: dim for i, dim in example_leaves(t).items()}, 2, RULES, t.name)
    smaller = smaller_step(t, num_examples(t) // 2)
    part = build_graph(dataclasses.replace(smaller, jaxpr=with_literals_of(t.jaxpr, smaller.jaxpr, t.name)), RULES)
    assert [op.key for op in walk(cut.block)] == [op.key for op in walk(part.block)]
    assert [op.rule for op in walk(cut.block)] == [op.rule for op in walk(part.block)]
    marked = mark_score_kernels(cut)  # beside blockwise attention stands the softmax of a router
    assert [op.kernel_bytes for op in walk(marked.block)] == [op.kernel_bytes for op in walk(part.block)]
    assert [op.key for op in walk(cut.block)] != [op.key for op in walk(whole.block)]


def test_micro_batches_run_no_function_of_the_user_again():
    calls = []
    t = traced(lambda params, batch: calls.append(1) or step_of(mean_loss)(params, batch), state_of(), batch_of())
    graph = micro_batched(t, 2, RULES)
    assert calls == [1]
    assert graph.num_microbatches == 2


def mean_loss(params, batch):
    return (jnp.tanh(batch["x"] @ params["a"]) @ params["b"]).mean()


def test_arrays_that_a_scan_takes_and_does_not_read_are_cut_too():
    """Their content does not matter, and their bytes do: the zeros in which a transposed scan selects."""

    def loss(params, batch):
        positive = jnp.broadcast_to(jnp.arange(WIDTH) > 2, (EXAMPLES, WIDTH))

        def layer(h, weight):
            return jnp.where(positive, jnp.tanh(h @ weight), jnp.zeros((EXAMPLES, WIDTH))), None

        return jax.lax.scan(layer, batch["x"], jnp.stack([params["a"], params["b"]]))[0].mean()

    t = traced(step_of(loss), state_of(), batch_of())
    whole = build_graph(t, RULES)
    first = len(whole.block.inputs) - len(t.in_avals)
    cut = cut_graph(whole, {first + i: dim for i, dim in example_leaves(t).items()}, 2, RULES, t.name)
    shapes = {cut.values[v].shape for op in cut.block.ops for v in op.outputs}
    assert not [shape for shape in shapes if EXAMPLES in shape]


def batch_of():
    random = np.random.default_rng(0)
    label = random.integers(0, WIDTH, EXAMPLES).astype(np.int32)
    return {"x": jnp.asarray(random.normal(size=(EXAMPLES, WIDTH)).astype(np.float32)), "label": jnp.asarray(label)}


def state_of():
    first, second = jax.random.split(jax.random.key(0))
    return {"a": jax.random.normal(first, (WIDTH, WIDTH)), "b": jax.random.normal(second, (WIDTH, WIDTH))}


def fixed_axes(params, batch):
    """Sizes are written, as named axes of a fixed size have them; in a scan, a branch and a loop too."""
    assert batch["x"].shape[0] == EXAMPLES, "an axis of fixed size"
    h = jnp.tanh(batch["x"] @ params["a"]).reshape(EXAMPLES // 2, 2, WIDTH)

    def layer(carry, weight):
        carry = jnp.tanh(carry @ weight + jnp.zeros((EXAMPLES // 2, 2, WIDTH)))
        return carry, carry.sum(-1)

    h, sums = jax.lax.scan(layer, h, jnp.stack([params["a"], params["b"], params["a"]]))
    h = jax.lax.cond(params["a"][0, 0] > 0, lambda x: x, lambda x: 2 * x, h)
    h = jax.lax.fori_loop(0, 2, lambda _, x: x + 1, h).reshape(EXAMPLES, WIDTH)
    logits = h @ params["b"] + sums.reshape(3, EXAMPLES).T.sum(-1, keepdims=True)
    kept = jax.random.bernoulli(jax.random.key(1), 0.7, (EXAMPLES, 1))
    return -jnp.take_along_axis(jax.nn.log_softmax(logits * kept), batch["label"][:, None], 1).sum() / EXAMPLES


def step_of(loss):
    def step(params, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), {"loss": value}

    return step


@pytest.mark.parametrize("num_microbatches", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_axes_of_a_fixed_size(num_microbatches):
    step, state, batch = step_of(fixed_axes), state_of(), batch_of()
    t = traced(step, state, batch)
    graph = micro_batched(t, num_microbatches, RULES)
    got = jax.tree.unflatten(t.out_tree, jax.jit(lambda x: run_graph(graph, x))(jax.tree.leaves((state, batch))))
    small_steps.assert_close(got, jax.jit(step)(state, batch))


def test_what_addresses_examples_by_position_stays_refused():
    def loss(params, batch):
        h = jnp.tanh(batch["x"] @ params["a"])
        return jnp.tanh(h[jnp.arange(EXAMPLES)[::-1]] @ params["b"]).sum()

    def fixed(params, batch):
        assert batch["x"].shape[0] == EXAMPLES, "an axis of fixed size"
        return loss(params, batch)

    with pytest.raises(MixedExamplesError, match="by their position"):
        micro_batched(traced(step_of(fixed), state_of(), batch_of()), 2, RULES)


def test_a_scan_that_goes_from_example_to_example_is_refused_by_the_line_of_its_body():
    def loss(params, batch):
        return jax.lax.scan(lambda c, x: (jnp.tanh(c @ params["a"] + x), None), jnp.zeros(WIDTH), batch["x"])[0].sum()

    with pytest.raises(MixedExamplesError, match=r"test_cut_graph.py.*it reads what the examples before have added up"):
        micro_batched(traced(step_of(loss), state_of(), batch_of()), 2, RULES)
