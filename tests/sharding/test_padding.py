"""Which arrays of the state are stored padded, and in which form."""

import jax
import jax.numpy as jnp
import pytest

from autopar import recipes
from autopar.frontend.build_graph import build_graph
from autopar.frontend.tracing import trace
from autopar.ir.padded import PaddedForm
from autopar.sharding.padding import padded_forms
from autopar.sharding.rules import RuleBook
from autopar.sharding.semantics import annotate_semantics


def forms(shape, recipe, num_devices, bias=0):
    """The forms of a momentum of this shape, beside one of a bias."""

    def step(state, batch):
        def loss(params):
            hidden = batch @ params["w"]
            return jnp.mean((hidden + params["b"] if bias else hidden) ** 2)

        gradients = jax.grad(loss)(state["p"])
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["m"], gradients)
        return {"m": momentum, "p": jax.tree.map(lambda p, m: p - 0.1 * m, state["p"], momentum)}

    params = {"w": jax.ShapeDtypeStruct(shape, "float32")}
    params |= {"b": jax.ShapeDtypeStruct((bias,), "float32")} if bias else {}
    args = ({"m": params, "p": params}, jax.ShapeDtypeStruct((96, shape[0]), "float32"))
    traced = trace(step, args, names=("state", "batch"), donate=(0,), batch=(1,))
    graph = annotate_semantics(build_graph(traced, RuleBook()))
    found = padded_forms(graph, recipe.request.binding, num_devices)
    return {traced.in_paths[position]: form for position, form in found.items()}


def test_what_divides_is_stored_as_it_is():
    assert forms((96, 1601), recipes.zero(1), 48) == {}


def test_the_dimension_is_padded_in_which_that_adds_least():
    padded = PaddedForm((50257, 1600), (50304, 1600))
    assert forms((50257, 1600), recipes.zero(1), 48) == {"state['m']['w']": padded}
    assert forms((50257, 1600), recipes.zero(3), 48) == {"state['m']['w']": padded, "state['p']['w']": padded}


def test_where_a_dimension_would_grow_much_the_elements_are_stored_in_a_row():
    assert forms((100, 50), recipes.zero(1), 48) == {"state['m']['w']": PaddedForm((100, 50), (5040,))}


def test_small_arrays_stay_whole():
    assert list(forms((50257, 1600), recipes.zero(1), 48, bias=1600)) == ["state['m']['w']"]
    assert list(forms((100, 50), recipes.zero(1), 48, bias=50)) == ["state['m']['b']", "state['m']['w']"]


@pytest.mark.parametrize(("tensor", "shape"), [(1, (1602, 1600)), (2, (1602, 1600))])
def test_no_padding_goes_into_a_dimension_that_tensor_parallelism_splits(tensor, shape):
    found = forms((1600, 1600), recipes.combine(zero=1, tp=tensor), 6 * tensor)
    assert found["state['m']['w']"].stored_shape == shape


def test_groups_of_hybrid_sharding_divide_what_all_devices_do_not():
    assert forms((1600, 1600), recipes.zero(1, size=16), 48) == {}
    assert forms((1600, 1600), recipes.zero(1), 48) != {}
