"""Layers of traced steps: by modules, by repetition, by clustering."""

import dataclasses
import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from msgspec.structs import replace

from autopar.cost.roofline import flops_of
from autopar.ir.graph import OpKind
from autopar.passes import layers
from autopar.passes.assign_layers import assign_layers
from autopar.passes.layers import find_layers, layer_ops, portable_ops
from autopar.passes.plain_loop import read
from benchmarks.zoo.gpt import gpt, gpt_odd, gpt_remat
from benchmarks.zoo.mlp import mlp
from tests.sections import plain_step, run, sectioned, traced_step, zoo_step
from tests.small_steps import transformer


def names_and_kinds(graph, **options):
    found = find_layers(graph, flops_of, **options)
    return list(zip(found.names, found.kind_of, strict=True))


def small_mlp(widths):
    """A step of products and tanh, `widths[i]` to `widths[i + 1]`, without module names."""

    def loss_fn(params, batch):
        x = batch
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    def step(params, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    params = [np.ones((a, b), np.float32) for a, b in itertools.pairwise(widths)]
    return plain_step(step, params, np.ones((8, widths[0]), np.float32))[0]


@pytest.mark.cases(1)
@pytest.mark.parametrize("case", [gpt, gpt_remat])
def test_numbered_modules_are_layers_and_heavy_ends_stand_alone(case):
    graph, _ = zoo_step(case(layers=3))
    assert names_and_kinds(graph) == [
        ("GPT/token_embedding", 0),
        ("GPT/layer0", 1),
        ("GPT/layer1", 1),
        ("GPT/layer2", 1),
        ("GPT/token_embedding.attend", 2),
    ]


def test_what_crosses_between_layers_of_a_transformer_is_its_activation():
    graph, _ = zoo_step(gpt(layers=3, batch=8, length=16, width=32))
    assert find_layers(graph, flops_of).crossing_bytes == (*[8 * 16 * 32 * 4] * 4, 0)


def test_every_forward_operation_is_in_one_layer_in_program_order():
    graph, _ = zoo_step(gpt())
    found = find_layers(graph, flops_of)
    assert [i for group in found.ops for i in group] == [op.id for op in layer_ops(graph)]
    assert sum(found.flops) == pytest.approx(sum(flops_of(op) for op in layer_ops(graph)))


def test_a_large_head_does_not_hide_the_modules():
    graph, _ = zoo_step(gpt_odd())
    assert [kind for _, kind in names_and_kinds(graph)] == [0, 1, 1, 2]


def test_without_modules_repeated_products_are_layers():
    graph, _ = zoo_step(mlp(layers=4))
    assert names_and_kinds(graph) == [("layer 0", 0), ("layer 1", 1), ("layer 2", 1), ("layer 3", 1), ("layer 4", 2)]


def test_repetition_finds_the_layers_that_modules_name():
    case = transformer(layers=3)
    state = case.create(jax.random.key(0))
    named, _ = plain_step(case.step, state, case.batch)
    expected = find_layers(named, flops_of)
    assert expected.kind_of == (0, 1, 1, 1, 2)
    ops = tuple(replace(op, module="") for op in named.block.ops)
    unnamed = dataclasses.replace(named, block=replace(named.block, ops=ops))
    assert find_layers(unnamed, flops_of).ops == expected.ops


def test_a_tanh_stays_with_the_product_before_it():
    graph = small_mlp([16, 16, 16])
    by_id = {op.id: op.primitive for op in graph.block.ops}
    found = find_layers(graph, flops_of)
    # What the derivative keeps, 1 - tanh^2, is a subtraction or a primitive of its own, by jax's version.
    *first, derivative = [by_id[i] for i in found.ops[0]]
    assert first == ["dot_general", "tanh"]
    assert derivative in ("sub", "one_minus_square")


def test_clusters_are_cut_where_few_bytes_cross():
    # Without repetition, in two: the narrow waist is the cut, although it is not the middle of the arithmetic.
    graph = small_mlp([40, 36, 6, 34, 30])
    found = find_layers(graph, flops_of, max_layers=2)
    assert len(found) == 2
    assert found.crossing_bytes == (8 * 6 * 4, 0)


def test_least_cuts_are_those_of_trying_all():
    random = np.random.default_rng(0)
    for _ in range(50):
        n, clusters = 7, 3
        before = np.concatenate(([0.0], np.cumsum(random.integers(1, 9, n)))).astype(float)
        gaps = random.integers(0, 9, n).astype(float)
        bound = (1 + layers.SLACK) * before[-1] / clusters

        def cost(cuts, before=before, gaps=gaps, n=n):
            sizes = np.diff(before[[0, *cuts, n]])
            return sum(2 * gaps[c] for c in (0, *cuts)) + np.sum((sizes / before[-1]) ** 2), sizes.max()

        costs = [cost(cuts) for cuts in itertools.combinations(range(1, n), clusters - 1)]
        allowed = [value for value, largest in costs if largest <= bound]
        ends = layers._least_cuts(before, gaps, clusters, bound)
        if not allowed:
            assert ends is None
        else:
            assert cost(tuple(ends[:-1]))[0] == pytest.approx(min(allowed))


def test_layers_beyond_the_limit_are_joined():
    graph, _ = zoo_step(mlp(layers=7))
    assert len(find_layers(graph, flops_of, max_layers=4)) == 4


def test_masks_are_portable_and_what_depends_on_parameters_is_not():
    graph, _ = zoo_step(gpt(layers=1))
    portable = portable_ops(graph)
    primitives = {op.primitive for op in graph.block.ops if op.id in portable}
    assert "iota" in primitives
    assert "dot_general" not in primitives
    assert all(op.id in portable for op in graph.block.ops if op.kind is OpKind.SPLIT)


def test_parts_of_a_scan_are_layers_whatever_numbers_the_modules_around_them_have():
    """As the numbers of a sequence of modules, of which one scans."""
    paths = ["0", "0", "2/layers[0:2]", "2/layers[2:3]", "3"]
    ops = [SimpleNamespace(id=i, module=path) for i, path in enumerate(paths)]
    labels = layers.module_labels(ops, [1, 1, 9, 9, 1], [2, 3], frozenset())
    assert labels == paths


def test_only_what_is_equal_is_taken_for_computed_again():
    """Two choices that differ in a literal, handed to one function, have equations of one text."""

    @jax.checkpoint
    def layer(x, w):
        y = x @ w
        return jnp.sin(jnp.where(y > 0, 2.0, y)) * jnp.cos(jnp.where(y > 0, 3.0, y))

    def step(w, x):
        return w - jax.grad(lambda w: jnp.mean(layer(layer(x, w), w)))(w)

    w, x = (np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32) for _ in range(2))
    graph = sectioned(traced_step(step, w, x))
    same_as = assign_layers(graph, find_layers(graph, flops_of)).same_as
    values = dict(zip(graph.block.inputs, [*graph.constants, w, x], strict=True))
    for op in graph.block.ops:
        if op.kind is OpKind.ACCUMULATE:
            values[op.outputs[0]] = values[op.inputs[0]]
        else:
            values.update(zip(op.outputs, run(op, lambda atom: read(values, atom), 0, 1), strict=True))
    assert any(graph.values[v].shape == (4, 4) for v in same_as)
    for v, first in same_as.items():
        np.testing.assert_array_equal(values[v], values[first])
