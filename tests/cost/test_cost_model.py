"""What a copy of an operand with another dimension last costs: of a CPU that was measured, on products small enough to
count.
"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from autopar.cost.cost_model import NodeCosts, cost_model
from autopar.frontend.build_graph import build_graph
from autopar.frontend.tracing import trace
from autopar.hardware.cluster import Cluster
from autopar.ir.mesh import LogicalMesh
from autopar.sharding.rules import RuleBook

ONE, OTHER = jax.ShapeDtypeStruct((2, 4, 4, 8), jnp.float32), jax.ShapeDtypeStruct((4, 4, 8), jnp.float32)
WRITTEN = 2 * 16 * 8 * 4  # bytes of the operand
S_PER_BYTE = 1e-3


def as_it_is(x, y):
    return x


def elementwise(x, y):
    return x * (x + 1.0) * y  # y is half as large


def expensive_once(x, y):
    return x * jnp.tanh(x + 1.0)


def expensive_twice(x, y):
    t = jnp.tanh(x + 1.0)  # read twice, so that it is written
    return x * t - t


def behind_a_sum(x, y):
    return x + jnp.sum(x, axis=3, keepdims=True)  # an eighth as large


def read_by_many(x, y):
    z = x + y
    return z * (z + 1.0) * (z + 2.0)  # written


def over_two_dimensions(x, kernels):
    return jax.lax.dot_general(x, kernels, (((1, 2), (1, 2)), ((0,), (0,))))


def over_one(x, kernels):
    return jax.lax.dot_general(x.reshape(2, 16, 8), kernels.reshape(2, 16, 8), (((1,), (1,)), ((0,), (0,))))


@pytest.mark.parametrize(
    ("operand", "product", "times"),
    [
        (as_it_is, over_two_dimensions, 1.0),
        (elementwise, over_two_dimensions, 1.5),
        (expensive_once, over_two_dimensions, 1.0),
        (expensive_twice, over_two_dimensions, 2.0),
        (behind_a_sum, over_two_dimensions, 1.125),
        (read_by_many, over_two_dimensions, 1.0),
        (elementwise, over_one, 1.0),  # read by the kernel, after it was written
    ],
)
def test_a_copy_reads_what_its_operand_is_computed_from(operand, product, times):
    """XLA's CPU compiler computes elementwise operations on the way, of arrays that it reads against their rows."""

    def step(x, y, kernels):
        return product(operand(x, y), kernels)

    traced = trace(step, (ONE, OTHER, ONE), names=("x", "y", "kernels"), donate=(), batch=())
    graph = build_graph(traced, RuleBook())
    cluster = Cluster.preset("dgx-h100")
    seconds = []
    for transposing in ((), ((32.0, S_PER_BYTE), (64.0, S_PER_BYTE))):
        device = dataclasses.replace(cluster.device, transposing=transposing)
        model = cost_model(dataclasses.replace(cluster, device=device), LogicalMesh(axis_sizes=(8,)))
        (dot,) = (op for op in graph.ops() if op.primitive == "dot_general")
        seconds.append(NodeCosts(graph, model).compute_s(dot, None))
    assert seconds[1] - seconds[0] == pytest.approx(times * WRITTEN * S_PER_BYTE)


@pytest.mark.parametrize(
    ("cluster", "by_all_reduce"),
    [("tpu-v5p:2x2x2", True), ("tpu-v5p:2x2x1", False), ("tpu-v5e:2x4", False), ("dgx-h100", False)],
)
def test_only_on_a_torus_of_three_dimensions_a_scatter_over_all_devices_is_an_all_reduce(cluster, by_all_reduce):
    cluster = Cluster.parse(cluster)
    links = cost_model(cluster, LogicalMesh(axis_sizes=(cluster.num_devices,))).links
    assert links.scatters_by_all_reduce is by_all_reduce
