"""Steps that shuffle the examples of their batch, or mix them in front of the model: its products are in the loop."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.frontend.tracing import trace
from autopar.ir.graph import Section
from autopar.ir.rules import RuleBook
from autopar.passes.microbatch import micro_batched
from autopar.passes.plain_loop import run_graph
from tests.small_steps import assert_close

EXAMPLES, WIDTH, HIDDEN = 8, 16, 32
KEY = jax.random.key(0)
MIXED = {
    "rows in random order": lambda x: jax.random.permutation(KEY, x),
    "rows by random numbers": lambda x: x[jax.random.permutation(KEY, x.shape[0])],
    "rows drawn with replacement": lambda x: x[jax.random.choice(KEY, x.shape[0], (x.shape[0],))],
    "rows by their order": lambda x: x[jnp.argsort(x[:, 0])],
    "rows set at random numbers": lambda x: jnp.asarray(x).at[jax.random.permutation(KEY, x.shape[0])[0]].set(0.0),
    "every second row set": lambda x: jnp.asarray(x).at[::2].set(0.0),
    "rows beside others": lambda x: 0.5 * x + 0.5 * x[jax.random.permutation(KEY, x.shape[0])],
    "rows moved": lambda x: jnp.roll(x, 1, 0),
    "rows less their mean": lambda x: (x - x.mean(0)) / (x.std(0) + 1),
}


def state():
    return {"in": jax.random.normal(KEY, (WIDTH, HIDDEN)), "out": jax.random.normal(KEY, (HIDDEN, WIDTH))}


def step_on(inputs_of):
    def loss(params, batch):
        return jnp.mean((jnp.tanh(inputs_of(batch) @ params["in"]) @ params["out"]) ** 2)

    def step(params, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def products_of(graph):
    return collections.Counter(op.section for op in graph.ops() if op.primitive == "dot_general")


@pytest.mark.cases(3)
@pytest.mark.parametrize("inputs_of", MIXED.values(), ids=MIXED)
def test_products_of_examples_that_are_mixed_before_are_in_the_loop(inputs_of):
    step, batch = step_on(inputs_of), np.random.default_rng(0).normal(size=(EXAMPLES, WIDTH)).astype(np.float32)
    traced = trace(step, (state(), batch), names=("state", "batch"), donate=(0,), batch=(1,))
    graph = micro_batched(traced, 4, RuleBook())
    assert products_of(graph) == {Section.FORWARD: 2, Section.BACKWARD: 3}
    assert_close(run_graph(graph, jax.tree.leaves((state(), batch))), jax.tree.leaves(step(state(), batch)))


def test_a_product_of_the_mean_of_all_examples_runs_once():
    def step(params, batch):
        new, loss = step_on(lambda x: x)(params, batch)
        return new, (loss, batch.mean(0) @ params["in"])

    batch = np.random.default_rng(0).normal(size=(EXAMPLES, WIDTH)).astype(np.float32)
    traced = trace(step, (state(), batch), names=("state", "batch"), donate=(0,), batch=(1,))
    graph = micro_batched(traced, 4, RuleBook())
    assert products_of(graph) == {Section.FORWARD: 2, Section.BACKWARD: 3, Section.AFTER: 1}
    assert_close(run_graph(graph, jax.tree.leaves((state(), batch))), jax.tree.leaves(step(state(), batch)))
