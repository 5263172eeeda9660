"""Texts that say what each layer recomputes."""

import jax
import numpy as np
import pytest

import autopar
from autopar import recipes
from autopar.errors import InvalidArgumentError
from autopar.passes.remat_policy import is_policy, policies_of
from tests.small_steps import assert_close, transformer


@pytest.mark.parametrize(
    ("text", "policies"),
    [
        ("nothing", ["nothing"] * 5),
        ("input", ["input"] * 5),
        ("matmuls every 2", ["nothing", "matmuls", "nothing", "matmuls", "nothing"]),
        ("input every 3", ["nothing", "nothing", "input", "nothing", "nothing"]),
        ("input every 9", ["nothing"] * 5),
    ],
)
def test_policies_of_five_layers(text, policies):
    assert list(policies_of(text, 5)) == policies


@pytest.mark.parametrize("text", ["all", "every 2", "input every 0", "input every two", "input every 2 layers", ""])
def test_no_policy(text):
    assert not is_policy(text)
    with pytest.raises(InvalidArgumentError, match=r"recipes.combine\(recompute=...\).* every 2"):
        recipes.combine(recompute=text)


def test_every_second_layer_is_between_none_and_all():
    case = transformer()
    state = jax.jit(case.create)(jax.random.key(0))
    plans = {}
    for text in ("nothing", "input every 2", "input"):
        step = autopar.parallelize(
            case.step,
            plan=recipes.combine(dp=4, num_microbatches=2, recompute=text),
            cluster=autopar.Cluster.local(4),
            cache_dir=None,
            show_progress=False,
        )
        plans[text] = step.plan(case.shapes, case.batch).record
        if text == "input every 2":
            got = step(jax.tree.map(np.array, state), case.batch)
    assert_close(got, jax.jit(case.step)(state, case.batch))
    recomputed = plans["input every 2"].pipeline.recomputed
    assert {"nothing", "input"} == set(recomputed)
    assert recomputed == policies_of("input every 2", len(recomputed))
    times = [plan.predicted.compute_time_s for plan in plans.values()]
    assert times == sorted(times)
    assert len(set(times)) == 3
