"""Which products of a program run in pieces, by the search: the fastest of all ways on the clock."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from autopar import Cluster, recipes
from autopar.common.progress import Progress
from autopar.cost.cost_model import NodeCosts, cost_model
from autopar.frontend.tracing import trace
from autopar.ir.layout import LogicalMesh
from autopar.lowering.collective_matmul import Along
from autopar.lowering.instructions import Compute
from autopar.plan.options import WORTHWHILE, PlanRequest
from autopar.search.intra_op.slack import with_overlapped_axes
from autopar.search.intra_op.spmd_candidate import TimedSharding, timed_sharding
from autopar.search.intra_op.spmd_search import search_mesh
from autopar.search.planner import planning_context
from tests.sections import BOOK

WIDTH, HIDDEN = 2048, 8192


def step(state, batch):
    def loss(p):
        x = batch["x"]
        x = x + jnp.tanh(x @ p["up"]) @ p["down"]
        return ((x - batch["y"]) ** 2).mean()

    value, grads = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value


def context_on(cluster, request=None, examples=8, positions=2048):
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    arguments = {"up": of(WIDTH, HIDDEN), "down": of(HIDDEN, WIDTH)}, {n: of(examples, positions, WIDTH) for n in "xy"}
    traced = trace(step, arguments, names=("state", "batch"), donate=(0,), batch=(1,))
    return planning_context(traced, cluster, request or PlanRequest(), BOOK, Progress("", show=False))


def under_sequence_parallelism(cluster):
    """The program of Megatron's sequence parallelism on one axis: what it gathers, it gathers whole."""
    context = context_on(cluster, recipes.sequence_parallel("megatron").request)
    mesh, _ = context.request.binding.on(cluster.num_devices)
    model = cost_model(cluster, mesh)
    found = search_mesh(context, model, time_limit_s=60.0)
    costs = NodeCosts(context.graph, model)
    timed = timed_sharding(context.graph, model, found.sharding, costs)
    return (
        context.graph,
        model,
        TimedSharding(sharding=timed.sharding, lowered=timed.lowered, ran=timed.ran, costs=costs),
    )


def test_the_fastest_axes_are_taken():
    graph, model, whole = under_sequence_parallelism(Cluster.preset("tpu-v5e", topology="2x4"))
    axes = range(len(model.links.mesh.axis_sizes))
    every = [(), *((a,) for a in axes), tuple(axes)]
    times_s = {
        each: timed_sharding(
            graph, model, dataclasses.replace(whole.sharding, overlapped_axes=each), whole.costs
        ).ran.end_s
        for each in every
    }
    found = with_overlapped_axes(graph, model, whole)
    assert found.sharding.overlapped_axes
    assert found.ran.end_s == min(times_s.values()) < (1 - WORTHWHILE) * times_s[()]


def test_axes_that_a_recipe_has_set_stay():
    graph, model, whole = under_sequence_parallelism(Cluster.preset("tpu-v5e", topology="2x4"))
    sharding = dataclasses.replace(whole.sharding, overlapped_axes=(0,))
    set_before = timed_sharding(graph, model, sharding, whole.costs)
    assert with_overlapped_axes(graph, model, set_before) is set_before


@pytest.mark.parametrize("cluster", [Cluster.flat(8), Cluster.preset("dgx-h100")], ids=["no overlap", "dear pieces"])
def test_where_pieces_gain_nothing_all_is_gathered_whole(cluster):
    graph, model, whole = under_sequence_parallelism(cluster)
    assert with_overlapped_axes(graph, model, whole) is whole


def test_the_search_takes_them_where_one_example_leaves_sequences_alone():
    """One example of 4,096 positions on 8 TPUs: its plan without pieces takes longer."""
    cluster = Cluster.preset("tpu-v5e", topology="2x4")
    context = context_on(cluster, examples=1, positions=4096)
    found = search_mesh(context, cost_model(cluster, LogicalMesh(axis_sizes=(8,))), time_limit_s=60.0)
    whole = timed_sharding(context.graph, found.model, dataclasses.replace(found.sharding, overlapped_axes=()))
    assert found.sharding.overlapped_axes == (0,)
    assert found.ran.end_s < (1 - WORTHWHILE) * whole.ran.end_s


def products_in_pieces(timed):
    return [i for i in timed.lowered.instructions if isinstance(i, Compute) and i.pieces is not None]


def test_a_product_that_does_not_sum_over_the_pieces_has_them_sent():
    """Of the two that read the gathered cotangent, that of the weight's gradient comes first in the program."""
    graph, model, whole = under_sequence_parallelism(Cluster.preset("tpu-v5e", topology="2x4"))
    sharding = dataclasses.replace(whole.sharding, overlapped_axes=(0,))
    timed = timed_sharding(graph, model, sharding, whole.costs)
    (gathering,) = [i for i in products_in_pieces(timed) if i.pieces.operand is not None]
    assert Along.of(gathering.op.eqn, gathering.pieces.operand, gathering.pieces.dim).result is not None
    assert gathering.pieces.is_read_again
    products = lambda lowered: [i for i in lowered.instructions if isinstance(i, Compute) and i.op.rule is not None]
    numbers = [i.op.id for i in products(timed.lowered)]
    assert sorted(numbers) == [i.op.id for i in products(whole.lowered)] != numbers


def test_gathered_weights_come_whole_where_pieces_of_them_are_summed():
    """16,384 tokens on 8 TPUs, weights split: a sum of pieces of 256 numbers is read and written with each of them."""
    cluster = Cluster.preset("tpu-v5e", topology="2x4")
    context = context_on(cluster)
    found = search_mesh(context, cost_model(cluster, LogicalMesh(axis_sizes=(8,))), time_limit_s=60.0)
    assert found.sharding.overlapped_axes == ()
    in_pieces = dataclasses.replace(found.sharding, overlapped_axes=(0,))
    timed = timed_sharding(context.graph, found.model, in_pieces)
    first = products_in_pieces(timed)[0]
    assert Along.of(first.op.eqn, first.pieces.operand, first.pieces.dim).result is None
    costs = NodeCosts(context.graph, found.model)
    sum_bytes = 4 * (16_384 // 8) * HIDDEN
    more_s = 8 * costs.piece_s(first.op, first.strategy, first.pieces) - costs.compute_s(first.op, first.strategy)
    assert more_s > found.model.device.memory_s(7 * 3 * sum_bytes)
    assert timed.ran.end_s > found.ran.end_s


def test_what_fits_only_with_all_gathered_whole_is_found():
    """In 68 MB: products in pieces keep the pieces of what they read, and need more."""
    cluster = Cluster.preset("tpu-v5e", topology="2x4")
    context = dataclasses.replace(context_on(cluster), limit_bytes=68_000_000)
    found = search_mesh(context, cost_model(cluster, LogicalMesh(axis_sizes=(8,))), time_limit_s=60.0)
    assert found.peak_bytes <= 68_000_000
