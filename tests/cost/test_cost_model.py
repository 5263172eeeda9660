"""The costs of a mesh over a cluster; those of a graph's operations are made once, for all its programs on the mesh."""

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.cost.cost_model import CostsOnMeshes, cost_model, timed_kinds
from autopar.frontend.build_graph import build_graph
from autopar.frontend.tracing import trace
from autopar.hardware.cluster import Cluster
from autopar.ir.layout import LogicalMesh
from autopar.ir.rules import RuleBook
from autopar.ops.kernels.operation import is_kernel
from autopar.passes.split_scan import split_scans
from autopar.search.inter_op.build_stages import build, cut_layers, stage_graphs
from autopar.search.inter_op.decide_stages import BuildLimits, StageChoice
from autopar.search.intra_op.ilp import ObjectiveWeights
from tests.ops.kernels import ragged_steps
from tests.small_steps import chain_step, slow_cluster


@pytest.mark.parametrize(
    ("cluster", "by_all_reduce"),
    [
        ("tpu-v5p:2x2x2", {"reduce-scatter"}),
        ("tpu-v5p:2x4x4", {"reduce-scatter"}),
        ("tpu-v5p:4x4x4", {"reduce-scatter", "all-gather"}),
        ("tpu-v4:4x4x4", {"reduce-scatter"}),
        ("tpu-v5p:2x2x1", set()),
        ("tpu-v5e:2x4", set()),
        ("dgx-h100", set()),
    ],
)
def test_on_a_torus_of_three_dimensions_collectives_over_all_devices_are_all_reduces(cluster, by_all_reduce):
    cluster = Cluster.parse(cluster)
    links = cost_model(cluster, LogicalMesh(axis_sizes=(cluster.num_devices,))).links
    assert {kind.value for kind in links.as_all_reduce} == by_all_reduce


ON = slow_cluster(4)
ROW, GRID = LogicalMesh(axis_sizes=(4,)), LogicalMesh(axis_sizes=(2, 2))
LIMITS = BuildLimits(limit_bytes=10**12, time_limit_s=10.0)


def step(layers=4, width=64, batch=4096):
    rules, examples = RuleBook(), jax.ShapeDtypeStruct((batch, width), "float32")
    arguments = ([jax.ShapeDtypeStruct((width, width), "float32")] * layers, {"x": examples, "y": examples})
    traced = trace(chain_step, arguments, names=("params", "batch"), donate=(0,), batch=(1,))
    return cut_layers(split_scans(traced, 1, rules), 4, rules)


def choice(of, mesh):
    policies = ("nothing",) * len(of.layers)
    return StageChoice(schedule="1f1b", chunks=1, first_layers=(0,), group_meshes=(mesh,), policies=policies)


def weights(s_per_byte):
    return [ObjectiveWeights(s_per_byte=s_per_byte, exposed_fraction=1.0)]


def test_equal_models_have_the_same_costs():
    graph = step().graph
    costs = CostsOnMeshes(graph)
    assert costs.on(cost_model(ON, ROW)) is costs.on(cost_model(ON, ROW))
    assert costs.on(cost_model(ON, ROW)) is not costs.on(cost_model(ON, GRID))
    assert costs.on(cost_model(ON, ROW)).graph is graph


@pytest.mark.parametrize("mesh", [ROW, GRID])
def test_a_program_takes_as_long_behind_others_as_alone(mesh):
    """The first programs of the stage decide otherwise, under a price at which all state is split."""
    several, alone = step(), step()
    build(several, choice(several, GRID), ON, LIMITS)
    leaner = build(several, choice(several, mesh), ON, LIMITS, terms=weights(1.0))
    behind = build(several, choice(several, mesh), ON, LIMITS, terms=weights(0.0))
    by_itself = build(alone, choice(alone, mesh), ON, LIMITS, terms=weights(0.0))
    assert leaner.peak_bytes[0] < behind.peak_bytes[0]
    assert (behind.task_s, behind.task_bytes, behind.step_time_s) == (
        by_itself.task_s, by_itself.task_bytes, by_itself.step_time_s
    )  # fmt: skip
    graphs = stage_graphs(several, choice(several, mesh).policies, (0,), "1f1b", 1)
    assert {model.links.mesh for model in graphs.costs[0].known} == {GRID, mesh}


def kernel_kinds(function, args):
    graph = build_graph(trace(function, args, names=("state", "batch"), donate=(), batch=()), RuleBook())
    return [timed_kinds(op) for op in graph.ops() if is_kernel(op.eqn)]


@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels_are_timed_by_name_pass_and_the_type_of_their_numbers(scanned, dtype):
    """A mixture, whose first operand is of integers, and whose backward pass has two kernels of other rules."""
    step = ragged_steps.step(
        ragged_steps.LAYERS_AS_WRITTEN["repeated"], scanned=scanned, checkpoint=True, dtype=jnp.dtype(dtype)
    )
    kinds = kernel_kinds(step, jax.eval_shape(lambda: (ragged_steps.state(1), ragged_steps.batch())))
    assert {kind[-1] for kind in kinds} == {f"ragged experts of {dtype}, {role}" for role in ("forward", "backward")}
    assert len({kind[0] for kind in kinds}) == len(kinds) == 3


def test_two_kernels_of_one_rule_are_timed_apart():
    """Without a gradient all is of the update."""

    def scale(x, w):
        return x * w

    def shift(x, w):
        return x + w

    scale, shift = (autopar.kernel(function, "b [w], [w] -> b [w]") for function in (scale, shift))
    arrays = jax.ShapeDtypeStruct((8,), "float32"), jax.ShapeDtypeStruct((4, 8), "float32")
    kinds = kernel_kinds(lambda w, x: shift(scale(x, w), w), arrays)
    assert [kind[-1] for kind in kinds] == ["scale of float32, update", "shift of float32, update"]
