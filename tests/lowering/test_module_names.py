"""Compiled programs bear the user's modules, as `jax.grad` names them, for profilers."""

import re

import jax
import pytest

import autopar
from autopar import recipes
from autopar.frontend.build_graph import module_path, role_of, stack_of_module
from autopar.ir.graph import Role
from benchmarks.zoo import CASES
from tests.small_steps import slow_cluster

GPT = CASES["gpt"](layers=1, width=32, length=16, batch=8)


@pytest.mark.parametrize("module", ["", "M", "M/layer0/dense"])
@pytest.mark.parametrize("role", [Role.FORWARD, Role.BACKWARD, Role.UPDATE])
def test_stacks_are_read_back(module, role):
    stack = stack_of_module(module, role)
    assert (module_path(stack), role_of(stack)) == (module, role)


def test_products_are_named_as_in_the_plain_step():
    """But for the subscripts of einsum, which jax takes into its names, and which are no module."""
    args = jax.eval_shape(GPT.init, jax.random.key(0)), GPT.batch(0)
    step = autopar.parallelize(GPT.step, plan=recipes.zero(3), cluster=slow_cluster(4), cache_dir=None)
    ours, plain = (
        set(re.findall(r' dot\(.*op_name="([^"]*/dot_general)"', compiled.as_text()))
        for compiled in (step.compile(*args), jax.jit(GPT.step).lower(*args).compile())
    )
    assert {name.replace("shard_map/", "") for name in ours} == {re.sub("/[^/]*->[^/]*", "", name) for name in plain}
    assert "jit(step)/transpose(jvp(GPT))/layer0/feed_forward_in/dot_general" in plain
