"""What the tables of the search over stages say of a stage is what its tasks take once it is built."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.cost.cost_model import cost_model
from autopar.frontend.tracing import trace
from autopar.hardware import presets
from autopar.hardware.cluster import Cluster, Link
from autopar.ir.binding import Binding
from autopar.ir.graph import UNREDUCED, OpKind, Section
from autopar.ir.layout import LogicalMesh
from autopar.ir.parallelisms import data_axis
from autopar.ir.rules import RuleBook
from autopar.passes.assign_layers import assign_layers
from autopar.passes.fold_layers import fold_layers
from autopar.passes.split_scan import split_scans
from autopar.runtime.program import TaskKind
from autopar.search.inter_op import decide_stages, stage_problems
from autopar.search.inter_op.build_stages import build, cut_layers
from autopar.search.inter_op.decide_stages import BuildLimits, StageChoice
from autopar.search.inter_op.stage_costs import LayerDecider, PricedOption, layer_policies, stage_options, undominated
from autopar.search.inter_op.stage_problems import DecidedOptions, tables
from autopar.search.intra_op.ilp import GivenLayouts, IntraOp, ObjectiveWeights
from autopar.search.intra_op.memory_prices import MemoryPrices, price_memory, saved_values, state_values
from autopar.solver import StageOption
from tests.small_steps import chain_step

LAYERS, WIDTH, BATCH = 8, 2048, 65_536  # large batches: to split examples is best by far
FAST = Link(latency_s=1e-6, bytes_per_s=1e12, source="made up")
SLOW = Link(latency_s=1e-5, bytes_per_s=5e9, source="made up")


def cluster(inside=presets.NVLINK4, memory_bytes_per_s=None):
    device = presets.H100
    if memory_bytes_per_s is not None:
        device = dataclasses.replace(device, peak_memory_bytes_per_s=memory_bytes_per_s)
    return Cluster(
        name="two hosts", device=device, num_hosts=2, devices_per_host=2, inside_host=inside, between_hosts=SLOW
    )


LIMITS = BuildLimits(limit_bytes=80 * 10**9, time_limit_s=5.0)
MATRIX = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)


def cut(num_microbatches, step=chain_step, matrix=MATRIX, batch=BATCH):
    examples = jax.ShapeDtypeStruct((batch, WIDTH), jnp.float32)
    arguments = ([matrix] * LAYERS, {"x": examples, "y": examples})
    rules = RuleBook()
    traced = trace(step, arguments, names=("params", "batch"), donate=(0,), batch=(1,))
    return cut_layers(split_scans(traced, 1, rules), num_microbatches, rules)


def residual_step(params, batch):
    """Layers of two products, of which no backward pass reads what the second one makes."""

    def loss(params):
        x = batch["x"]
        for w in params:
            x = x + jnp.tanh(x @ w["in"]) @ w["out"]
        return jnp.mean((x - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


RESIDUAL = {
    "in": jax.ShapeDtypeStruct((WIDTH, 2 * WIDTH), jnp.float32),
    "out": jax.ShapeDtypeStruct((2 * WIDTH, WIDTH), jnp.float32),
}


def two_stages(step, schedule, policy):
    """(the tables' option of two devices, the first layer of the second stage, two such stages built)"""
    on = cluster()
    found = tables(step, on, [2], LIMITS, DecidedOptions())
    option = next(p for p in found if p.mesh.axis_sizes == (2,) and p.option.name.endswith(f"recompute {policy}"))
    half = len(step.layers) // 2
    choice = StageChoice(
        schedule=schedule,
        chunks=1,
        first_layers=(0, half),
        group_meshes=(option.mesh, option.mesh),
        policies=option.policies,
    )
    return option, half, build(step, choice, on, LIMITS)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_stage_takes_what_its_layers_take(schedule):
    option, half, built = two_stages(cut(8), schedule, "nothing")
    for stage, layers in enumerate((slice(0, half), slice(half, None))):
        took = dict.fromkeys(TaskKind, 0.0)
        for task, seconds in zip(built.staged.tasks, built.task_s, strict=True):
            if task.stage == stage:
                took[task.kind] += seconds
        table = option.option
        assert table.forward_s[layers].sum() == pytest.approx(took[TaskKind.FORWARD], rel=0.02)
        both = took[TaskKind.BACKWARD] + took[TaskKind.WEIGHT]
        assert table.backward_s[layers].sum() == pytest.approx(both, rel=0.02)
        if schedule == "zb-h1" and stage:  # no stage waits for anything of the first one's backward pass
            assert table.weight_s[layers].sum() == pytest.approx(took[TaskKind.WEIGHT], rel=0.02)


X_BYTES = BATCH // 8 // 2 * WIDTH * 4  # of one micro-batch on one of two devices


# What tanh makes is kept beside its operand where nothing is computed again.
@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("policy", "kept_bytes"), [("nothing", 5 * X_BYTES), ("by value (0)", 3 * X_BYTES), ("input", X_BYTES)]
)
def test_a_stage_that_recomputes_takes_and_keeps_what_its_layers_do(policy, kept_bytes):
    option, half, built = two_stages(cut(8, residual_step, RESIDUAL), "1f1b", policy)
    for stage, layers in enumerate((slice(0, half), slice(half, None))):
        took = [
            (task.kind, seconds)
            for task, seconds in zip(built.staged.tasks, built.task_s, strict=True)
            if task.stage == stage and task.kind in (TaskKind.FORWARD, TaskKind.BACKWARD)
        ]
        table = option.option
        seconds = table.forward_s[layers].sum() + table.backward_s[layers].sum()
        assert seconds == pytest.approx(sum(s for _, s in took), rel=0.02)
    assert set(option.option.saved_bytes[1:-1]) == {kept_bytes}


# Of each layer's two products the operand and the gradient of what is made, whatever was computed again before.
@pytest.mark.cases(2)
@pytest.mark.parametrize("policy", ["nothing", "by value (0)", "input"])
def test_where_weight_gradients_wait_a_stage_holds_what_they_read(policy):
    option, half, built = two_stages(cut(8, residual_step, RESIDUAL), "zb-h1", policy)
    buffers = built.staged.pipeline.buffers
    (waiting,) = (t for t in built.staged.pipeline.tasks if t.stage == 1 and t.kind is TaskKind.WEIGHT)
    held = [buffers[b] for b in waiting.inputs if buffers[b].repeats]
    assert list(option.option.deferred_bytes[half:]) == [6 * X_BYTES] * half
    assert sum(b.nbytes for b in held) == half * 6 * X_BYTES


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("is_long", "numbers", "anew"),
    [
        (True, (16, 4), 3),  # of one example, then of four: on one device there is nothing to divide
        (True, (4, 2), 0),  # of four, then of eight, on four devices at most
        (False, (4, 2), 4),  # what is saved of eight examples is more
    ],
)
def test_where_examples_divide_among_more_devices_layers_are_decided_anew(is_long, numbers, anew):
    decided = DecidedOptions()
    found = [
        len(decided)
        for m in numbers
        if tables(cut(m, batch=16), cluster(), [1, 2, 4], LIMITS, decided, is_long=is_long)
    ]
    assert found == [4, 4 + anew]  # four devices are a line or a square


def test_in_long_steps_what_is_saved_has_a_price_where_it_crowds_the_memory(monkeypatch):
    """Of each example a layer saves two rows of 8 kB, split over two devices, on two stages with a batch in flight."""
    priced = []

    class Noted(stage_problems.LayerDecider):
        def __init__(self, folded, model, room_bytes, in_flight, *given):
            priced.append(in_flight)
            super().__init__(folded, model, room_bytes, in_flight, *given)

    monkeypatch.setattr(stage_problems, "LayerDecider", Noted)
    limits, decided = dataclasses.replace(LIMITS, limit_bytes=4 * 10**6), DecidedOptions()
    for m in (128, 8, 4):  # of 2, 32 and 64 examples: the last is not decided anew, for it is crowded as well
        assert stage_problems.tables(cut(m, batch=256), cluster(), [2], limits, decided, is_long=True)
    assert priced == [0, 2]


@pytest.mark.parametrize(
    ("link", "memory_bytes_per_s", "put_off"), [(FAST, 1e11, False), (presets.NVLINK4, 1e13, True)]
)
def test_reductions_are_put_off_where_memory_is_faster_than_links(link, memory_bytes_per_s, put_off):
    graph = cut(64).graph
    on = cluster(link, memory_bytes_per_s)
    on = dataclasses.replace(on, num_hosts=1, devices_per_host=4)
    intra_op = IntraOp(graph, cost_model(on, LogicalMesh(axis_sizes=(4,))))
    plan = intra_op.decode(intra_op.solve(time_limit_s=20.0))
    sums = [op.outputs[0] for op in graph.block.ops if op.kind is OpKind.ACCUMULATE]
    matrices = [plan.unreduced[v] for v in sums if graph.values[v].shape == (WIDTH, WIDTH)]
    assert len(matrices) == LAYERS
    assert any(layout.partial for layout in matrices) == put_off


def priced(name, num_devices=1, **changed):
    names = (
        "forward_s",
        "backward_s",
        "weight_s",
        "once_s",
        "state_bytes",
        "saved_bytes",
        "deferred_bytes",
        "working_bytes",
        "send_s",
    )
    costs = {name: np.array([2, 2]) for name in names} | {k: np.array(v) for k, v in changed.items()}
    return PricedOption(
        option=StageOption(num_devices=num_devices, name=name, **costs),
        mesh=LogicalMesh(axis_sizes=(num_devices,)),
        given_bytes=np.array([1, 1]),
        policies=("nothing",),
        terms=ObjectiveWeights(s_per_byte=0.0, exposed_fraction=1.0),
    )


def made_and_read(graph):
    """Values of the forward section that the backward section reads, in the order in which they are made."""
    read = {a for op in graph.block.ops if op.section is Section.BACKWARD for a in op.inputs if isinstance(a, int)}
    return [v for op in graph.block.ops if op.section is Section.FORWARD for v in op.outputs if v in read]


def test_what_is_saved_for_the_backward_pass():
    graph = cut(2).graph
    saved = {v for v, _ in saved_values(graph)}
    # At least what each tanh makes and the loss's difference; versions of jax keep its derivative too, or not.
    assert saved == set(made_and_read(graph))
    assert LAYERS + 1 <= len(saved) <= 2 * LAYERS + 1
    assert {graph.values[v].shape for v in saved} == {(BATCH // 2, WIDTH)}


def test_what_is_saved_has_its_price():
    """Few examples and wide layers: activations are best had whole on every device, unless they crowd the memory."""
    graph = cut(2, batch=64).graph
    model = cost_model(cluster(inside=FAST), LogicalMesh(axis_sizes=(2,)))
    intra_op = IntraOp(graph, model)
    saved = saved_values(graph)
    least = 16 * len(made_and_read(graph)) * (64 // 2 * WIDTH * 4) / 2

    def held_bytes(s_per_byte: float) -> float:
        prices = MemoryPrices(s_per_byte=s_per_byte, values=saved, copies={v: 16.0 for v, _ in saved})
        choice = intra_op.solve(time_limit_s=5.0, prices=prices).choice
        return intra_op.priced_bytes(choice, prices)

    assert held_bytes(1e-16) > least * 1.01
    assert held_bytes(1e-6) == pytest.approx(least, rel=1e-3)


@pytest.mark.parametrize(("zero", "parts"), [(0, 1), (3, 2)])
def test_the_least_bytes_of_state_are_those_that_the_constraints_leave(zero, parts):
    graph = cut(2).annotated.graph
    model = cost_model(cluster(inside=FAST), LogicalMesh(axis_sizes=(2,)))
    constraints = Binding(axes=(data_axis(zero),), sizes=(None,)).on(2)[1]
    whole = sum(graph.values[v].nbytes for v, at in state_values(graph) if at == UNREDUCED)
    assert IntraOp(graph, model, constraints=constraints).least_state_bytes() == pytest.approx(whole / parts, abs=8)
    assert IntraOp(graph, model).least_state_bytes() == pytest.approx(whole / 2, abs=8)
    # State in the memory of the host takes none of the device's.
    hosted = frozenset(graph.block.inputs[i] for i in sorted(graph.donated)[:2])
    rest = whole - sum(graph.values[v].nbytes for v in hosted)
    given = GivenLayouts(in_host=hosted)
    assert IntraOp(graph, model, given).least_state_bytes() == pytest.approx(rest / 2, abs=8)


@pytest.mark.parametrize(
    ("zero", "to_beat_s", "solved"),
    [(0, math.inf, 1), (3, 0.0, 1), (3, math.inf, 4)],
    ids=["the state alone is too large", "it takes too long", "the highest price after the first two does not do"],
)
def test_what_cannot_fit_or_win_is_not_decided_again(monkeypatch, zero, to_beat_s, solved):
    """On two devices data parallelism keeps the whole state on each, ZeRO-3 half; a little over that is allowed."""
    step = cut(2).annotated
    on = Cluster.flat(2, device=presets.H100, links=(FAST,))
    state_bytes = sum(step.graph.values[v].nbytes for v, at in state_values(step.graph) if at == UNREDUCED)
    limits = BuildLimits(limit_bytes=int(0.55 * state_bytes), time_limit_s=5.0, to_beat_s=to_beat_s)
    mesh, constraints = Binding(axes=(data_axis(zero),), sizes=(None,)).on(2)
    choice = StageChoice(
        schedule="1f1b", chunks=1, first_layers=(0,), group_meshes=(mesh,), policies=("nothing",) * LAYERS
    )
    solve_stage, calls = decide_stages.solve_stage, []
    monkeypatch.setattr(decide_stages, "solve_stage", lambda *given: calls.append(given) or solve_stage(*given))
    staged = build(step, choice, on, limits, constraints)
    assert max(staged.simulation.peak_bytes) > limits.limit_bytes
    assert len(calls) == solved


def options_of(folded, step, model, decisions):
    policies = layer_policies(folded, step.layers, cluster(inside=FAST), by_value=True)
    return stage_options(folded, policies, step.layers, model, SLOW, decisions)


@pytest.mark.parametrize(("in_flight", "decided_for"), [(0, [0]), (1, [0]), (10_000, [0, 10_000])])
def test_where_what_is_saved_crowds_the_memory_leaner_decisions_are_made(in_flight, decided_for):
    """A gigabyte for 130 MB of state; 4 MB are saved of each micro-batch, as most of it lies whole on both devices."""
    step = cut(2, batch=64)
    contracted = fold_layers(step.graph, assign_layers(step.graph, step.layers), LAYERS)
    model = cost_model(cluster(inside=FAST), LogicalMesh(axis_sizes=(2,)))
    decisions = LayerDecider(contracted, model, 10**9, in_flight, False, 5.0).decisions()
    assert [d.terms.in_flight for d in decisions] == decided_for
    options = options_of(contracted, step, model, decisions)
    saved = [o.option.saved_bytes.sum() for o in options if {*o.policies} == {"nothing"}]
    assert all(leaner < first for first, leaner in itertools.pairwise(saved))


def test_sums_of_gradients_are_state_that_no_step_is_given():
    step = cut(2)
    contracted = fold_layers(step.graph, assign_layers(step.graph, step.layers), LAYERS)
    model = cost_model(cluster(inside=FAST), LogicalMesh(axis_sizes=(1,)))
    decisions = LayerDecider(contracted, model, 10**9, 0, False, 5.0).decisions()
    options = options_of(contracted, step, model, decisions)
    for option in options:
        assert option.given_bytes.tolist() == [WIDTH**2 * 4] * LAYERS
        assert (option.option.state_bytes - option.given_bytes >= WIDTH**2 * 4).all()


def test_of_equal_stages_only_decisions_whose_state_fits_are_priced_or_the_smallest():
    step = cut(2)
    contracted = fold_layers(step.graph, assign_layers(step.graph, step.layers), LAYERS)
    model = cost_model(cluster(inside=FAST), LogicalMesh(axis_sizes=(2,)))
    # Of parameters, and as much again for the sums of gradients, where they are not split.
    room_bytes = 0.9 * LAYERS * WIDTH**2 * 4

    def states(equal):
        decisions = LayerDecider(contracted, model, room_bytes, 0, equal, 5.0).decisions()
        options = options_of(contracted, step, model, decisions)
        return [o.option.state_bytes.sum() for o in options if {*o.policies} == {"nothing"}]

    larger, smallest = sorted(states(equal=False), reverse=True)
    assert larger > smallest > room_bytes
    assert states(equal=True) == [smallest]


def test_options_that_are_nowhere_better_than_another_are_left_out():
    options = [
        priced("slower", forward_s=[2, 3]),
        priced("plain"),
        priced("equal"),
        priced("leaner, slower", state_bytes=[1, 1], backward_s=[3, 3]),
        priced("faster in one layer, slower in the other", forward_s=[1, 3]),
        priced("puts off more", weight_s=[3, 2], working_bytes=[3, 2]),
        priced("on two devices", num_devices=2, forward_s=[9, 9]),
    ]
    kept = [o.option.name for o in undominated(options)]
    assert kept == [
        "plain",
        "leaner, slower",
        "faster in one layer, slower in the other",
        "puts off more",
        "on two devices",
    ]


def test_prices_are_added_up_alike_whatever_order_a_set_has():
    graph, on = cut(4).graph, cluster()
    intra_op = IntraOp(graph, cost_model(on, LogicalMesh(axis_sizes=(4,))))
    values = sorted((v, UNREDUCED) for v in intra_op.choices.unreduced)  # several share a node, and so its cost
    copies = {v: 0.1 * (n + 1) / 3 for n, (v, _) in enumerate(values)}
    priced = [
        price_memory(intra_op.base, graph, MemoryPrices(s_per_byte=1e-12 / 3, values=order, copies=copies)).problem
        for order in (tuple(values), tuple(reversed(values)))
    ]
    for one, other in zip(priced[0].node_cost, priced[1].node_cost, strict=True):
        assert one.tobytes() == other.tobytes()
    for one, other in zip(priced[0].edges, priced[1].edges, strict=True):
        assert one.cost.tobytes() == other.cost.tobytes()
