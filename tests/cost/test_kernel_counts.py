"""Kernels that are no products, counted in small steps, and their time on devices on which it is known."""

import jax
import jax.numpy as jnp
import optax
import pytest

import autopar
from autopar.cost.cost_model import NodeCosts, cost_model
from autopar.cost.kernel_counts import kernels_ended
from autopar.cost.xla_program import GPU
from autopar.frontend.build_graph import build_graph
from autopar.frontend.tracing import trace
from autopar.hardware import presets
from autopar.ir.mesh import LogicalMesh
from autopar.ir.primitives import RAGGED_PRODUCT
from autopar.sharding.rules import RuleBook

ROWS, WIDE = (64, 32), (32, 32)


def shape(*dims):
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def graph_of(step, *arguments):
    return build_graph(trace(step, arguments, names=("state", "batch"), donate=(0,), batch=(1,)), RuleBook())


def ended(step, *arguments):
    """(primitive, kernels) of the operations with which some end, those of loops' bodies last."""
    graph = graph_of(step, *arguments)
    kernels = kernels_ended(graph, GPU)
    ops = [*graph.block.ops, *(op for loop in graph.block.ops for block in loop.blocks for op in block.ops)]
    return [(op.primitive, kernels[op.id]) for op in ops if kernels[op.id]]


def test_a_chain_is_one_kernel_and_ends_where_a_product_reads_it():
    def step(state, batch):
        h = jnp.tanh(2.0 * (batch @ state) + 1.0)
        return jnp.sin(h @ state) - 1.0

    assert ended(step, shape(*WIDE), shape(*ROWS)) == [("tanh", 1), ("sub", 1)]


def test_new_parameters_and_the_state_of_their_optimizer_are_one_kernel():
    optimizer = optax.adam(1e-3)

    def step(state, batch):
        updates, moments = optimizer.update(batch, state[1], state[0])
        return optax.apply_updates(state[0], updates), moments

    state = (shape(*WIDE), jax.eval_shape(optimizer.init, shape(*WIDE)))
    graph = graph_of(step, state, shape(*WIDE))
    kernels = kernels_ended(graph, GPU)
    assert sum(kernels[op.id] for op in graph.block.ops if graph.values[op.outputs[0]].shape == WIDE) == 1


def test_turns_of_a_loop_read_slices_for_products_and_stack_results():
    def step(state, batch):
        def turn(carry, x):
            carry = jnp.tanh(carry @ state + x @ state)
            return carry, 2.0 * carry

        return jax.lax.scan(turn, batch[0], batch)

    before, *turn = ended(step, shape(*WIDE), shape(8, *ROWS))
    assert before == ("slice", 1)
    # The slice that a product reads, the carried value, and what is stacked.
    assert turn == [("dot_general", 1), ("tanh", 1), ("mul", 1)]


@pytest.mark.parametrize(("preset", "microseconds"), [("dgx-h200:1", 1.35), ("tpu-v5e:1x1", 0.0)])
def test_a_small_kernel_takes_its_time_where_that_is_known(preset, microseconds):
    cluster = autopar.Cluster.parse(preset)
    step = autopar.parallelize(lambda state, batch: state - batch, cluster=cluster, cache_dir=None, show_progress=False)
    predicted_s = step.plan(shape(4, 4), shape(4, 4)).predicted.step_time_s
    assert predicted_s == pytest.approx(microseconds * 1e-6, abs=1e-8)


def test_a_loop_waits_between_its_turns():
    """Of 16 turns, each a product and an elementwise kernel."""

    def step(state, batch):
        return jax.lax.scan(lambda carry, _: (jnp.tanh(carry @ state), None), batch, length=16)[0]

    cluster = autopar.Cluster.parse("dgx-h200:1")
    step = autopar.parallelize(step, cluster=cluster, cache_dir=None, show_progress=False)
    predicted_s = step.plan(shape(16, 16), shape(16, 16)).predicted.step_time_s
    h200 = presets.H200
    product_s = h200.launch_overhead_s + h200.fill_s("float32")
    turns_s = 16 * (product_s + h200.small_kernel_s + h200.loop_turn_s)
    assert predicted_s == pytest.approx(turns_s, rel=0.02)


def test_products_of_groups_take_as_long_to_start_as_one_product():
    def ragged(state, batch):
        return jax.lax.ragged_dot(batch["x"], state, batch["sizes"])

    rows = {"x": shape(32, 16), "sizes": jax.ShapeDtypeStruct((2,), jnp.int32)}
    graph = graph_of(ragged, shape(2, 16, 16), rows)
    model = cost_model(autopar.Cluster.parse("dgx-h200:1"), LogicalMesh(axis_sizes=(1,)))
    (op,) = (op for op in graph.block.ops if op.primitive == RAGGED_PRODUCT)
    assert presets.H200.launch_overhead_s <= NodeCosts(graph, model).compute_s(op, None)
