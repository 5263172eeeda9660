"""Rematerialisation by layer: what is kept, what is computed again, and the numbers before and after."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.cost.roofline import flops_of
from autopar.frontend.recompute_in_scans import Recompute
from autopar.ir.graph import OpKind, Section, read_by
from autopar.ir.rewrite import remove_dead, renumbered
from autopar.ops.attention.match import blockwise
from autopar.passes import remat
from autopar.passes.assign_layers import assign_layers
from autopar.passes.assign_stages import assign
from autopar.passes.layers import find_layers
from autopar.passes.remat import rematerialise
from benchmarks.zoo.encoder_decoder import encoder_decoder
from benchmarks.zoo.gpt import gpt, gpt_remat
from benchmarks.zoo.gpt_scan import gpt_scan
from benchmarks.zoo.mlp import mlp
from benchmarks.zoo.stateful import dropout
from tests.sections import assert_same_numbers, plain_step, text, zoo_step


def two_layers():
    def loss_fn(params, batch):
        return jnp.sum(jnp.sin(jnp.sin(batch @ params["a"]) @ params["b"]))

    def step(params, batch):
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss_fn)(params, batch))

    random = np.random.default_rng(0)
    params = {name: random.normal(size=(4, 4)).astype(np.float32) for name in "ab"}
    return plain_step(step, params, random.normal(size=(6, 4)).astype(np.float32), 2)


def saved_bytes(graph, layers, assignment=None):
    """Bytes that a micro-batch keeps for the backward pass, at the first layer whose backward operations read them."""
    of_ops = (assignment or assign_layers(graph, layers)).layer_of
    read, out = {}, [0] * len(layers)
    for op, at in reversed([*zip(graph.block.ops, of_ops, strict=True)]):
        if op.section.is_backward and op.kind not in (OpKind.ACCUMULATE, OpKind.STACK):
            pairs = itertools.product(read_by(op), op.outputs)
            if op.kind is OpKind.BARRIER:
                pairs = zip(op.inputs, op.outputs, strict=True)
            for v, result in pairs:
                read.setdefault(v, set()).update(read.get(result, ()) if at is None else {at})
    for op in graph.block.ops:
        if op.section is Section.FORWARD or op.kind is OpKind.SPLIT:
            for v in op.outputs:
                if read.get(v):
                    out[min(read[v])] += graph.values[v].nbytes
    return tuple(out)


def kept_bytes(again, layers):
    return saved_bytes(again.graph, layers, again.assignment)


def backward_primitives(graph):
    return [op.primitive for op in graph.block.ops if op.section is Section.BACKWARD]


def test_nothing_changes_nothing():
    graph, _ = two_layers()
    assert text(rematerialise(graph, find_layers(graph, flops_of), Recompute.NOTHING).graph) == text(graph)


def test_nothing_is_computed_again_in_vain(monkeypatch):
    """The layer of the loss reads its labels one-hot by an operation that each stage may run for itself."""

    def loss_fn(params, batch):
        logits = jnp.sin(batch["x"] @ params["a"]) @ params["b"]
        one_hot = batch["label"][:, None] == jnp.arange(logits.shape[1])
        return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * one_hot, axis=1))

    def step(params, batch):
        loss, gradients = jax.value_and_grad(loss_fn)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss

    random = np.random.default_rng(0)
    params = {name: random.normal(size=(4, 4)).astype(np.float32) for name in "ab"}
    batch = {"x": random.normal(size=(6, 4)).astype(np.float32), "label": np.arange(6, dtype=np.int32) % 4}
    graph, args = plain_step(step, params, batch, 2)
    removed = []

    def remembering(block):
        alive = remove_dead(block)
        ids = {op.id for op in alive.ops}
        removed.extend(op for op in block.ops if op.id not in ids)
        return alive

    monkeypatch.setattr(remat, "remove_dead", remembering)
    again = rematerialise(graph, find_layers(graph, flops_of), Recompute.ALL).graph
    assert_same_numbers(graph, again, args)
    assert {op.section for op in removed} <= {Section.FORWARD}
    backward = [op for op in again.block.ops if op.section is Section.BACKWARD]
    masks = [op for op in again.block.ops if op.section is Section.FORWARD and op.primitive == "eq"]
    one_hot = {v for op in masks for v in op.outputs}
    assert masks
    assert not any(one_hot & {*read_by(op)} for op in backward)


def test_a_layer_is_computed_again_from_its_input_behind_a_barrier():
    graph, args = two_layers()
    layers = find_layers(graph, flops_of)
    again = rematerialise(graph, layers, [Recompute.ALL, Recompute.NOTHING]).graph
    assert_same_numbers(graph, again, args)
    (barrier,) = [op for op in again.block.ops if op.kind is OpKind.BARRIER]
    named = {v: graph.values[v].name for v in graph.block.inputs}
    made = {v: op for op in again.block.ops for v in op.outputs}
    # The batch, the parameter, and the cotangent that the layer waits for.
    kinds = [named.get(v) or (made[v].section.value, made[v].primitive) for v in barrier.inputs]
    assert kinds == [("forward", "split"), "state['a']", ("backward", "dot_general")]
    at = again.block.ops.index(barrier)
    dot, cos = again.block.ops[at + 1 : at + 3]
    assert (dot.primitive, dot.section, cos.primitive) == ("dot_general", Section.BACKWARD, "cos")
    assert set(dot.inputs) == set(barrier.outputs[:2])
    assert [op.primitive for op in again.block.ops[at + 3 :]][:2] == ["mul", "dot_general"]
    assert set(again.block.ops[at + 3].inputs) == {barrier.outputs[2], *cos.outputs}


def test_a_layer_reads_its_parameter_behind_the_barrier_for_both_passes():
    graph, args = two_layers()
    again = rematerialise(graph, find_layers(graph, flops_of), [Recompute.NOTHING, Recompute.ALL]).graph
    assert_same_numbers(graph, again, args)
    (barrier,) = [op for op in again.block.ops if op.kind is OpKind.BARRIER]
    (b,) = [v for v in again.block.inputs if again.values[v].name == "state['b']"]
    (behind,) = [out for v, out in zip(barrier.inputs, barrier.outputs, strict=True) if v == b]
    readers = {v: [op.primitive for op in again.block.ops if v in op.inputs] for v in (b, behind)}
    # Of the forward pass nothing reads the result: the update; the product again, and its transpose for the gradient of
    # what enters the layer.
    assert readers == {b: ["optimization_barrier", "sub"], behind: ["dot_general", "dot_general"]}


def test_matmuls_keeps_the_products():
    graph, args = two_layers()
    layers = find_layers(graph, flops_of)
    products = [p for p in backward_primitives(graph) if p == "dot_general"]
    cheap, full = (rematerialise(graph, layers, what).graph for what in (Recompute.CHEAP, Recompute.ALL))
    assert [p for p in backward_primitives(cheap) if p == "dot_general"] == products
    assert len([p for p in backward_primitives(full) if p == "dot_general"]) == len(products) + 2
    for new in (cheap, full):
        assert_same_numbers(graph, new, args)


def test_matmuls_keeps_what_attention_makes():
    """Its result is that of a product, and it has no scores."""
    graph = renumbered(blockwise(zoo_step(gpt(layers=2, batch=8, length=16, width=32))[0]))
    layers = find_layers(graph, flops_of)
    cheap, full = (rematerialise(graph, layers, what).graph for what in (Recompute.CHEAP, Recompute.ALL))
    assert backward_primitives(cheap).count("attention") == 0
    assert backward_primitives(full).count("attention") == 2


def test_with_recomputation_a_transformer_layer_keeps_its_input_only():
    graph, _ = zoo_step(gpt(layers=3, batch=8, length=16, width=32))
    layers = find_layers(graph, flops_of)
    activation = 8 * 16 * 32 * 4
    full = kept_bytes(rematerialise(graph, layers, Recompute.ALL), layers)
    assert full[1:4] == (activation,) * 3
    cheap = kept_bytes(rematerialise(graph, layers, Recompute.CHEAP), layers)
    everything = saved_bytes(graph, layers)
    assert all(a < b < c for a, b, c in zip(full[1:4], cheap[1:4], everything[1:4], strict=True))


def test_layers_may_have_policies_of_their_own():
    graph, args = zoo_step(gpt(layers=2), 2)
    layers = find_layers(graph, flops_of)
    kept = saved_bytes(graph, layers)
    policies = [Recompute.NOTHING, Recompute.ALL, Recompute.NOTHING, Recompute.NOTHING]
    mixed = rematerialise(graph, layers, policies)
    found = kept_bytes(mixed, layers)
    assert found[1] < kept[1]
    assert found[2] >= kept[2]
    assert_same_numbers(graph, mixed.graph, args)


@pytest.mark.cases(1)
@pytest.mark.parametrize("case", [mlp, gpt, gpt_remat, gpt_scan, dropout, encoder_decoder])
@pytest.mark.parametrize("what", [Recompute.CHEAP, Recompute.HALF, Recompute.ALL])
def test_real_models_compute_the_same_in_stages(case, what):
    graph, args = zoo_step(case(), 2)
    layers = find_layers(graph, flops_of)
    again = rematerialise(graph, layers, what)
    found = assign(again.graph, layers, range(len(layers)), again.assignment)
    assert_same_numbers(graph, found.graph, args)
    assert sum(kept_bytes(again, layers)) < sum(saved_bytes(graph, layers))


def test_regions_that_the_user_rematerialises_stay():
    graph, _ = zoo_step(gpt_remat(layers=2))
    layers = find_layers(graph, flops_of)
    again = rematerialise(graph, layers, Recompute.ALL)
    regions = [op.outputs for op in graph.block.ops if op.kind is OpKind.BARRIER]
    kept = [op.outputs for op in again.graph.block.ops if op.kind is OpKind.BARRIER and op.outputs in regions]
    assert kept == regions
    assert all(a <= b for a, b in zip(kept_bytes(again, layers), saved_bytes(graph, layers), strict=True))


def conditioned_layers():
    """Four layers that are all scaled by one vector of each example, as blocks of a diffusion transformer are."""

    def loss_fn(params, batch):
        condition, x = jnp.tanh(batch @ params["condition"]), batch
        for weight, scale in params["layers"]:
            x = x + jnp.tanh((x * (1 + jax.nn.silu(condition) @ scale)) @ weight)
        return jnp.mean(x**2)

    def step(params, batch):
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss_fn)(params, batch))

    random = np.random.default_rng(0)
    matrix = lambda: random.normal(size=(8, 8)).astype(np.float32)
    params = {"condition": matrix(), "layers": [(matrix(), matrix()) for _ in range(4)]}
    return plain_step(step, params, random.normal(size=(6, 8)).astype(np.float32), 2)


@pytest.mark.parametrize(
    ("what", "expected"), [(Recompute.NOTHING, [7, 10]), (Recompute.CHEAP, [7, 10]), (Recompute.ALL, [9, 15])]
)
def test_the_backward_pass_of_a_layer_stays_in_its_stage(what, expected):
    """What all layers read, and every layer computes again, draws none of them to the first stage."""
    graph, args = conditioned_layers()
    layers = find_layers(graph, flops_of)
    cuts = (0, len(layers) // 2)

    again = rematerialise(graph, layers, what)
    staged = assign(again.graph, layers, cuts, again.assignment)
    assert_same_numbers(graph, staged.graph, args)
    ops = zip(staged.graph.block.ops, staged.stages, strict=True)
    at = [stage for op, stage in ops if op.section is Section.BACKWARD and op.primitive == "dot_general"]
    assert [at.count(0), at.count(1)] == expected
