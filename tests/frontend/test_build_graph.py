"""Graphs of small steps, written out.

A line is `results = primitive operands`, then the role and the module where it has one, and `xN` where it runs N times.
Blocks of loops and branches follow indented. Values are numbered as they appear; arguments and constants have names.
"""

import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from autopar.frontend.build_graph import build_graph, module_path, role_of
from autopar.frontend.tracing import trace
from autopar.ir.graph import Factor, FactorKind, OpKind, Role
from autopar.ir.rules import RuleBook

BOOK = RuleBook()


def shape(*dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


def graph_of(function, *args, donate=()):
    return build_graph(trace(function, args, names="abcd"[: len(args)], donate=donate, batch=()), BOOK)


def text(graph):
    names = {}

    def name(atom):
        if not isinstance(atom, int):
            return repr(float(atom.literal.val))
        value = graph.values[atom].name.replace("constant ", "constant")
        return value or names.setdefault(atom, f"%{len(names)}")

    def block_lines(block, indent):
        lines = []
        for op in block.ops:
            operands = " ".join(map(name, op.inputs))
            results = " ".join(map(name, op.outputs))
            where = f"{op.role.value} {op.module}".strip() + (f" x{op.count:g}" if op.count != 1 else "")
            lines.append(f"{indent}{results} = {op.primitive} {operands} | {where}")
            for inner in op.blocks:
                lines.append(f"{indent}  ({' '.join(map(name, inner.inputs))})")
                lines += block_lines(inner, indent + "    ")
                lines.append(f"{indent}  -> {' '.join(map(name, inner.outputs))}")
        return lines

    head = " ".join(map(name, graph.block.inputs))
    return "\n".join([f"({head})", *block_lines(graph.block, "  "), f"-> {' '.join(map(name, graph.block.outputs))}"])


def check(function, *args, expected):
    assert text(graph_of(function, *args)) == textwrap.dedent(expected).strip()


def test_a_gradient_step_has_roles_modules_and_tied_state():
    def step(a, b):
        def loss(a):
            with jax.named_scope("layer"):
                hidden = jnp.tanh(b @ a)
            return jnp.sum(hidden)

        return a - jax.grad(loss)(a)

    graph = graph_of(step, shape(4, 2), shape(8, 4), donate=(0,))
    rows = [(op.primitive, op.role, op.module) for op in graph.ops()]
    assert rows[:2] == [("dot_general", Role.FORWARD, "layer"), ("tanh", Role.FORWARD, "layer")]
    assert ("dot_general", Role.BACKWARD, "layer") in rows[2:]
    assert rows[-1] == ("sub", Role.UPDATE, "")
    assert graph.tied == ((0, 0),)
    assert graph.donated == {0}


def test_work_that_no_result_needs_is_removed():
    def step(a):
        unused = jnp.sin(jnp.exp(a))  # noqa: F841
        return jnp.exp(a)

    check(step, shape(4), expected="""
        (a)
          %0 = exp a | update
        -> %0
        """)  # fmt: skip


def test_dead_work_is_removed_from_loop_bodies_too():
    def body(carry, _):
        unused = jnp.sin(carry)  # noqa: F841
        return carry * 2.0, None

    graph = graph_of(lambda a: jax.lax.scan(body, a, None, length=3)[0], shape(4))
    assert [op.primitive for op in graph.ops()] == ["scan", "mul"]


def test_calls_are_inlined():
    @jax.jit
    def inner(x):
        return x + 1.0

    check(lambda a: inner(inner(a)), shape(4), expected="""
        (a)
          %0 = add a 1.0 | update
          %1 = add %0 1.0 | update
        -> %1
        """)  # fmt: skip


def test_a_linear_solver_is_what_solves():
    graph = graph_of(jnp.linalg.solve, shape(3, 4, 4), shape(3, 4, 1))
    names = [op.primitive for op in graph.block.ops]
    assert "custom_linear_solve" not in names
    assert names.count("triangular_solve") == 2


def test_a_reshape_of_dimensions_in_another_order_is_a_transpose_and_a_reshape():
    check(
        lambda a: jax.lax.reshape(a, (12, 2), (2, 0, 1)),
        shape(2, 3, 4),
        expected="""
        (a)
          %0 = transpose a | update
          %1 = reshape %0 | update
        -> %1
        """,
    )


def test_a_custom_gradient_is_inlined():
    @jax.custom_vjp
    def double(x):
        return x * 2.0

    double.defvjp(lambda x: (x * 2.0, None), lambda _, g: (g * 3.0,))
    check(double, shape(4), expected="""
        (a)
          %0 = mul a 2.0 | update
        -> %0
        """)  # fmt: skip


def test_rematerialised_work_stands_behind_a_barrier():
    def loss(a, b):
        return jnp.sum(jax.checkpoint(lambda a: jnp.sin(b @ a))(a))

    graph = graph_of(jax.grad(loss), shape(4, 2), shape(8, 4))
    (at,) = [i for i, op in enumerate(graph.block.ops) if op.kind is OpKind.BARRIER]
    barrier = graph.block.ops[at]
    first, second = graph.block.ops[at + 1 : at + 3]
    assert set(graph.block.inputs) <= set(barrier.inputs)
    assert (first.primitive, second.primitive) == ("dot_general", "cos")
    assert set(first.inputs) <= set(barrier.outputs)
    shapes = [graph.values[v].shape for v in barrier.inputs]
    assert [graph.values[v].shape for v in barrier.outputs] == shapes


def test_a_scan_has_one_block_that_runs_many_times():
    def step(a, b):
        return jax.lax.scan(lambda carry, row: (carry * a + row, carry), a, b)

    check(step, shape(4), shape(3, 4), expected="""
        (a b)
          %0 %1 = scan a a b | update
            (%2 %3 %4)
              %5 = mul %3 %2 | update x3
              %6 = add %5 %4 | update x3
            -> %6 %3
        -> %0 %1
        """)  # fmt: skip


def test_nested_scans_multiply_their_counts():
    def inner(carry, _):
        return jnp.sin(carry), None

    def outer(carry, _):
        return jax.lax.scan(inner, carry, None, length=5)[0], None

    graph = graph_of(lambda a: jax.lax.scan(outer, a, None, length=3)[0], shape(4))
    assert [(op.primitive, op.count, op.trips) for op in graph.ops()] == [
        ("scan", 1.0, 3), ("scan", 3.0, 5), ("sin", 15.0, 1),
    ]  # fmt: skip


def test_a_while_loop_has_a_condition_and_a_body():
    def step(a, b):
        return jax.lax.while_loop(lambda carry: carry[0] < 3.0, lambda carry: (carry[0] + 1.0, carry[1] * a), (0.0, b))

    check(step, shape(4), shape(4), expected="""
        (a b)
          %0 %1 = while a 0.0 b | update
            (%2 %3)
              %4 = lt %2 3.0 | update
            -> %4
            (%5 %6 %7)
              %8 = add %6 1.0 | update
              %9 = mul %7 %5 | update
            -> %8 %9
        -> %0 %1
        """)  # fmt: skip


def test_a_cond_has_a_block_for_each_branch():
    def step(a, b):
        return jax.lax.cond(a, jnp.sin, lambda x: x * 2.0, b)

    check(step, shape(dtype=jnp.bool_), shape(4), expected="""
        (a b)
          %0 = convert_element_type a | update
          %1 = cond %0 b | update
            (%2)
              %3 = mul %2 2.0 | update
            -> %3
            (%4)
              %5 = sin %4 | update
            -> %5
        -> %1
        """)  # fmt: skip


def test_constants_of_inner_functions_stand_in_front_of_the_arguments_once():
    constant = jnp.arange(4.0)

    @jax.jit
    def inner(x):
        return x + constant

    def step(a):
        return jax.lax.scan(lambda carry, _: (inner(carry), None), inner(a), None, length=3)[0]

    graph = graph_of(step, shape(4), donate=(0,))
    assert [graph.values[v].name for v in graph.block.inputs] == ["constant 0", "a"]
    assert [c.tolist() for c in graph.constants] == [[0.0, 1.0, 2.0, 3.0]]
    assert graph.tied == ((1, 0),)
    assert graph.donated == {1}
    constant_id = graph.block.inputs[0]
    assert [constant_id in op.inputs for op in graph.ops() if op.primitive == "add"] == [True, True]


def test_every_equation_has_a_rule_and_loops_have_none():
    graph = graph_of(lambda a: jax.lax.scan(lambda c, _: (jnp.sin(c), None), a, None, length=2)[0], shape(4))
    assert [(op.primitive, op.rule is None) for op in graph.ops()] == [("scan", True), ("sin", False)]


def test_a_shard_map_is_one_operation_whose_axes_are_factors():
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    spec = jax.sharding.PartitionSpec("x")
    step = jax.shard_map(jnp.sin, mesh=mesh, in_specs=spec, out_specs=spec)
    (op,) = graph_of(step, shape(6)).block.ops
    rest = Factor(3, FactorKind.FIXED)
    assert op.rule.factors == (Factor(2, FactorKind.PASS), rest, rest)
    assert (op.rule.operands, op.rule.results) == ((((0, 1),),), (((0, 2),),))


@pytest.mark.parametrize(
    ("stack", "path"),
    [
        ("", ""),
        ("jvp(Model)/layer0/dense", "Model/layer0/dense"),
        ("transpose(jvp(Model))/layer0/jit(_where)", "Model/layer0"),
        ("jvp(Model/block)/mlp", "Model/block/mlp"),
        ("jvp()/while/body/closed_call/layer", "layer"),
        ("transpose(jvp())/rematted_computation/layer/checkpoint", "layer"),
        ("vmap(jvp(Model))/attention", "Model/attention"),
    ],
)
def test_module_path_of_a_name_stack(stack, path):
    assert module_path(stack) == path


@pytest.mark.parametrize(
    ("stack", "role"),
    [("jvp(M)/a", Role.FORWARD), ("transpose(jvp(M))/a", Role.BACKWARD), ("optimizer/scale", Role.UPDATE)],
)
def test_role_of_a_name_stack(stack, role):
    assert role_of(stack) is role
