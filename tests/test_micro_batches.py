"""Graphs of steps in micro-batches: numbers against plain `jax.jit`, and what is refused."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.errors import BatchMismatchError, InvalidArgumentError, MixedExamplesError, UnsupportedError
from autopar.graph import OpGraph, OpKind, Section
from autopar.micro_batches import micro_batched, why_not_cut
from autopar.rules import RuleBook
from autopar.staging import TracedStep, trace
from benchmarks.zoo import CASES
from benchmarks.zoo.comparison import worst_difference
from tests import small_steps
from tests.running_graphs import run_graph

RULES = RuleBook()
WIDTH, CLASSES = 6, 5


def traced(step, state, batch) -> TracedStep:
    return trace(step, (state, batch), names=("state", "batch"), donate=(0,), batch=(1,))


def check(step, state, batch, num_microbatches: int = 2) -> OpGraph:
    """The graph in micro-batches, once it is known to give what the step gives."""
    t = traced(step, state, batch)
    graph = micro_batched(t, num_microbatches, RULES)
    leaves = [jnp.asarray(x) for x in jax.tree.leaves((state, batch))]
    got = jax.tree.unflatten(t.out_tree, run_graph(graph, leaves))
    small_steps.assert_close(got, jax.jit(step)(state, batch))
    return graph


def weights(seed: int = 0) -> dict[str, jax.Array]:
    first, second = jax.random.split(jax.random.key(seed))
    return {"a": jax.random.normal(first, (WIDTH, WIDTH)), "b": jax.random.normal(second, (WIDTH, CLASSES))}


def examples(count: int = 8, seed: int = 0) -> dict[str, jax.Array]:
    random = np.random.default_rng(seed)
    return {
        "x": jnp.asarray(random.normal(size=(count, WIDTH)).astype(np.float32)),
        "label": jnp.asarray(random.integers(0, CLASSES, count).astype(np.int32)),
        "mask": jnp.asarray((random.uniform(size=count) < 0.7).astype(np.float32)),
    }


def losses(params, batch):
    logits = jnp.tanh(batch["x"] @ params["a"]) @ params["b"]
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["label"][:, None], 1)[:, 0]


def training(loss):
    def step(params, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), {"loss": value}

    return step


def counted(graph: OpGraph) -> collections.Counter:
    return collections.Counter(op.kind for op in graph.block.ops if op.eqn is None)


@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
def test_a_mean_over_examples(num_microbatches):
    graph = check(training(lambda p, b: losses(p, b).mean()), weights(), examples(), num_microbatches)
    assert graph.num_microbatches == num_microbatches
    # The inputs are cut and the labels; two gradients and the loss are added up.
    assert counted(graph) == {OpKind.SPLIT: 2, OpKind.ACCUMULATE: 3}


def test_a_sum_over_examples():
    check(training(lambda p, b: losses(p, b).sum()), weights(), examples())


def test_the_update_runs_once_and_the_products_once_a_micro_batch():
    graph = check(training(lambda p, b: losses(p, b).mean()), weights(), examples(), 4)
    counts = {op.count for op in graph.block.ops if op.primitive == "dot_general"}
    assert counts == {4.0}
    assert {op.count for op in graph.block.ops if op.section is Section.AFTER} == {1.0}
    assert [op.id for op in graph.ops()] == list(range(len(list(graph.ops()))))


def test_the_number_of_micro_batches_must_divide_the_batch():
    t = traced(training(lambda p, b: losses(p, b).mean()), weights(), examples())
    with pytest.raises(BatchMismatchError, match="3 equal micro-batches, got 8 examples"):
        micro_batched(t, 3, RULES)
    with pytest.raises(InvalidArgumentError, match="num_microbatches"):
        micro_batched(t, 0, RULES)
