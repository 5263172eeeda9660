"""What a copy of an operand with another dimension last costs: of a CPU that was measured, on products small enough to
count.
"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from autopar.building import build_graph
from autopar.cluster import Cluster
from autopar.mesh import LogicalMesh
from autopar.node_costs import NodeCosts, cost_model
from autopar.rules import RuleBook
from autopar.staging import trace

ONE, OTHER = jax.ShapeDtypeStruct((2, 16, 8), jnp.float32), jax.ShapeDtypeStruct((16, 8), jnp.float32)
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
    return x + jnp.sum(x, axis=2, keepdims=True)  # an eighth as large


@pytest.mark.parametrize(
    ("operand", "times"),
    [(as_it_is, 1.0), (elementwise, 1.5), (expensive_once, 1.0), (expensive_twice, 2.0), (behind_a_sum, 1.125)],
)
def test_a_copy_reads_what_its_operand_is_computed_from(operand, times):
    """XLA's CPU compiler computes elementwise operations on the way, of arrays that it reads against their rows."""

    def step(x, y, kernels):
        return jax.lax.dot_general(operand(x, y), kernels, (((1,), (1,)), ((0,), (0,))))

    traced = trace(step, (ONE, OTHER, ONE), names=("x", "y", "kernels"), donate=(), batch=())
    graph = build_graph(traced, RuleBook())
    cluster = Cluster.preset("dgx-h100")
    seconds = []
    for transposing in ((), ((32.0, S_PER_BYTE), (64.0, S_PER_BYTE))):
        device = dataclasses.replace(cluster.device, transposing=transposing)
        model = cost_model(dataclasses.replace(cluster, device=device), LogicalMesh(axis_sizes=(8,)))
        (product,) = (op for op in graph.ops() if op.primitive == "dot_general")
        seconds.append(NodeCosts(graph, model).compute_s(product, None))
    assert seconds[1] - seconds[0] == pytest.approx(times * WRITTEN * S_PER_BYTE)
