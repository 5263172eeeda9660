"""Kernels that are no products: counted in small steps, with what they read and write, and their time on devices."""

import functools
import tracemalloc

import jax
import jax.numpy as jnp
import optax
import pytest

import autopar
from autopar.cost.cost_model import NodeCosts, cost_model
from autopar.cost.kernel_traffic import NO_TRAFFIC, kernel_traffic
from autopar.cost.xla_program import GPU
from autopar.frontend.build_graph import build_graph
from autopar.frontend.tracing import trace
from autopar.hardware import presets
from autopar.ir.layout import LogicalMesh
from autopar.ir.primitives import RAGGED_PRODUCT
from autopar.ir.rules import RuleBook

ROWS, WIDE = (64, 32), (32, 32)


def shape(*dims):
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def graph_of(step, *arguments):
    return build_graph(trace(step, arguments, names=("state", "batch"), donate=(0,), batch=(1,)), RuleBook())


def ended(step, *arguments):
    """(primitive, kernels) of the operations with which some end, those of loops' bodies last."""
    graph = graph_of(step, *arguments)
    traffic = kernel_traffic(graph, GPU)
    ops = [*graph.block.ops, *(op for loop in graph.block.ops for block in loop.blocks for op in block.ops)]
    return [(op.primitive, traffic[op.id].ended) for op in ops if traffic.get(op.id, NO_TRAFFIC).ended]


def test_a_chain_is_one_kernel_and_ends_where_a_product_reads_it():
    def step(state, batch):
        h = jnp.tanh(2.0 * (batch @ state) + 1.0)
        return jnp.sin(h @ state) - 1.0

    assert ended(step, shape(*WIDE), shape(*ROWS)) == [("tanh", 1), ("sub", 1)]


def test_a_product_multiplies_its_result_with_one_number():
    def step(state, batch, *, reads_product=False):
        product = batch @ state
        scaled = product * jnp.sum(state[0])
        return (scaled, product) if reads_product else scaled

    of_sum = [("reduce_sum", 1)]
    assert ended(step, shape(*WIDE), shape(*ROWS)) == of_sum
    assert ended(functools.partial(step, reads_product=True), shape(*WIDE), shape(*ROWS)) == [*of_sum, ("mul", 1)]


def test_new_parameters_and_the_state_of_their_optimizer_are_one_kernel():
    optimizer = optax.adam(1e-3)

    def step(state, batch):
        updates, moments = optimizer.update(batch, state[1], state[0])
        return optax.apply_updates(state[0], updates), moments

    state = (shape(*WIDE), jax.eval_shape(optimizer.init, shape(*WIDE)))
    graph = graph_of(step, state, shape(*WIDE))
    traffic = kernel_traffic(graph, GPU)
    assert (
        sum(
            t.ended for op in graph.block.ops if (t := traffic.get(op.id)) and graph.values[op.outputs[0]].shape == WIDE
        )
        == 1
    )


def arrays_moved(step, *arguments):
    """(primitive, arrays of the rows' size that it reads and writes) of each operation that reads or writes some."""
    graph = graph_of(step, *arguments)
    size = graph.values[graph.block.inputs[-1]].nbytes
    traffic = kernel_traffic(graph, GPU)
    moved = [(op.primitive, round(traffic.get(op.id, NO_TRAFFIC).nbytes / size, 1)) for op in graph.block.ops]
    return [(primitive, arrays) for primitive, arrays in moved if arrays]


TALL = (1024, 512)


def test_a_chain_reads_once_and_writes_once():
    assert arrays_moved(lambda state, batch: (state, jnp.sin(batch * 2.0 + 1.0)), shape(2), shape(*TALL)) == [
        ("mul", 1),
        ("sin", 1),
    ]


def test_an_array_that_two_operations_of_a_kernel_read_is_read_once():
    assert arrays_moved(lambda state, batch: (state, batch * jnp.sin(batch)), shape(2), shape(*TALL)) == [
        ("sin", 1),
        ("mul", 1),
    ]


def test_a_norm_and_a_softmax_are_computed_a_row_at_a_time():
    def norm(state, batch):
        off = batch - batch.mean(-1, keepdims=True)
        return state, off * jax.lax.rsqrt((off**2).mean(-1, keepdims=True))

    softmax = lambda state, batch: (state, jax.nn.softmax(batch))
    for step in (norm, softmax):
        assert sum(arrays for _, arrays in arrays_moved(step, shape(2), shape(*TALL))) == 2


def test_a_reduction_whose_result_alone_is_wanted_reads_its_operand():
    moved = arrays_moved(lambda state, batch: (state, jnp.exp(batch).sum(-1)), shape(2), shape(*TALL))
    assert moved == [("exp", 1)]


def test_sums_over_columns_come_before_what_reads_them_and_those_of_one_array_are_one_kernel():
    def norm(state, batch):
        mean, square = batch.mean(0), (batch**2).mean(0)
        return state, (batch - mean) * jax.lax.rsqrt(square - mean**2)

    assert sum(arrays for _, arrays in arrays_moved(norm, shape(2), shape(*TALL))) == 3  # twice in, once out
    assert [n for _, n in ended(norm, shape(2), shape(*TALL))] == [1, 1]


def test_an_optimizer_reads_and_writes_each_array_once():
    def step(state, batch):
        p, m, v = state
        m, v = 0.9 * m + 0.1 * batch, 0.99 * v + 0.01 * batch**2
        return (p - m / (jnp.sqrt(v) + 1e-3), m, v), 0.0

    assert sum(arrays for _, arrays in arrays_moved(step, (shape(*TALL),) * 3, shape(*TALL))) == 7


def test_a_sum_that_many_kernels_would_compute_again_is_written():
    """Each layer reads the sum of what came before, and adds to it what a product makes."""

    def arrays(layers):
        def step(state, batch):
            x = batch
            for _ in range(layers):
                x = x + jnp.tanh(x) @ state
            return x

        return sum(arrays for _, arrays in arrays_moved(step, shape(512, 512), shape(*TALL)))

    assert arrays(16) - arrays(8) == arrays(24) - arrays(16)
    assert arrays(16) - arrays(8) <= 8 * (2 + 3)  # a tangent in and out; two summands in, their sum out


def test_memory_grows_with_the_terms_of_a_sum_and_not_with_their_square():
    """Of a sum of numbers, each gradient depends on all terms."""

    def step(params, x):
        def loss(params):
            return sum(jnp.tanh(x @ w).sum() for w in params) ** 2

        return jax.tree.map(lambda w, g: w - g, params, jax.grad(loss)(params))

    def peak_bytes(terms):
        graph = graph_of(step, [shape(8, 8)] * terms, shape(16, 8))
        tracemalloc.start()
        try:
            kernel_traffic(graph, GPU)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak_bytes(200) < 3 * peak_bytes(100)


def test_a_product_in_between_is_no_part_of_kernels_but_what_it_reads_is_written():
    assert arrays_moved(lambda state, batch: jnp.sin(batch) @ state + 1.0, shape(512, 512), shape(*TALL)) == [
        ("sin", 2),
        ("add", 2),
    ]


def test_what_a_kernel_and_a_product_of_its_result_make_is_read_again():
    def step(state, batch):
        y = jnp.sin(batch)
        return y + y @ state

    assert arrays_moved(step, shape(512, 512), shape(*TALL)) == [("sin", 2), ("add", 3)]


def test_an_operation_of_several_results_is_a_kernel():
    def step(state, batch):
        left, right = jnp.split(batch, 2, axis=1)
        return state, jnp.sin(left) * right

    assert arrays_moved(step, shape(2), shape(*TALL)) == [("split", 2), ("sin", 0.5), ("mul", 1)]


def test_an_operation_without_results_is_none():
    def step(state, batch):
        jax.debug.callback(lambda x: None, batch)
        return state, jnp.sin(batch)

    assert arrays_moved(step, shape(2), shape(*TALL)) == [("sin", 2)]


def test_what_stands_behind_a_barrier_is_what_stood_before_it():
    def step(state, batch):
        _, _, y = jax.lax.optimization_barrier((state, state, batch))
        return state, jnp.sin(y)

    assert arrays_moved(step, shape(2), shape(*TALL)) == [("sin", 2)]


def test_parts_of_an_array_and_the_whole_of_it_are_read_once_together():
    def halves(state, batch):
        return state, batch[:, : TALL[1] // 2] * batch[:, TALL[1] // 2 :]

    def first(state, batch):
        return state, batch - batch[:, :1]

    assert sum(arrays for _, arrays in arrays_moved(halves, shape(2), shape(*TALL))) == 1.5
    assert sum(arrays for _, arrays in arrays_moved(first, shape(2), shape(*TALL))) == 2


def test_reductions_by_any_operation_are_kernels():
    def step(state, batch):
        bits = jax.lax.bitcast_convert_type(batch, jnp.int32)
        return state, bits ^ jax.lax.reduce(bits, 0, jax.lax.bitwise_xor, (1,))[:, None]

    assert sum(arrays for _, arrays in arrays_moved(step, shape(2), shape(*TALL))) == 2


def test_a_gather_computes_what_it_takes():
    def step(state, batch):
        return state, batch.astype(jnp.bfloat16)[jnp.zeros(4, jnp.int32)]

    assert arrays_moved(step, shape(2), shape(*TALL)) == []  # less than a twentieth


def test_a_loop_may_stack_a_literal():
    def step(state, batch):
        return jax.lax.scan(lambda carry, x: (carry + x, 1.0), state, batch)

    assert kernel_traffic(graph_of(step, shape(512), shape(*TALL)), GPU)


def test_a_split_kernel_takes_its_share_of_the_time():
    graph = graph_of(lambda state, batch: (state, jnp.sin(batch)), shape(2), shape(*TALL))
    (op,) = (op for op in graph.block.ops if op.primitive == "sin")
    model = cost_model(autopar.Cluster.parse("dgx-a100-80g:1"), LogicalMesh(axis_sizes=(1,)))
    moved_s = 2 * graph.values[op.outputs[0]].nbytes / model.device.memory_bytes_per_s
    assert NodeCosts(graph, model).compute_s(op, None) == pytest.approx(moved_s, rel=0.01)


def test_turns_of_a_loop_read_slices_for_products_and_stack_results():
    def step(state, batch):
        def turn(carry, x):
            carry = jnp.tanh(carry @ state + x @ state)
            return carry, 2.0 * carry

        return jax.lax.scan(turn, batch[0], batch)

    before, *turn = ended(step, shape(*WIDE), shape(8, *ROWS))
    assert before == ("slice", 1)
    # The slice that a product reads; the carried value and what is stacked are made by one kernel.
    assert turn == [("dot_general", 1), ("mul", 1)]


@pytest.mark.parametrize("turn", [jnp.sin, lambda x: jnp.sin(x).reshape(-1)], ids=["as it is", "by another name"])
def test_what_a_loop_stacks_is_read_and_written_in_each_turn(turn):
    graph = graph_of(lambda state, batch: (state, jax.lax.map(turn, batch)), shape(2), shape(8, *TALL))
    (loop,) = (op for op in graph.block.ops if op.blocks)
    sin = loop.blocks[0].ops[0]
    assert kernel_traffic(graph, GPU)[sin.id].nbytes == 2 * 4 * TALL[0] * TALL[1]


@pytest.mark.parametrize(("preset", "microseconds"), [("dgx-h200:1", 1.35), ("tpu-v5e:1x1", 0.0)])
def test_a_small_kernel_takes_its_time_where_that_is_known(preset, microseconds):
    cluster = autopar.Cluster.parse(preset)
    step = autopar.parallelize(lambda state, batch: state - batch, cluster=cluster, cache_dir=None)
    predicted_s = step.plan(shape(4, 4), shape(4, 4)).predicted.step_time_s
    assert predicted_s == pytest.approx(microseconds * 1e-6, abs=1e-8)


def test_a_loop_waits_between_its_turns():
    """Of 16 turns, each a product and an elementwise kernel."""

    def step(state, batch):
        return jax.lax.scan(lambda carry, _: (jnp.tanh(carry @ state), None), batch, length=16)[0]

    cluster = autopar.Cluster.parse("dgx-h200:1")
    step = autopar.parallelize(step, cluster=cluster, cache_dir=None)
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
