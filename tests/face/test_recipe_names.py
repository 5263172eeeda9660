"""The name of a recipe is the call that makes it."""

import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar import recipes
from autopar.recipes.parse import recipe_of


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        (recipes.data_parallel(), "data_parallel()"),
        (recipes.zero(1), "zero(1)"),
        (recipes.zero(stage=3, size=8), "zero(3, size=8)"),
        (recipes.tensor_parallel(size=8), "tensor_parallel(size=8)"),
        (recipes.tensor_parallel("2.5d", depth=2), "tensor_parallel('2.5d', depth=2)"),
        (recipes.combine(pp=2, tp=4, zero=0), "combine(tp=4, pp=2)"),
        (recipes.pipeline(4, num_microbatches=8), "pipeline(4, num_microbatches=8)"),
        (recipes.cut(recipes.zero(1), stages=2), "cut(zero(1), stages=2)"),
    ],
)
def test_a_name_makes_the_recipe_again(recipe, name):
    assert recipe.request.recipe == name
    assert recipe_of(name) == recipe


def test_names_decide_nothing():
    assert recipes.zero(0) == recipes.data_parallel()
    assert autopar.constrain({"w": P("x")}, recipe=recipes.zero(1)).request.recipe == "zero(1)"
    assert autopar.constrain({"w": P("x")}).request.recipe == ""
