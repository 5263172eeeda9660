"""Nodes and edges of small graphs, and random programs in parallel against plain jax."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autopar
from autopar.frontend.build_graph import build_graph
from autopar.frontend.tracing import trace
from autopar.hardware.cluster import Cluster
from autopar.ir.layout import LogicalMesh
from autopar.ir.rules import RuleBook
from autopar.search.intra_op.build_choice_graph import build_choice_graph
from autopar.verification import leaf_difference

MESH = LogicalMesh(axis_sizes=(2,))


def shape(*dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


def assembly_of(function, *args, donate=()):
    traced = trace(function, args, names="abcd"[: len(args)], donate=donate, batch=())
    graph = build_graph(traced, RuleBook())
    return graph, build_choice_graph(graph, MESH)


def node_names(assembly):
    return [f"{node.kind} {node.name} {node.size}".replace(" /", " ") for node in assembly.nodes]


def edge_names(graph, assembly):
    made = {v: op.primitive for op in graph.ops() for v in op.outputs}
    names = [f"{node.kind} {node.name}".replace(" /", " ") for node in assembly.nodes]
    return [
        f"{graph.values[r.value].name or made[r.value]}: {names[r.source.node]} -> {names[r.target.node]}"
        for r in assembly.reshards
    ]


def test_a_matmul_is_a_choice_of_its_own_and_its_sum_is_placed():
    graph, assembly = assembly_of(jnp.matmul, shape(4, 8), shape(8, 2))
    # Layouts of a matrix: whole, by rows, by columns. Strategies: none, rows, contracted, columns.
    assert node_names(assembly) == ["argument a 3", "argument b 3", "operation dot_general 4",
                                    "placement dot_general placed 3"]  # fmt: skip
    assert sorted(edge_names(graph, assembly)) == [
        "a: argument a -> operation dot_general",
        "b: argument b -> operation dot_general",
        "dot_general: operation dot_general -> placement dot_general placed",
    ]


def test_elementwise_operations_join_the_node_of_their_operand():
    graph, assembly = assembly_of(lambda a: jnp.exp(-a).T, shape(4, 8))
    assert node_names(assembly) == ["argument a 3"]
    assert edge_names(graph, assembly) == []
    assert [op.primitive for op, _ in assembly.nodes[0].members] == ["neg", "exp", "transpose"]


def test_a_tied_result_is_brought_back_to_where_its_argument_lies():
    graph, assembly = assembly_of(lambda a, b: a + b @ b, shape(4, 4), shape(4, 4), donate=(0,))
    (node,) = [n for n, node in enumerate(assembly.nodes) if node.name == "a"]
    (result,) = graph.block.outputs
    assert [(r.source.node, r.target.node) for r in assembly.reshards if r.value == result] == [(node, node)]


def test_a_value_that_several_nodes_read_is_copied_for_them_once():
    graph, assembly = assembly_of(lambda a, b, c: (a @ b, a @ c), shape(4, 8), shape(8, 2), shape(8, 2))
    of_a = [e for e in edge_names(graph, assembly) if e.startswith("a:")]
    assert of_a == [
        "a: argument a -> copy a read by update",
        "a: copy a read by update -> operation dot_general",
        "a: copy a read by update -> operation dot_general",
    ]


def test_scalars_and_odd_sizes_are_no_choice():
    _, assembly = assembly_of(lambda a, b: jnp.sum(a) * b, shape(3, 5), shape())
    assert assembly.nodes == ()


def test_a_carried_value_has_one_layout_through_the_loop():
    def step(a):
        return jax.lax.scan(lambda carry, _: (carry * 2.0, None), a, None, length=3)[0]

    graph, assembly = assembly_of(step, shape(4))
    (loop,) = graph.block.ops
    (body,) = loop.blocks
    carried, result = body.inputs[0], loop.outputs[0]
    assert assembly.unreduced[carried].node == assembly.unreduced[result].node
    entering = [r for r in assembly.reshards if r.value == graph.block.inputs[0]]
    assert [(r.target.node, r.count) for r in entering] == [(assembly.unreduced[carried].node, 1.0)]


def test_what_a_loop_reads_each_turn_counts_each_turn():
    def step(a, b):
        return jax.lax.scan(lambda carry, _: (carry @ b, None), a, None, length=5)[0]

    graph, assembly = assembly_of(step, shape(4, 4), shape(4, 4))
    counts = {}
    for r in assembly.reshards:
        name = graph.values[r.value].name or "inner"
        counts.setdefault(name, set()).add(r.count)
    assert counts == {"a": {1.0}, "b": {1.0}, "inner": {5.0}}


def test_assembling_again_gives_the_same():
    def step(a, b):
        return jnp.tanh(a @ b) @ b.T

    first, second = (node_names(assembly_of(step, shape(4, 8), shape(8, 4))[1]) for _ in range(2))
    assert first == second


# Random programs

UNARY = {
    "tanh": jnp.tanh,
    "transpose": jnp.transpose,
    "flatten": lambda x: x.reshape(-1, 4),
    "split": lambda x: x.reshape(2, -1, *x.shape[1:]).sum(axis=0),
    "fold": lambda x: x.reshape(x.shape[0] // 2, -1),
    "softmax": lambda x: jax.nn.softmax(x, axis=-1),
    "maximum": lambda x: x - jnp.max(x, axis=0, keepdims=True),
    "mean": lambda x: x - jnp.mean(x, axis=1, keepdims=True),
    "gram": lambda x: x.T @ x / x.size,
    "project": lambda x: x @ x.T / x.size,
    "concatenate": lambda x: jnp.concatenate([x, 2.0 * x[: x.shape[0] // 2]], axis=0),
    "slice": lambda x: x[: max(2, x.shape[0] // 2)],
    "reverse": lambda x: x[::-1],
    "cumsum": lambda x: jnp.cumsum(x, axis=0) / x.shape[0],
    "pad": lambda x: jnp.pad(x, ((0, 0), (0, x.shape[1]))),
    "scan": lambda x: jax.lax.scan(lambda c, row: (0.5 * c + row, c * row), jnp.zeros(x.shape[1]), x)[1],
    "loop": lambda x: jax.lax.fori_loop(0, 3, lambda _, c: jnp.sin(c) + x, x),
    "where": lambda x: jnp.where(x > 0, x, 0.1 * x),
    "take": lambda x: x[jnp.arange(x.shape[0]) // 2],
    "scatter": lambda x: jnp.zeros_like(x).at[jnp.arange(x.shape[0]) // 2].add(x),
}


def compose(names):
    def loss(params, x):
        weight = params["w"]
        x = x @ weight
        for i, name in enumerate(names):
            x = UNARY[name](x)
            if i % 2 and x.shape[1] == weight.shape[0]:
                x = x @ weight
        return jnp.mean(x * x)

    def step(params, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def slow_cluster(num_devices):
    cluster = Cluster.local(num_devices=num_devices)
    device = dataclasses.replace(
        cluster.device, peak_flops=(("float32", 1e6),), peak_memory_bytes_per_s=1e6, launch_overhead_s=0.0
    )
    return dataclasses.replace(cluster, device=device)


@pytest.mark.slow
@settings(deadline=None, derandomize=True, max_examples=15)
@given(
    names=st.lists(st.sampled_from(sorted(UNARY)), min_size=2, max_size=5),
    num_devices=st.sampled_from([4, 8]),
    rows=st.sampled_from([8, 16]),
)
def test_random_programs_compute_what_plain_jax_computes(names, num_devices, rows):
    step = compose(names)
    keys = jax.random.split(jax.random.key(0))
    params = {"w": 0.5 * jax.random.normal(keys[0], (8, 8))}
    x = jax.random.normal(keys[1], (rows, 8))
    expected = jax.jit(step)(params, x)
    parallel = autopar.parallelize(step, cluster=slow_cluster(num_devices), cache_dir=None,
                                   donate_argnums=())  # fmt: skip
    assert parallel.plan(params, x).predicted.sent_bytes > 0  # something is split
    got = parallel(params, x)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
        assert leaf_difference(a, b) <= 1e-5


@pytest.mark.cases(7)
@pytest.mark.parametrize("name", sorted(UNARY))
def test_the_operations_of_random_programs_keep_matrices_finite(name):
    x = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    out = UNARY[name](jnp.asarray(x))
    assert out.ndim == 2
    assert np.isfinite(out).all()
