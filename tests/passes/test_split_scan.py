"""Scans over stacked layers in parts: the operations that become of them, their numbers, and pipelines cut between."""

import dataclasses
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar import recipes
from autopar.cost.roofline import flops_of
from autopar.errors import DonatedStateError, InvalidArgumentError
from autopar.frontend.recompute_in_scans import Recompute
from autopar.frontend.tracing import trace
from autopar.hardware.collective_cost import Link
from autopar.ir.traced_step import TracedStep
from autopar.passes.assign_layers import assign_layers
from autopar.passes.assign_stages import assign
from autopar.passes.fold_layers import fold_layers
from autopar.passes.remat import rematerialise
from autopar.passes.split_scan import LeafSlice, SplitStep, split_scans
from autopar.search.inter_op.build_stages import cut_layers, layers_of_pieces
from tests.sections import BOOK, evaluate, text
from tests.sections import assert_same_numbers as assert_same_numbers_of_graphs
from tests.small_steps import assert_close, slow_cluster

L, WIDTH, BATCH = 4, 8, 8


def make_state(tx=None, layers=L):
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "layers": {
            "w": jax.random.normal(keys[0], (layers, WIDTH, WIDTH)) / 3,
            "b": jax.random.normal(keys[1], (layers, WIDTH)) / 3,
        },
        "head": jax.random.normal(keys[2], (WIDTH,)),
    }
    return {"params": params, "opt": tx.init(params)} if tx is not None else {"params": params}


def make_batch():
    return {"x": np.random.default_rng(0).normal(size=(BATCH, WIDTH)).astype(np.float32)}


def layer(x, p):
    return jnp.tanh(x @ p["w"] + p["b"])


def forward(params, x, body=layer, **options):
    x, _ = jax.lax.scan(lambda x, p: (body(x, p), None), x, params["layers"], **options)
    return x @ params["head"]


def loss_fn(params, batch):
    return jnp.mean(forward(params, batch["x"]) ** 2)


def plain_step(loss=loss_fn, update=None):
    def step(state, batch):
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        update_ = update or (lambda p, g: p - 0.1 * g)
        return {"params": jax.tree.map(update_, state["params"], grads)}, {"loss": value}

    return step


def optax_step(tx, loss=loss_fn):
    def step(state, batch):
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": value}

    return step


def traced(step, state, batch=None) -> TracedStep:
    return trace(step, (state, batch or make_batch()), names=("state", "batch"), donate=(0,), batch=(1,))


def parts_of(pieces, leaves):
    """The pieces of arrays."""
    return [leaves[p.leaf] if p.parts == 1 else np.split(np.asarray(leaves[p.leaf]), p.parts)[p.part] for p in pieces]


def whole_of(pieces, parts):
    """The inverse of `parts_of`."""
    leaves = {}
    for p, part in zip(pieces, parts, strict=True):
        leaves.setdefault(p.leaf, []).append(part)
    return [found[0] if len(found) == 1 else np.concatenate(found) for found in leaves.values()]


def assert_same_numbers(step, state, parts=2, microbatches=(1, 2), groups=()) -> SplitStep:
    """Holds the step in parts, evaluated operation by operation, against the step under plain jit."""
    batch = make_batch()
    whole = traced(step, state, batch)
    cut = split_scans(whole, parts, BOOK, groups=groups)
    expected = jax.tree.leaves(jax.jit(step)(state, batch))
    args = [jnp.asarray(x) for x in parts_of(cut.arguments, jax.tree.leaves((state, batch)))]
    for m in microbatches:
        graph = cut_layers(cut, m, BOOK).graph
        got = whole_of(cut.results, evaluate(graph, args))
        for a, b in zip(got, expected, strict=True):
            scale = np.abs(np.asarray(b, np.float64)).max(initial=0) + 1e-30
            np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=0, atol=1e-5 * scale)
    return cut


def primitives(cut: SplitStep) -> list[str]:
    return [eqn.primitive.name for eqn in cut.traced.jaxpr.eqns]


# What becomes of a step


def test_scans_and_updates_come_in_parts():
    def loss(params, batch):
        x, _ = jax.lax.scan(lambda x, w: (x @ w, None), batch["x"], params["w"])
        return jnp.sum(x)

    cut = split_scans(traced(plain_step(loss), {"params": {"w": jnp.ones((L, WIDTH, WIDTH))}}), 2, BOOK)
    first, second = "state['params']['w'].layers[0:2]", "state['params']['w'].layers[2:4]"
    assert text(cut_layers(cut, 1, BOOK).graph) == textwrap.dedent(f"""\
        before: %0 = split_batch batch['x']
        forward: %1 %2 = scan %0 {first}
        forward: %3 %4 = scan %1 {second}
        forward: %5 = reduce_sum %3
        forward: %6 = accumulate %5
        backward: %7 = broadcast_in_dim 1.0
        backward: %8 %9 = scan %7 {second} %4
        backward: %10 = accumulate %9
        backward: %11 %12 = scan %8 {first} %2
        backward: %13 = accumulate %12
        after: %14 = mul 0.10000000149011612 %13
        after: %15 = mul 0.10000000149011612 %10
        after: %16 = sub {first} %14
        after: %17 = sub {second} %15
        -> %16 %17 %6""")


def test_arguments_and_results_are_pieces():
    cut = split_scans(traced(plain_step(), make_state()), 2, BOOK)
    assert cut.arguments == (
        LeafSlice(0),
        LeafSlice(1, 0, 2),
        LeafSlice(1, 1, 2),
        LeafSlice(2, 0, 2),
        LeafSlice(2, 1, 2),
        LeafSlice(3),
    )
    assert cut.results == (*cut.arguments[:5], LeafSlice(3))
    assert cut.traced.tied == {i: i for i in range(5)}
    assert (cut.traced.donated, cut.traced.batch) == (frozenset(range(5)), frozenset({5}))
    assert [a.shape for a in cut.traced.in_avals[1:4]] == [(2, WIDTH), (2, WIDTH), (2, WIDTH, WIDTH)]
    assert cut.traced.in_paths[1:3] == tuple(f"state['params']['layers']['b'].layers[{a}]" for a in ("0:2", "2:4"))
    assert (cut.parts, cut.trips, cut.scopes) == (2, L, ("layers[0:2]", "layers[2:4]"))


def test_nothing_is_joined_where_each_part_will_do():
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    cut = split_scans(traced(optax_step(tx), make_state(tx)), 4, BOOK)
    assert primitives(cut).count("scan") == 2 * 4
    assert not {"concatenate", "slice"} & set(primitives(cut))


def test_each_part_is_a_layer_of_its_own():
    cut = cut_layers(split_scans(traced(plain_step(), make_state()), 4, BOOK), 2, BOOK)
    assert [name for name in cut.layers.names if "[" in name] == list(cut.step.scopes)
    firsts = layers_of_pieces(cut)
    assert [cut.layers.names[i] for i in firsts[1:]] == list(cut.step.scopes[1:])


@pytest.mark.parametrize("policy", Recompute)
def test_parts_are_recomputed_and_assigned_to_stages(policy):
    cut = cut_layers(split_scans(traced(plain_step(), make_state()), 2, BOOK), 2, BOOK)
    again = rematerialise(cut.graph, cut.layers, [policy] * len(cut.layers))
    staged = assign(again.graph, cut.layers, layers_of_pieces(cut), again.assignment)
    pieces = [staged.homes[i] for i, piece in enumerate(cut.step.arguments) if piece.parts > 1]
    assert pieces == [piece.part for piece in cut.step.arguments if piece.parts > 1]
    leaves = jax.tree.leaves((make_state(), make_batch()))
    args = [jnp.asarray(x) for x in parts_of(cut.step.arguments, leaves)]
    assert_same_numbers_of_graphs(cut.graph, staged.graph, args)


# Numbers


def test_numbers_under_a_global_norm_and_adamw():
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
    assert_same_numbers(optax_step(tx), make_state(tx), parts=4)


def test_numbers_of_a_backwards_scan_with_a_rematerialised_body():
    def loss(params, batch):
        return jnp.mean(forward(params, batch["x"], jax.checkpoint(layer), reverse=True, unroll=4) ** 2)

    cut = assert_same_numbers(plain_step(loss), make_state())
    assert "concatenate" not in primitives(cut)


def test_numbers_of_casts_inside_of_a_call():
    def loss(params, batch):
        half = jax.tree.map(lambda p: p.astype(jnp.bfloat16).astype(jnp.float32), params)
        return jax.jit(lambda p: jnp.mean(forward(p, batch["x"]) ** 2))(half)

    cut = assert_same_numbers(plain_step(loss), make_state())
    assert "concatenate" not in primitives(cut)


def test_numbers_where_layers_know_their_number_and_are_returned():
    def step(state, batch):
        def loss(params):
            def body(x, row):
                index, p = row
                x = layer(x, p) * (1 + index)
                return x, jnp.sum(x)

            x, sums = jax.lax.scan(body, batch["x"], (jnp.arange(L), params["layers"]))
            return jnp.mean((x @ params["head"]) ** 2), sums

        (value, sums), grads = jax.value_and_grad(loss, has_aux=True)(state["params"])
        norms = jnp.sqrt(jnp.sum(grads["layers"]["w"] ** 2, axis=(1, 2)))
        new = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
        return {"params": new}, {"loss": value, "sums": sums, "norms": norms}

    assert_same_numbers(step, make_state(), microbatches=(1,))


def test_numbers_where_the_update_sees_all_layers_at_once():
    def update(p, g):
        if p.ndim == 1:
            return p - 0.1 * g
        across = (
            jnp.cumsum(g, 0) + jnp.sort(g, 0) + jnp.max(g) + jnp.mean(g, 0) + jnp.moveaxis(jnp.moveaxis(g, 0, 1), 1, 0)
        )
        rows = jnp.reshape(jnp.reshape(g, (-1, WIDTH)) * 2.0, g.shape)
        return p - 0.1 * (across + rows + jnp.broadcast_to(jnp.arange(L).reshape(L, *[1] * (p.ndim - 1)), p.shape))

    cut = assert_same_numbers(plain_step(update=update), make_state())
    assert "concatenate" in primitives(cut)


def test_numbers_where_the_update_addresses_layers_by_position():
    def update(p, g):
        if p.ndim == 1:
            return p - 0.1 * g
        slower = g.at[0].multiply(0.5).at[-1].add(0.5)
        return p - 0.1 * jax.lax.dynamic_update_slice_in_dim(slower, 3 * g[:1], 2, 0)

    assert_same_numbers(plain_step(update=update), make_state())


def test_numbers_of_an_update_that_is_not_always_done():
    tx = optax.MultiSteps(optax.sgd(0.1), every_k_schedule=2).gradient_transformation()
    assert_same_numbers(optax_step(tx), make_state(tx))


# What is left as it is, and what is refused


def test_a_scan_over_time_is_left_alone():
    def loss(params, batch):
        times = jnp.broadcast_to(batch["x"], (L, BATCH, WIDTH))
        x, _ = jax.lax.scan(lambda x, t: (jnp.tanh(x @ params["w"] + t), None), batch["x"], times)
        return jnp.mean(x**2)

    whole = traced(plain_step(loss), {"params": {"w": jnp.ones((WIDTH, WIDTH))}})
    cut = split_scans(whole, 2, BOOK)
    assert cut.traced is whole
    assert cut.parts == 1


def test_a_scan_beside_most_of_the_work_is_left_alone():
    def loss(params, batch):
        x = forward(params, batch["x"])[:, None] * params["wide"]
        return jnp.mean((x @ params["square"]) ** 2)

    state = make_state()
    state["params"] |= {"wide": jnp.ones(64), "square": jnp.ones((64, 64))}
    assert split_scans(traced(plain_step(loss), state), 2, BOOK).parts == 1


def test_one_part_is_the_step_itself():
    whole = traced(plain_step(), make_state())
    assert split_scans(whole, 1, BOOK).traced is whole


def test_a_part_without_layers_is_refused():
    with pytest.raises(InvalidArgumentError, match=r"at most as many stages as its 4 layers, got 5"):
        split_scans(traced(plain_step(), make_state()), 5, BOOK)


# Several stages on a group of devices


def test_the_state_of_a_group_with_several_stages_is_of_neighbouring_layers():
    """Stages 0 and 2 on one group, 1 and 3 on the other: each has half of the layers, with a stage that reads some."""
    whole = traced(plain_step(), make_state(layers=8))
    cut = split_scans(whole, 4, BOOK, groups=(0, 1, 0, 1))
    assert cut.scopes == ("layers[0:2]", "layers[2:4]", "layers[4:6]", "layers[6:8]")
    stacks = [
        (p.part, p.parts, part) for p, part in zip(cut.arguments, cut.part_of_argument, strict=True) if p.parts > 1
    ]
    assert stacks == 2 * [(0, 2, 0), (1, 2, 3)]
    assert [a.shape[0] for p, a in zip(cut.arguments, cut.traced.in_avals, strict=True) if p.parts > 1] == 4 * [4]
    lengths = [e.params["length"] for e in cut.traced.jaxpr.eqns if e.primitive.name == "scan"]
    assert lengths == 8 * [2]


# State on one group, as two do not divide it; parts of unequal layers, with a half of the state each; equal parts.
@pytest.mark.cases(1)
@pytest.mark.parametrize(("layers", "state_parts"), [(5, 1), (6, 2), (8, 2)])
def test_numbers_of_several_stages_on_a_group(layers, state_parts):
    tx = optax.adamw(1e-2)
    cut = assert_same_numbers(optax_step(tx), make_state(tx, layers), parts=4, groups=(0, 1, 1, 0))
    assert max(p.parts for p in cut.arguments) == state_parts


def test_more_stages_than_layers_are_refused_before_they_are_planned():
    step = autopar.parallelize(plain_step(), plan=recipes.pipeline(2, "interleaved", num_microbatches=2))
    with pytest.raises(InvalidArgumentError, match="at most as many stages as its 3 layers"):
        step.plan(make_state(layers=3), make_batch())


# The search


def test_parts_that_stand_for_others_count_for_them():
    cut = cut_layers(split_scans(traced(plain_step(), make_state(layers=8)), 8, BOOK), 2, BOOK)
    assignment = assign_layers(cut.graph, cut.layers)
    smaller = fold_layers(cut.graph, assignment, len(cut.layers)).graph

    def flops(graph):
        return sum(flops_of(op) * op.count for op in graph.ops() if op.primitive == "dot_general")

    assert len(smaller.block.ops) < len(cut.graph.block.ops)
    assert flops(smaller) == flops(cut.graph)


def test_the_search_cuts_scans_where_links_are_slow():
    host = autopar.Cluster.preset("dgx-h100")
    slow = Link(latency_s=1e-5, bytes_per_s=5e9, source="made up: 40 Gb/s")
    cluster = dataclasses.replace(host, num_hosts=2, devices_per_host=2, between_hosts=slow)

    def loss(params, batch):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch["x"], params["w"])
        return jnp.mean(x**2)

    state = {"params": {"w": jax.ShapeDtypeStruct((8, 16_384, 16_384), jnp.float32)}}
    batch = {"x": jax.ShapeDtypeStruct((32_768, 16_384), jnp.float32)}
    plan = autopar.parallelize(plain_step(loss), cluster=cluster).plan(state, batch)
    made = plan.record.pipeline
    assert made is not None
    assert (len(made.stages), made.scan_parts, [s.first_device for s in made.stages]) == (2, 2, [0, 2])
    assert plan.state_shardings["params"]["w"].spec[0] == "stage"


# On devices


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("stages", "schedule"),
    [
        (2, "zb-h1"),
        (2, "interleaved"),
        (2, "zb-v"),
        pytest.param(4, "1f1b", marks=pytest.mark.slow),
    ],
)
def test_a_pipeline_through_a_scan_gives_the_plain_steps_numbers(stages, schedule):
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    plain, batch = optax_step(tx), make_batch()
    step = autopar.parallelize(
        plain, plan=recipes.pipeline(stages, schedule, num_microbatches=2), cluster=slow_cluster()
    )
    shapes = jax.eval_shape(lambda: make_state(tx))
    plan = step.plan(shapes, batch)
    w = plan.state_shardings["params"]["layers"]["w"]
    assert (w.mesh.axis_names[0], w.mesh.shape["stage"], w.mesh.size) == ("stage", stages, 8)
    assert w.shard_shape((L, WIDTH, WIDTH))[0] <= L // stages
    of_stages = {"interleaved": "0, 3", "zb-v": "0, 2"}.get(schedule, f"0-{stages - 1}")
    assert f"in parts on stages {of_stages}" in plan.table()

    state = step.init(lambda: make_state(tx))
    assert state["params"]["layers"]["w"].sharding == w
    expected = jax.tree.map(np.asarray, state)
    for _ in range(3):
        old, (state, metrics) = state, step(state, batch)
        expected, loss = jax.jit(plain)(expected, batch)
    assert_close(jax.tree.map(np.asarray, (state, metrics)), jax.tree.map(np.asarray, (expected, loss)))
    assert old["params"]["layers"]["w"].is_deleted()
    with pytest.raises(DonatedStateError):
        step(old, batch)


@pytest.mark.cases(1)
@pytest.mark.parametrize("schedule", ["gpipe", "zb-v"])
def test_a_saved_plan_runs_with_arrays_that_lie_elsewhere(tmp_path, schedule):
    plain, batch = plain_step(), make_batch()
    step = autopar.parallelize(plain, plan=recipes.pipeline(2, schedule, num_microbatches=1))
    step.plan(make_state(), batch).save(tmp_path / "plan.json")
    again = autopar.parallelize(plain, plan=autopar.Plan.load(tmp_path / "plan.json"))
    state, metrics = again(make_state(), batch)
    assert_close(
        jax.tree.map(np.asarray, (state, metrics)), jax.tree.map(np.asarray, jax.jit(plain)(make_state(), batch))
    )
