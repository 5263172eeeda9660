"""The name of a recipe is the call that makes it."""

import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar import recipes
from autopar.plan.options import PlanRequest
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


@pytest.mark.parametrize(
    ("recipe", "text"),
    [
        (recipes.zero(3), "zero(3)"),
        (recipes.Recipe(), "Recipe()"),
        (recipes.Recipe(request=PlanRequest(num_stages=2)), "Recipe(num_stages=2)"),
        (autopar.constrain({"w": P(None, "x"), "b": P()}), "constrain({'w': P(None, \"x\"), 'b': P()})"),
        (
            autopar.constrain({"w": P("x")}, axis_sizes={"x": 4}, recipe=recipes.pipeline(2)),
            "constrain({'w': P(\"x\")}, axis_sizes={'x': 4}, recipe=pipeline(2))",
        ),
    ],
)
def test_a_recipe_is_printed_as_the_calls_that_make_it(recipe, text):
    assert repr(recipe) == text


def test_names_decide_nothing():
    assert recipes.zero(0) == recipes.data_parallel()
    assert autopar.constrain({"w": P("x")}, recipe=recipes.zero(1)).request.recipe == "zero(1)"
    assert autopar.constrain({"w": P("x")}).request.recipe == ""


@pytest.mark.parametrize(
    ("text", "recipe"),
    [
        ("ddp", recipes.data_parallel()),
        ("fsdp", recipes.zero(3)),
        ("fsdp(size=4)", recipes.zero(3, size=4)),
        ("zero2", recipes.zero(2)),
        ("tp(size=2)", recipes.tensor_parallel(size=2)),
        ("pp(2, num_microbatches=4)", recipes.pipeline(2, num_microbatches=4)),
        ("cut(fsdp, num_microbatches=2)", recipes.cut(recipes.zero(3), num_microbatches=2)),
    ],
)
def test_the_names_of_other_systems_are_recipes(text, recipe):
    assert recipe_of(text) == recipe
    assert autopar.parallelize(lambda state, batch: state, plan=text)._options.request == (
        autopar.parallelize(lambda state, batch: state, plan=recipe)._options.request
    )


def test_a_text_that_is_no_recipe_is_refused_by_parallelize():
    with pytest.raises(
        autopar.errors.InvalidArgumentError, match=r"(?s)got the unknown name 'deepspeed'.*such as 'fsdp'"
    ):
        autopar.parallelize(lambda state, batch: state, plan="deepspeed()")


def test_a_slip_in_a_name_is_told_by_the_name_that_is_near():
    with pytest.raises(autopar.errors.InvalidArgumentError, match=r"(?s)got the unknown name 'fdsp'.*hint: 'fsdp'\?"):
        recipe_of("fdsp")
