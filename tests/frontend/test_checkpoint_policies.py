"""Policies of `jax.checkpoint` keep their meaning under a plan: what is saved, its memory, and the numbers."""

from importlib import metadata

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import autopar
from autopar import recipes
from autopar.frontend.build_graph import build_graph
from autopar.ir.graph import Role
from autopar.ir.rules import RuleBook
from tests.small_steps import slow_cluster

EXAMPLES, WIDTH, INNER, LAYERS = 2048, 64, 256, 4
policies = jax.checkpoint_policies
OFFLOAD = policies.save_and_offload_only_these_names(
    names_which_can_be_saved=["gate"], names_which_can_be_offloaded=["hidden"],
    offload_src="device", offload_dst="pinned_host",
)  # fmt: skip
# The policy, and the inner arrays of each layer that it saves.
CASES = {
    "nothing": (policies.nothing_saveable, 0),
    "dots": (policies.dots_saveable, 2),
    "dots without batch": (policies.dots_with_no_batch_dims_saveable, 2),
    "only hidden": (policies.save_only_these_names("hidden"), 1),
    "hidden and gate": (policies.save_only_these_names("hidden", "gate"), 2),
    "any but gate": (policies.save_any_names_but_these("gate"), 1),
    "offload": (OFFLOAD, 2),  # of which one waits in the memory of the host (tests/lowering/test_policy_offload.py)
}


def training_step(policy):
    def layer(x, p):
        hidden = checkpoint_name(jnp.tanh(x @ p["a"]), "hidden")
        gate = checkpoint_name(jax.nn.gelu(hidden @ p["b"]), "gate")
        return x + gate @ p["c"]

    def step(state, batch):
        def loss(state):
            x = batch["x"]
            for p in state:
                x = jax.checkpoint(layer, policy=policy)(x, p)
            return jnp.mean((x - batch["y"]) ** 2)

        value, gradients = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients), value

    return step


def arguments():
    keys = iter(jax.random.split(jax.random.key(0), 3 * LAYERS + 2))
    sizes = {"a": (WIDTH, INNER), "b": (INNER, INNER), "c": (INNER, WIDTH)}
    state = [{n: 0.2 * jax.random.normal(next(keys), s) for n, s in sizes.items()} for _ in range(LAYERS)]
    return state, {n: jax.random.normal(next(keys), (EXAMPLES, WIDTH)) for n in "xy"}


def parallel(policy, recipe):
    return autopar.parallelize(training_step(policy), plan=recipe, cluster=slow_cluster(2), cache_dir=None)


def saved_inner_arrays(graph):
    """Arrays of a layer's inner width that the forward pass makes and the backward pass reads."""
    made = {v: op for op in graph.block.ops for v in op.outputs if op.role is Role.FORWARD}
    backward = [op for op in graph.block.ops if op.role is Role.BACKWARD]
    read = {a for op in backward for a in op.inputs if isinstance(a, int)}
    return [v for v in read & made.keys() if graph.values[v].shape == (EXAMPLES, INNER)]


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", CASES)
def test_what_a_policy_saves_is_saved(name):
    policy, count = CASES[name]
    compiled = parallel(policy, recipes.data_parallel()).compile(*arguments())
    assert len(saved_inner_arrays(build_graph(compiled.traced, RuleBook()))) == count * LAYERS


FEW = ("nothing", "only hidden")
REST = [pytest.param(name, marks=pytest.mark.slow) for name in CASES if name not in FEW]
# jaxlib 0.12 assigns buffers otherwise: these programs take 4 to 10 % less than predicted.
BEFORE_0_12 = tuple(map(int, metadata.version("jaxlib").split(".")[:2])) < (0, 12)
# XLA's CPU compiler rounds what is saved (`reduce_precision`) in place where all named values are saved, and not where
# one of them is; the prediction has a buffer of its own for each.
ROUNDED_IN_PLACE = {("hidden and gate", "one program"), ("offload", "one program")}


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", [*FEW, *REST])
@pytest.mark.parametrize("where", ["one program", "stages"])
def test_memory_is_that_of_the_compiled_program_and_numbers_are_those_of_jit(name, where, request):
    recipe = recipes.data_parallel() if where == "one program" else recipes.pipeline(2, num_microbatches=2)
    compared = autopar.verify(parallel(CASES[name][0], recipe), *arguments())
    assert compared.difference < 1e-5
    if (name, where) == ("offload", "stages"):
        request.applymarker(
            pytest.mark.xfail(
                reason="CPU devices have one memory: XLA makes at once what goes to the host in its place"
            )
        )
    if (name, where) in ROUNDED_IN_PLACE:
        request.applymarker(pytest.mark.xfail(reason="rounding in place is not predicted: 18 % too much", strict=True))
    assert compared.peak.ratio == pytest.approx(1.0, abs=0.03 if BEFORE_0_12 else 0.11)
