"""`custom_partitioning` in a step: its sharding rule is read, and the result equals plain `jax.jit`."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

import autopar
from autopar import recipes
from autopar.frontend.build_graph import build_graph
from autopar.ir.graph import Factor, FactorKind
from autopar.ir.rules import RuleBook
from tests.ops.kernels.test_kernels import assert_equals_jit, parallel, splits


def product(rule, **factors):
    """A product of matrices that brings its own partitioner, with a gradient."""

    @custom_partitioning
    def call(x, w):
        return jnp.einsum("...j,jk->...k", x, w)

    def partition(mesh, args, result):
        summed = args[0].sharding.spec[-1]

        def lower(x, w):
            out = jnp.einsum("...j,jk->...k", x, w)
            return jax.lax.psum(out, summed) if summed else out

        return mesh, lower, result.sharding, tuple(a.sharding for a in args)

    def infer(mesh, args, result):
        return NamedSharding(mesh, PartitionSpec(*args[0].sharding.spec[:-1], args[1].sharding.spec[-1]))

    call.def_partition(infer_sharding_from_operands=infer, partition=partition, sharding_rule=rule, **factors)
    differentiable = jax.custom_vjp(call)
    differentiable.defvjp(lambda x, w: (call(x, w), (x, w)), lambda kept, g: (call(g, kept[1].T), call(kept[0].T, g)))
    return differentiable


RULE = "i j, j k -> i k"


def step_of(call):
    def loss(state, batch):
        return jnp.mean((jnp.tanh(call(batch["x"], state["up"])) @ state["down"] - batch["y"]) ** 2)

    def train_step(state, batch):
        value, gradients = jax.value_and_grad(loss)(state, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients), value

    return train_step


def arguments():
    keys = jax.random.split(jax.random.key(0), 4)
    up, down, x, y = (jax.random.normal(k, s) for k, s in zip(keys, ((8, 16), (16, 8), (16, 8), (16, 8)), strict=True))
    return {"up": up, "down": down}, {"x": x, "y": y}


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("recipe", "devices"),
    [
        (None, 1),
        (None, 2),
        (None, 8),
        (recipes.data_parallel(), 4),
        (recipes.zero(3), 4),
        (recipes.tensor_parallel(), 2),
        (recipes.pipeline(2, num_microbatches=2), 2),
    ],
)
def test_a_step_with_its_own_partitioner_equals_plain_jit(recipe, devices):
    assert_equals_jit(step_of(product(RULE, reduction_factors=("j",))), recipe, devices, arguments())


def test_it_is_split_and_sends_what_was_predicted():
    step = parallel(step_of(product(RULE, reduction_factors=("j",))), recipes.data_parallel(), 4)
    assert splits(step, arguments(), "custom_partitioning") == [4, 4]
    made = autopar.verify(step, *arguments())
    assert {c.name: c.compiled for c in made.collectives} == {c.name: c.predicted for c in made.collectives}


def rule_of(call, *shapes):
    args = [jnp.ones(s) for s in shapes]
    traced = parallel(lambda state, batch: (state, call(*batch["args"])), None, 1).compile(0.0, {"args": args}).traced
    (op,) = [op for op in build_graph(traced, RuleBook()).ops() if op.primitive == "custom_partitioning"]
    return op.rule


def test_the_notation_is_read():
    kinds = FactorKind
    rule = rule_of(product("... j, j k -> ... k", reduction_factors=("j",)), (2, 3, 4), (4, 5))
    assert rule.factors == (
        Factor(2, kinds.PASS), Factor(3, kinds.PASS), Factor(4, kinds.SUM), Factor(5, kinds.PASS)
    )  # fmt: skip
    assert rule.operands == (((0,), (1,), (2,)), ((2,), (3,)))
    compound = rule_of(product("(a b) j, j k -> (a b) k", reduction_factors=("j",), a=2, b=3), (6, 4), (4, 5))
    assert compound.operands[0] == ((0, 1), (2,))
    assert compound.factors[:2] == (Factor(2, kinds.PASS), Factor(3, kinds.PASS))
    whole = rule_of(product(RULE, need_replication_factors=("j", "k")), (6, 4), (4, 5))
    assert [f.kind for f in whole.factors] == [kinds.PASS, kinds.FIXED, kinds.FIXED]


def test_a_rule_may_be_a_function_and_what_it_raises_is_in_a_note():
    assert rule_of(product(lambda mesh, operands, results: RULE), (6, 4), (4, 5)).operands == (
        ((0,), (1,)),
        ((1,), (2,)),
    )

    def raising(mesh, operands, results):
        raise ValueError("no")

    rule = rule_of(product(raising), (6, 4), (4, 5))
    assert "raised ValueError" in rule.note
    assert "test_custom_partitions.py:" in rule.note
