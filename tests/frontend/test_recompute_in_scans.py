"""Recomputation in scans over layers: the products that are done again, and results equal to plain `jax.jit`."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import recipes
from autopar.common.progress import Progress
from autopar.frontend.build_graph import build_graph
from autopar.frontend.tracing import trace
from autopar.ir.graph import OpKind, walk
from autopar.ir.rules import RuleBook
from autopar.plan.options import PlanRequest
from autopar.plan.plan import Trees
from autopar.search.planner import make_plan
from tests.small_steps import assert_close, grouped, shapes, slow_cluster

LAYERS, WIDTH, HIDDEN = 4, 16, 48


def layer(x, p):
    h = jnp.tanh(x * p["scale"]) @ p["up"]
    return x + jax.nn.gelu(h) @ p["down"]


def stepped(forward):
    def step(state, batch):
        def loss(state):
            return jnp.mean((forward(state, batch) - batch["y"]) ** 2)

        value, gradients = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients), value

    return step


def plain(state, batch):
    return jax.lax.scan(lambda x, p: (layer(x, p), None), batch["x"], state["layers"])[0]


def from_the_last(state, batch):
    return jax.lax.scan(lambda x, p: (layer(x, p), None), batch["x"], state["layers"], reverse=True)[0]


def checkpointed(state, batch):
    kept = jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_saveable)
    return jax.lax.scan(lambda x, p: (kept(x, p), None), batch["x"], state["layers"])[0]


def turned(x, p):
    """A layer with a table of its own, which is made once for all layers where nothing is computed again."""
    return layer(x * jnp.cos(jnp.arange(WIDTH) / 7.0), p)


def turned_and_checkpointed(state, batch):
    return jax.lax.scan(lambda x, p: (jax.checkpoint(turned)(x, p), None), batch["x"], state["layers"])[0]


def unrolled_and_checkpointed(state, batch):
    x = batch["x"]
    for i in range(LAYERS):
        x = jax.checkpoint(turned)(x, jax.tree.map(lambda a, i=i: a[i], state["layers"]))
    return x


def in_16_bits(state, batch):
    def cast(x, p):
        return x + layer(x.astype(jnp.bfloat16), jax.tree.map(lambda a: a.astype(jnp.bfloat16), p)), None

    return jax.lax.scan(cast, batch["x"], state["layers"])[0]


def with_a_shared_matrix(state, batch):
    shared = state["layers"]["up"][0] @ state["layers"]["down"][0]
    return jax.lax.scan(lambda x, p: (layer(jnp.sin(x @ shared), p), None), batch["x"], state["layers"])[0]


def dropped(state, batch):
    def body(x, drawn):
        p, key = drawn
        return x + jnp.where(jax.random.bernoulli(key, 0.9, x.shape), layer(x, p), 0.0), None

    keys = jax.random.split(jax.random.key(3), LAYERS)
    return jax.lax.scan(body, batch["x"], (state["layers"], keys))[0]


def handed_out(state, batch):
    """What the layers stack is a result too."""

    def body(x, p):
        x = layer(x, p)
        return x, jnp.mean(x * x, -1)

    x, norms = jax.lax.scan(body, batch["x"], state["layers"])
    return x * jnp.mean(norms, 0)[:, None]


def in_a_loop(state, batch):
    """A scan over layers inside of one over halves of the batch."""
    halves = batch["x"].reshape(2, -1, WIDTH)
    made = jax.lax.scan(lambda c, x: (c, plain(state, {"x": x})), 0, halves)[1]
    return made.reshape(-1, WIDTH)


FORMS = (
    plain, from_the_last, checkpointed, in_16_bits, with_a_shared_matrix, dropped, handed_out, in_a_loop,
)  # fmt: skip


def arguments():
    keys = iter(jax.random.split(jax.random.key(0), 5))
    normal = lambda *shape: 0.3 * jax.random.normal(next(keys), shape)
    layers = {
        "scale": normal(LAYERS, WIDTH), "up": normal(LAYERS, WIDTH, HIDDEN), "down": normal(LAYERS, HIDDEN, WIDTH),
    }  # fmt: skip
    return {"layers": layers}, {"x": normal(8, WIDTH), "y": normal(8, WIDTH)}


def traced(form, policy):
    args = tuple(map(shapes, arguments()))
    step = trace(stepped(form), args, names=("state", "batch"), donate=(0,), batch=(1,))
    return dataclasses.replace(step, scan_recompute=policy)


def in_scans(form, policy):
    """(products, tanh) of a turn of each scan over layers, and the bytes that the first scan stacks."""
    graph = build_graph(traced(form, policy), RuleBook())
    scans = [op for op in graph.ops() if op.kind is OpKind.SCAN]
    counts = [collections.Counter(op.primitive for op in walk(scan.blocks[0])) for scan in scans]
    stacked = sum(graph.values[v].nbytes for v in scans[0].outputs[scans[0].num_carry :])
    return [(count["dot_general"], count["tanh"]) for count in counts], stacked


# Bytes of an example in all layers: of a value of the layer's input, and of its hidden product.
INPUT, PRODUCT = LAYERS * 8 * WIDTH * 4, LAYERS * 8 * HIDDEN * 4


def test_products_are_kept_and_the_rest_is_computed_again():
    # Forward two products, backward four; tanh of the input and that inside of gelu.
    assert in_scans(plain, "")[0] == [(2, 2), (4, 0)]
    assert in_scans(plain, "matmuls") == ([(2, 2), (4, 2)], INPUT + PRODUCT)


def test_from_the_input_of_a_layer_its_first_product_is_done_again():
    assert in_scans(plain, "input") == ([(2, 2), (5, 2)], INPUT)  # no gradient reads the second product


def test_a_forward_scan_that_reads_what_another_stacks_reads_it_still():
    def form(state, batch):
        def down(x, p):
            x = layer(x, p)
            return x, jnp.tanh(x)

        def up(x, drawn):
            p, skipped = drawn
            return layer(x + skipped, p), None

        x, skips = jax.lax.scan(down, batch["x"], state["layers"])
        return jax.lax.scan(up, x, (state["layers"], skips))[0]

    # Two tanh of a layer, and that of the skip in the scan that makes it, and in its backward pass.
    counts = [tanh for _, tanh in in_scans(form, "matmuls")[0]]
    assert counts == [3, 2, 2, 3]


def test_a_shared_matrix_is_handed_on_and_not_stacked():
    assert in_scans(with_a_shared_matrix, "input")[1] == INPUT


def test_no_scan_and_nothing_left_to_compute_again_are_the_same_graph():
    def unrolled(state, batch):
        x = batch["x"]
        for i in range(LAYERS):
            x = layer(x, jax.tree.map(lambda a, i=i: a[i], state["layers"]))
        return x

    def whole(state, batch):
        return jax.lax.scan(lambda x, p: (jax.checkpoint(layer)(x, p), None), batch["x"], state["layers"])[0]

    for form in (unrolled, whole):
        ops = [len(list(build_graph(traced(form, policy), RuleBook()).ops())) for policy in ("", "input")]
        assert ops[0] == ops[1]


def test_what_the_code_computes_again_is_kept():
    assert in_scans(turned_and_checkpointed, "")[0] == [(2, 2), (5, 2)]
    assert in_scans(turned_and_checkpointed, "nothing")[0] == [(2, 2), (4, 0)]
    assert in_scans(turned_and_checkpointed, "matmuls") == ([(2, 2), (4, 2)], INPUT + PRODUCT)
    again = {}
    for policy in ("", "nothing"):
        ops = list(build_graph(traced(unrolled_and_checkpointed, policy), RuleBook()).ops())
        again[policy] = sum(op.primitive == "dot_general" for op in ops if op.recomputes)
    assert again == {"": LAYERS, "nothing": 0}


KEPT = [(form, "nothing") for form in (checkpointed, turned_and_checkpointed, unrolled_and_checkpointed)]
AGAIN = [(form, policy) for form in (*FORMS, turned_and_checkpointed) for policy in ("matmuls", "input")]


@pytest.mark.cases(1)
@pytest.mark.parametrize(("form", "policy"), KEPT + AGAIN)
@pytest.mark.parametrize(("devices", "options"), [(1, {}), (2, {"num_microbatches": 2}), (4, {})])
def test_results_are_those_of_jit(form, policy, devices, options):
    state, batch = arguments()
    trees = Trees(
        arguments=(jax.tree.structure(state), jax.tree.structure(batch)), names=("state", "batch"),
        donated=frozenset({0}), batch=frozenset({1}),
    )  # fmt: skip
    request = PlanRequest(scan_recompute=policy, **options)
    progress = Progress("", show=False)
    plan = make_plan(traced(form, ""), trees, slow_cluster(devices), request, RuleBook(), progress)
    assert plan.record.scan_recompute == policy
    step = autopar.parallelize(stepped(form), plan=plan, cache_dir=None)
    expected = jax.jit(stepped(form))(state, batch)
    got = step(jax.tree.map(jnp.copy, state), batch)
    assert_close(jax.tree.map(np.asarray, got), expected, 2e-2 if form is in_16_bits else 1e-5)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("recipe", "policy"),
    [
        (recipes.combine(dp=2, num_microbatches=2, recompute="matmuls"), "matmuls"),
        (recipes.combine(dp=2, num_microbatches=2, recompute="half matmuls"), "half matmuls"),
        (recipes.combine(dp=2, num_microbatches=2, recompute="input"), "input"),
        (recipes.combine(pp=2, num_microbatches=2, recompute="matmuls"), "matmuls"),
        (recipes.combine(pp=2, num_microbatches=2, recompute="input"), ""),
    ],
)
def test_a_policy_of_a_recipe_holds_in_scans(recipe, policy):
    state, batch = arguments()
    options = dict(cluster=slow_cluster(2), cache_dir=None)
    step = autopar.parallelize(stepped(plain), plan=recipe, **grouped(**options))
    assert step.plan(state, batch).record.scan_recompute == policy
    expected = jax.jit(stepped(plain))(state, batch)
    assert_close(jax.tree.map(np.asarray, step(jax.tree.map(jnp.copy, state), batch)), expected)


def test_of_each_two_products_the_second_is_done_again():
    def two(x, p):
        h = jnp.tanh(jnp.tanh(x @ p["up"]) @ p["down"])
        return x + jnp.tanh(h * p["scale"])

    def form(state, batch):
        return jax.lax.scan(lambda x, p: (two(x, p), None), batch["x"], state["layers"])[0]

    assert in_scans(form, "matmuls")[0] == [(2, 3), (4, 3)]
    assert in_scans(form, "half matmuls")[0] == [(2, 3), (5, 3)]
