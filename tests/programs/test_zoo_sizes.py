"""The sizes that benchmarks give the zoo's models, held against the numbers of parameters that their names promise."""

import math

import jax
import pytest

from benchmarks.auto_vs_manual.models import models
from benchmarks.zoo import CASES

NAMED = [model for model in models().values() if model.parameters is not None]


@pytest.mark.cases(2)
@pytest.mark.parametrize("model", NAMED, ids=lambda model: model.name)
def test_a_model_has_as_many_parameters_as_its_name_says(model):
    state = jax.eval_shape(model.build().init, jax.random.key(0))
    counted = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state.params))
    assert counted == pytest.approx(model.parameters, rel=0.1)


def test_one_in_two_layers_of_gshard_has_experts():
    case = CASES["gshard_moe"](layers=4)
    layers = jax.eval_shape(case.init, jax.random.key(0)).params["layers"]
    assert ["router" in layer for layer in layers] == [False, True, False, True]


@pytest.mark.slow
def test_long_sequences_are_attended_to_in_blocks_alike():
    whole, blocks = CASES["llama"](block=16), CASES["llama"](block=4)
    state = jax.jit(whole.init)(jax.random.key(0))
    loss = lambda case: case.step(state, case.batch(0))[1]["loss"]
    assert loss(blocks) == pytest.approx(float(loss(whole)), rel=1e-5)
