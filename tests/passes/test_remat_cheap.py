"""Cheap values of constants alone are made in the section that reads them."""

import jax
import jax.numpy as jnp

from autopar.frontend.tracing import trace
from autopar.ir.graph import Section, read_by
from autopar.ir.rules import RuleBook
from autopar.passes.microbatch import micro_batched
from autopar.passes.remat_cheap import copies_state, sink_cheap_ops


def cut(step, m=1):
    state, batch = jax.ShapeDtypeStruct((8, 8), jnp.float32), jax.ShapeDtypeStruct((4, 8), jnp.float32)
    traced = trace(step, (state, batch), names=("state", "batch"), donate=(0,), batch=(1,))
    return micro_batched(traced, m, RuleBook())


def where(graph, primitive):
    return [op.section for op in graph.block.ops if op.primitive == primitive]


def masked(w, x):
    def loss(w):
        return jnp.sum(jnp.where(jnp.tri(4, 8, dtype=bool), x @ w, -1.0) ** 2)

    return w - jax.grad(loss)(w), 0.0


def test_a_mask_is_made_in_both_passes_and_not_before():
    before, after = cut(masked), sink_cheap_ops(cut(masked))
    assert where(before, "iota") == [Section.BEFORE] * 2
    assert set(where(after, "iota")) == {Section.FORWARD, Section.BACKWARD}
    assert [op.id for op in after.ops()] == list(range(len(list(after.ops()))))


def test_what_comes_of_the_state_stays_before_the_loop():
    def step(w, x):
        return w - jax.grad(lambda w: jnp.sum((x @ w.astype(jnp.bfloat16).astype(jnp.float32)) ** 2))(w), 0.0

    graph = sink_cheap_ops(cut(step, 2))
    assert Section.BEFORE in where(graph, "convert_element_type")


def halved(w, x):
    return w - jax.grad(lambda w: jnp.sum((x @ w.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)) ** 2))(w), 0.0


def test_copies_of_the_state_are_made_anew_in_both_passes_where_that_is_asked_for():
    kept, anew = sink_cheap_ops(cut(halved, 2)), sink_cheap_ops(cut(halved, 2), of_state=True)
    assert Section.BEFORE in where(kept, "convert_element_type")
    assert Section.BEFORE not in where(anew, "convert_element_type")
    assert {Section.FORWARD, Section.BACKWARD} <= set(where(anew, "convert_element_type"))


def test_whether_the_state_is_copied():
    assert copies_state(sink_cheap_ops(cut(halved, 2)))
    assert not copies_state(sink_cheap_ops(cut(masked)))


def test_values_that_the_update_reads_stay():
    def step(w, x):
        mask = jnp.tri(8, 8)
        return (w - jax.grad(lambda w: jnp.sum((x @ (w * mask)) ** 2))(w)) * mask, 0.0

    graph = sink_cheap_ops(cut(step, 2))
    made = {v for op in graph.block.ops for v in op.outputs} | set(graph.block.inputs)
    for op in graph.block.ops:
        assert all(a in made for a in op.inputs if isinstance(a, int))
    # The masked matrix is made once, before the loop; its gradient is masked in the loop.
    assert set(where(graph, "iota")) == {Section.BEFORE, Section.BACKWARD}


def test_a_long_chain_of_cheap_operations_sinks():
    """Deeper than Python calls functions."""

    def step(w, x):
        def loss(w):
            scale = w[0]
            for _ in range(1200):
                scale = scale * 1.001
            return jnp.sum(jnp.tanh(x @ w) * scale)

        return w - jax.grad(loss)(w), 0.0

    graph = sink_cheap_ops(cut(step, 2), of_state=True)
    assert where(graph, "mul").count(Section.BACKWARD) > 1200


def test_what_is_larger_than_the_batch_that_it_is_made_of_is_made_where_it_is_read():
    """Labels of 512 classes, whose part of the gradient depends on nothing but them; but not inputs that are scaled."""

    def step(w, batch):
        def loss(w):
            logits = jax.nn.log_softmax((3.0 * batch["x"]) @ w)
            return -jnp.sum(jax.nn.one_hot(batch["labels"], 512) * logits)

        return w - jax.grad(loss)(w), 0.0

    of = jax.ShapeDtypeStruct
    batch = {"x": of((4, 8), jnp.float32), "labels": of((4,), jnp.int32)}
    traced = trace(step, (of((8, 512), jnp.float32), batch), names=("w", "batch"), donate=(0,), batch=(1,))
    graph = micro_batched(traced, 1, RuleBook())

    def waiting(graph):
        """The shapes of what both passes find made, without scalars."""
        read = {v for op in graph.block.ops if op.section.repeats for v in read_by(op)}
        made = (v for op in graph.block.ops if op.section is Section.BEFORE for v in op.outputs)
        return [graph.values[v].shape for v in made if v in read and graph.values[v].shape]

    assert waiting(graph) == [(4, 8), (4, 512), (4, 1)]
    sunk = sink_cheap_ops(graph)
    assert waiting(sunk) == [(4, 8), (4, 1)]
    assert where(sunk, "eq") == [Section.BEFORE, Section.BACKWARD]
