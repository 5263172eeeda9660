"""Stages of every operation: literal small steps, real models, and the numbers before and after."""

import collections
import itertools
import re
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from autopar.cost.roofline import flops_of
from autopar.errors import InvalidArgumentError
from autopar.frontend.tracing import trace
from autopar.ir.graph import OpKind, Section, read_by
from autopar.ir.rules import RuleBook
from autopar.passes.assign_layers import assign_layers
from autopar.passes.assign_stages import assign, balanced, more_layers
from autopar.passes.fold_layers import layer_kinds, members_of
from autopar.passes.layers import Layers, find_layers
from autopar.passes.microbatch import micro_batched
from benchmarks.zoo.encoder_decoder import encoder_decoder
from benchmarks.zoo.gpt import gpt, gpt_bf16, gpt_remat
from benchmarks.zoo.mlp import mlp
from benchmarks.zoo.optimizers import gpt_adamw
from tests.sections import assert_same_numbers, plain_step, text, zoo_step


def random_array(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def sgd(loss_fn):
    def step(params, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return step


def staged(graph, num_stages):
    layers = find_layers(graph, flops_of)
    return assign(graph, layers, balanced(layers, num_stages))


def one_a_layer(graph):
    layers = find_layers(graph, flops_of)
    return assign(graph, layers, range(len(layers)))


def crossings(found):
    """(section it is made in, section it is first read in, from, to) -> bytes; the batch lies everywhere."""
    graph = found.graph
    made = {v: (op.section.value, at) for op, at in zip(graph.block.ops, found.stages, strict=True) for v in op.outputs}
    for i, v in enumerate(graph.block.inputs):
        if i not in graph.batch:
            made[v] = ("argument", found.homes[i])
    out = collections.Counter()
    sent = set()
    for op, at in zip(graph.block.ops, found.stages, strict=True):
        for v in read_by(op):
            if v in made and made[v][1] != at and (v, at) not in sent:
                sent.add((v, at))
                out[made[v][0], op.section.value, made[v][1], at] += graph.values[v].nbytes
    return dict(out)


def of_layers(*flops):
    n = len(flops)
    return Layers(ops=((),) * n, names=("",) * n, flops=flops, kind_of=(0,) * n, crossing_bytes=(0,) * n)


def test_two_layers_on_two_stages():
    def loss_fn(params, batch):
        return jnp.sum(jnp.sin(jnp.sin(batch @ params["a"]) @ params["b"]))

    params = {"a": random_array(4, 4), "b": random_array(4, 4, seed=1)}
    graph, args = plain_step(sgd(loss_fn), params, random_array(6, 4, seed=2), 2)
    found = one_a_layer(graph)
    expected = """
        forward 0: %0 = split batch
        forward 0: %1 = dot_general %0 state['a']
        forward 0: %2 = sin %1
        forward 0: %3 = cos %1
        forward 1: %4 = dot_general %2 state['b']
        forward 1: %5 = sin %4
        forward 1: %6 = cos %4
        forward 1: %7 = reduce_sum %5
        backward 1: %8 = broadcast_in_dim 1.0
        backward 1: %9 = mul %8 %6
        backward 1: %10 = dot_general %9 %2
        backward 1: %11 = transpose %10
        backward 1: %12 = dot_general %9 state['b']
        backward 0: %13 = mul %12 %3
        backward 0: %14 = dot_general %13 %0
        backward 0: %15 = transpose %14
        backward 1: %16 = accumulate %7
        backward 1: %17 = accumulate %11
        backward 0: %18 = accumulate %15
        after 0: %19 = mul 0.10000000149011612 %18
        after 0: %20 = sub state['a'] %19
        after 1: %21 = mul 0.10000000149011612 %17
        after 1: %22 = sub state['b'] %21
        -> %20 %22 %16
        """
    assert text(found.graph, found.stages) == textwrap.dedent(expected).strip()
    assert found.homes[:2] == (0, 1)
    assert_same_numbers(graph, found.graph, args)


def test_gradients_of_tied_parameters_are_added_behind_the_loop():
    def loss_fn(params, batch):
        return jnp.sum(jnp.sin(jnp.sin(jnp.sin(batch @ params["a"]) @ params["b"]) @ params["a"].T))

    params = {"a": random_array(4, 5), "b": random_array(5, 5, seed=1)}
    graph, args = plain_step(sgd(loss_fn), params, random_array(6, 4, seed=2), 3)
    layers = find_layers(graph, flops_of)
    found = assign(graph, layers, (0, 2))
    (at,) = [i for i, op in enumerate(found.graph.block.ops) if op.primitive == "add_any"]
    addition = found.graph.block.ops[at]
    assert addition.section is Section.AFTER
    assert found.stages[at] == 0
    made = {v: (op.kind, q) for op, q in zip(found.graph.block.ops, found.stages, strict=True) for v in op.outputs}
    assert sorted(made[v][1] for v in addition.inputs) == [0, 1]
    assert {made[v][0] for v in addition.inputs} == {OpKind.ACCUMULATE}
    sums = [op for op in found.graph.block.ops if op.kind is OpKind.ACCUMULATE]
    assert len(sums) == 1 + sum(op.kind is OpKind.ACCUMULATE for op in graph.block.ops)
    assert_same_numbers(graph, found.graph, args)
    # On one stage nothing needs to change.
    together = assign(graph, layers, (0,))
    assert collections.Counter(text(together.graph)) == collections.Counter(text(graph))


@pytest.mark.cases(1)
@pytest.mark.parametrize("case", [gpt, gpt_remat])
def test_only_activations_and_the_tied_embedding_cross_the_stages_of_a_gpt(case):
    graph, args = zoo_step(case(layers=4, batch=8, length=16, width=32, vocabulary=64), 2)
    found = assign(graph, find_layers(graph, flops_of), (0, 2, 4))
    activation, embedding = 4 * 16 * 32 * 4, 64 * 32 * 4
    assert crossings(found) == {
        ("forward", "forward", 0, 1): activation,
        ("forward", "forward", 1, 2): activation,
        ("backward", "backward", 2, 1): activation,
        ("backward", "backward", 1, 0): activation,
        ("argument", "forward", 0, 2): embedding,
        ("backward", "after", 2, 0): embedding,
    }
    assert_same_numbers(graph, found.graph, args)


@pytest.mark.cases(1)
@pytest.mark.parametrize("case", [gpt, gpt_remat, gpt_bf16, gpt_adamw])
def test_equal_layers_have_equal_backward_passes_and_updates(case):
    graph, _ = zoo_step(case(layers=4))
    layers = find_layers(graph, flops_of)
    assert layer_kinds(graph, members_of(graph, assign_layers(graph, layers)), len(layers)) == (0, 1, 1, 1, 1, 2)


def test_gradients_of_biases_lie_with_their_biases_without_modules():
    graph, args = zoo_step(mlp(layers=4), 2)
    found = one_a_layer(graph)
    assert {(made, read) for made, read, _, _ in crossings(found)} == {("forward", "forward"), ("backward", "backward")}
    assert_same_numbers(graph, found.graph, args)


def test_a_global_norm_crosses_the_stages_as_scalars():
    graph, args = zoo_step(gpt_adamw(layers=2), 2)
    found = staged(graph, 3)
    crossing = crossings(found)
    assert max(size for (_, read, _, _), size in crossing.items() if read == "after") <= 64 * 32 * 4
    assert all(size < 1000 for (made, _, _, _), size in crossing.items() if made == "after")
    assert_same_numbers(graph, found.graph, args)


@pytest.mark.slow
def test_an_encoder_and_a_decoder_cut_anywhere():
    graph, args = zoo_step(encoder_decoder(), 2)
    found = one_a_layer(graph)
    assert_same_numbers(graph, found.graph, args)


def test_skip_connections_go_straight_to_the_stage_that_reads_them():
    def loss_fn(params, x):
        kept = []
        for i, w in enumerate(params["down"]):
            with jax.named_scope(f"down{i}"):
                x = jnp.tanh(x @ w)
                kept.append(x)
        for i, w in enumerate(params["up"]):
            with jax.named_scope(f"up{i}"):
                x = jnp.tanh(jnp.concatenate([x, kept.pop()], axis=-1) @ w)
        return jnp.mean(x**2)

    down = [random_array(8, 8, seed=i) for i in range(3)]
    up = [random_array(16, 8, seed=i) for i in range(3)]
    graph, args = plain_step(sgd(loss_fn), {"down": down, "up": up}, random_array(4, 8), 2)
    layers = find_layers(graph, flops_of)
    assert layers.names == ("down0", "down1", "down2", "up0", "up1", "up2")
    assert layers.kind_of[:3] == (0, 0, 0)
    found = one_a_layer(graph)
    activation = 2 * 8 * 4
    forward = {(a, b): size for (made, _, a, b), size in crossings(found).items() if made == "forward"}
    assert forward == dict.fromkeys([(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (1, 4), (0, 5)], activation)
    # The gradient of a skipped activation is added where that of its other reader is made.
    backward = {(*pair,) for made, _, *pair in crossings(found) if made == "backward"}
    assert backward == {(1, 0), (2, 1), (3, 2), (4, 3), (5, 4), (4, 2), (5, 1)}
    assert_same_numbers(graph, found.graph, args)


def test_a_rematerialised_region_may_span_stages():
    def block(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return x

    def loss_fn(params, x):
        return jnp.mean(jax.checkpoint(block)(params, x) ** 2)

    params = [random_array(8, 8, seed=i) for i in range(4)]
    graph, args = plain_step(sgd(loss_fn), params, random_array(4, 8), 2)
    found = one_a_layer(graph)
    # No stage waits for an earlier one in the backward pass: what it needs of it was sent in the forward pass.
    activation = 2 * 8 * 4
    assert crossings(found) == {
        **{("forward", "forward", i, i + 1): activation for i in range(3)},
        **{("backward", "backward", i + 1, i): activation for i in range(3)},
    }
    assert sum(op.kind is OpKind.BARRIER for op in found.graph.block.ops) >= 4
    assert_same_numbers(graph, found.graph, args)


def test_state_that_only_the_update_reads_lies_with_its_parameter():
    def loss_fn(params, batch):
        return jnp.sum(jnp.tanh(jnp.tanh(batch @ params["a"]) @ params["b"]))

    optimizer = optax.adam(1e-3)

    def step(state, batch):
        params, opt_state = state
        updates, opt_state = optimizer.update(jax.grad(loss_fn)(params, batch), opt_state)
        return optax.apply_updates(params, updates), opt_state

    params = {"a": random_array(4, 4), "b": random_array(4, 4, seed=1)}
    graph, args = plain_step(step, (params, optimizer.init(params)), random_array(6, 4), 2)
    found = one_a_layer(graph)
    homes = {graph.values[v].name: home for v, home in zip(graph.block.inputs, found.homes, strict=True)}
    assert {name: home for name, home in homes.items() if "['a']" in name} == dict.fromkeys(
        ["state[0]['a']", "state[1][0].mu['a']", "state[1][0].nu['a']"], 0
    )
    assert all(home == 1 for name, home in homes.items() if "['b']" in name)
    assert_same_numbers(graph, found.graph, args)


def test_balanced_cuts_are_those_of_trying_all():
    random = np.random.default_rng(0)
    for n, num_stages in itertools.product((3, 5, 7), (1, 2, 3)):
        flops = tuple(map(float, random.integers(1, 20, n)))

        def largest(cuts, flops=flops):
            return max(sum(flops[a:b]) for a, b in itertools.pairwise([*cuts, len(flops)]))

        every = [(0, *rest) for rest in itertools.combinations(range(1, n), num_stages - 1)]
        found = balanced(of_layers(*flops), num_stages)
        assert found in every
        assert largest(found) == min(map(largest, every))


def test_more_stages_than_layers_are_refused():
    with pytest.raises(InvalidArgumentError, match=r"3 layers.*5 stages"):
        balanced(of_layers(1.0, 1.0, 1.0), 5)


def test_what_to_do_where_layers_are_too_few():
    """A loop or a branch with all products, such as a user's own over micro-batches, and rows that the step draws."""
    w, x = np.ones((4, 4), np.float32), np.ones((8, 2, 4), np.float32)

    def of_own_loop(w, batch):
        return jax.lax.scan(lambda total, x: (total + jnp.sum(jnp.tanh(x @ w) @ w), None), 0.0, batch)[0]

    def of_branch(w, batch):
        return jax.lax.cond(w[0, 0] > 0, lambda x: jnp.sum(jnp.tanh(x @ w) @ w), lambda x: jnp.sum(x @ w @ w), batch)

    def of_buffer(w, batch):
        return jnp.sum(jnp.tanh(w[jnp.arange(8) % 4] @ w) @ w)

    def hint(loss_fn, num_microbatches):
        traced = trace(sgd(loss_fn), (w, x), names=("w", "batch"), donate=(0,), batch=(1,))
        return more_layers(micro_batched(traced, num_microbatches, RuleBook()))

    assert re.search(r"each trip of the scan at .*test_assign_stages.py:\d+", hint(of_own_loop, 1))
    branch = hint(of_branch, 1)
    assert "; the cond at" in branch
    assert "each trip" not in branch
    assert re.search(
        r"use num_microbatches=1: the dot_general at .*test_assign_stages.py:\d+",
        hint(of_buffer, 2),
    )
    assert hint(of_buffer, 1).startswith("use fewer stages")


@pytest.mark.cases(4)
@pytest.mark.parametrize("cut", [(), (1,), (0, 0), (0, 2, 1), (0, 9)])
def test_cuts_out_of_order_are_refused(cut):
    graph, _ = zoo_step(mlp(layers=2))
    with pytest.raises(InvalidArgumentError, match="first layers"):
        assign(graph, find_layers(graph, flops_of), cut)
