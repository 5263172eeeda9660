"""Strategies of operations, written out: `operands -> results`, and among how many devices the work is divided."""

import jax
import jax.numpy as jnp

from autopar.ir.graph import FactorKind
from autopar.ir.layout import Layout, LogicalMesh, enumerate_layouts, enumerate_with_partial
from autopar.ir.primitives import linear_operands
from autopar.ir.rules import RuleBook, equation_key
from autopar.ir.strategies import Signature, enumerate_strategies, follow_one, following

MESH = LogicalMesh(axis_sizes=(2, 2))
LINE = LogicalMesh(axis_sizes=(2,))
BOOK = RuleBook()


def shape(*dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


def signature(function, *args, partial_sums=True, linear=False):
    """The signature of a function of one equation. `linear`: partial operands may reach it."""
    (eqn,) = jax.make_jaxpr(function)(*args).eqns
    BOOK.learn([(equation_key(eqn), eqn)])
    rule = BOOK.rule(equation_key(eqn))
    return Signature(
        rule=rule,
        operand_shapes=tuple(tuple(v.aval.shape) for v in eqn.invars),
        result_shapes=tuple(tuple(v.aval.shape) for v in eqn.outvars),
        sums_partially=partial_sums and any(f.kind is FactorKind.SUM for f in rule.factors),
        linear=linear_operands(eqn.primitive.name, eqn)[:1] if linear else (),
    )


def text(strategy, mesh):
    operands = " ".join(layout.text(mesh) for layout in strategy.operands)
    results = " ".join(layout.text(mesh) for layout in strategy.results)
    combined = "".join(f" combined over {mesh.axis_names[a]}" for a in strategy.combined)
    return f"{operands} -> {results} /{strategy.split}{combined}"


def texts(found, mesh=MESH):
    return sorted(text(strategy, mesh) for strategy in found)


def test_every_strategy_of_a_matmul_on_four_devices():
    # Factors rows=4, contracted=8, columns=2: each of the two axes goes to one of them or to none, and 2 columns cannot
    # be split by both.
    found = enumerate_strategies(signature(jnp.matmul, shape(4, 8), shape(8, 2)), MESH)
    assert text(found[0], MESH) == "P(None, None) P(None, None) -> P(None, None) /1"
    assert texts(found) == sorted(
        [
            "P(None, None) P(None, None) -> P(None, None) /1",
            'P("x", None) P(None, None) -> P("x", None) /2',  # rows: data parallelism
            'P("y", None) P(None, None) -> P("y", None) /2',
            'P(("x", "y"), None) P(None, None) -> P(("x", "y"), None) /4',
            'P(None, None) P(None, "x") -> P(None, "x") /2',  # columns: column-parallel
            'P(None, None) P(None, "y") -> P(None, "y") /2',
            'P(None, "x") P("x", None) -> P(None, None, unreduced={"x"}) /2',  # contracted: row-parallel, partial sums
            'P(None, "y") P("y", None) -> P(None, None, unreduced={"y"}) /2',
            'P(None, ("x", "y")) P(("x", "y"), None) -> P(None, None, unreduced={"x", "y"}) /4',
            'P("x", None) P(None, "y") -> P("x", "y") /4',
            'P("y", None) P(None, "x") -> P("y", "x") /4',
            'P("x", "y") P("y", None) -> P("x", None, unreduced={"y"}) /4',
            'P("y", "x") P("x", None) -> P("y", None, unreduced={"x"}) /4',
            'P(None, "x") P("x", "y") -> P(None, "y", unreduced={"x"}) /4',
            'P(None, "y") P("y", "x") -> P(None, "x", unreduced={"y"}) /4',
        ]
    )


def test_a_sum_that_may_not_be_put_off_is_combined_where_it_is_made():
    found = enumerate_strategies(signature(jnp.matmul, shape(2, 4), shape(4, 1), partial_sums=False), LINE)
    assert texts(found, LINE) == sorted(
        [
            "P(None, None) P(None, None) -> P(None, None) /1",
            'P(None, "x") P("x", None) -> P(None, None) /2 combined over x',
            'P("x", None) P(None, None) -> P("x", None) /2',
        ]
    )


def test_a_maximum_is_combined_where_it_is_made():
    found = enumerate_strategies(signature(lambda a: jax.lax.reduce_max(a, (1,)), shape(3, 4)), LINE)
    assert texts(found, LINE) == sorted(["P(None, None) -> P(None) /1", 'P(None, "x") -> P(None) /2 combined over x'])


def test_a_dimension_that_may_not_be_split_is_whole_everywhere():
    found = enumerate_strategies(signature(lambda a: jax.lax.cumsum(a, 1), shape(2, 4)), LINE)
    assert texts(found, LINE) == sorted(["P(None, None) -> P(None, None) /1", 'P("x", None) -> P("x", None) /2'])


def test_a_minor_factor_is_split_only_behind_major_ones_that_are_split_to_single_elements():
    # (2, 4) merged to 8: four devices can split it as 2 by 2, one axis on the major factor and one on the minor.
    found = enumerate_strategies(signature(lambda a: jax.lax.reshape(a, (8,)), shape(2, 4)), MESH)
    assert texts(found) == sorted(
        [
            'P("x", "y") -> P(("x", "y")) /4',
            'P("x", None) -> P("x") /2',
            'P("y", "x") -> P(("y", "x")) /4',
            'P("y", None) -> P("y") /2',
            "P(None, None) -> P(None) /1",
        ]
    )


def test_a_linear_operation_passes_partial_operands_on():
    found = enumerate_strategies(signature(jnp.add, shape(2), shape(2), linear=True), LINE)
    assert texts(found, LINE) == sorted(
        [
            'P(None, unreduced={"x"}) P(None, unreduced={"x"}) -> P(None, unreduced={"x"}) /1',
            "P(None) P(None) -> P(None) /1",
            'P("x") P("x") -> P("x") /2',
        ]
    )


def test_axes_of_size_one_are_given_to_nothing():
    mesh = LogicalMesh(axis_sizes=(1, 2))
    found = enumerate_strategies(signature(jnp.negative, shape(2)), mesh)
    assert texts(found, mesh) == sorted(["P(None) -> P(None) /1", 'P("y") -> P("y") /2'])


# Following


def test_an_elementwise_operation_follows_its_operand_in_every_layout():
    layouts = enumerate_layouts((4, 4), MESH)
    found = following(signature(jnp.negative, shape(4, 4)), 0, layouts, MESH)
    assert [s.operands[0] for s in found] == list(layouts) == [s.results[0] for s in found]


def test_a_transpose_turns_the_layouts_of_its_operand():
    layouts = (Layout(((0,), ())), Layout(((0,), (1,))), Layout(((), (0, 1))))
    found = following(signature(jnp.transpose, shape(4, 4)), 0, layouts, MESH)
    assert [s.results[0].text(MESH) for s in found] == ['P(None, "x")', 'P("y", "x")', 'P(("x", "y"), None)']


def test_a_reshape_follows_what_it_merges():
    merge = signature(lambda a: jax.lax.reshape(a, (8, 3)), shape(2, 4, 3))
    followed = follow_one(merge, 0, Layout(((0,), (1,), ())), MESH)
    assert text(followed, MESH) == 'P("x", "y", None) -> P(("x", "y"), None) /4'
    # Splitting the minor of the merged dimensions alone would leave each device pieces that lie apart.
    assert follow_one(merge, 0, Layout(((), (1,), ())), MESH) is None


def test_a_reshape_follows_what_it_splits():
    split = signature(lambda a: jax.lax.reshape(a, (2, 4)), shape(8))
    assert text(follow_one(split, 0, Layout(((0, 1),)), MESH), MESH) == 'P(("x", "y")) -> P("x", "y") /4'
    assert text(follow_one(split, 0, Layout(((1,),)), MESH), MESH) == 'P("y") -> P("y", None) /2'


def test_a_matmul_follows_nobody():
    product = signature(jnp.matmul, shape(4, 4), shape(4, 4))
    assert following(product, 0, enumerate_layouts((4, 4), MESH), MESH) is None
    assert following(product, 1, enumerate_layouts((4, 4), MESH), MESH) is None


def test_a_broadcast_does_not_follow_what_it_enlarges():
    # It could split the rows that it adds, which its operand does not have.
    broadcast = signature(lambda a: jax.lax.broadcast_in_dim(a, (4, 4), (1,)), shape(4))
    assert following(broadcast, 0, enumerate_layouts((4,), MESH), MESH) is None


def test_a_partial_operand_is_followed_only_by_what_is_linear_in_it():
    layouts = enumerate_with_partial((2,), LINE)
    assert following(signature(jnp.negative, shape(2)), 0, layouts, LINE) is None
    found = following(signature(jnp.negative, shape(2), linear=True), 0, layouts, LINE)
    assert texts(found, LINE) == sorted(
        [
            'P(None, unreduced={"x"}) -> P(None, unreduced={"x"}) /1',
            "P(None) -> P(None) /1",
            'P("x") -> P("x") /2',
        ]
    )
