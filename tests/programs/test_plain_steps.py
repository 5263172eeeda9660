"""The steps that benchmarks also run where there is nothing but jax, and the child that runs them there."""

import ast
import sys
from pathlib import Path

import jax
import pytest

from benchmarks import plain_steps
from benchmarks.plain_steps import STEPS

FROZEN = Path(plain_steps.__file__).with_name("frozen_auto_sharding.py")


@pytest.mark.parametrize("path", [Path(plain_steps.__file__), FROZEN], ids=lambda path: path.stem)
def test_they_need_jax_alone(path):
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module)
    foreign = {name for name in imported if name.split(".")[0] not in sys.stdlib_module_names}
    assert {name.split(".")[0] for name in foreign - {"benchmarks.plain_steps"}} == {"jax"}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_gives_back_what_it_takes(name):
    case = STEPS[name]()
    params, moments, batch = case.args
    new_params, new_moments, loss = jax.eval_shape(case.step, params, moments, batch)
    of = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    assert (of(new_params), of(new_moments)) == (of(params), of(moments))
    assert loss.shape == ()
