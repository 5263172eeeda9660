"""Traced steps: paths, tied state, constants, fingerprints, refusals."""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import autopar
from autopar.errors import InvalidArgumentError, UnsupportedError
from autopar.frontend.tracing import abstract, impurity, trace


class State(NamedTuple):
    step: jax.Array
    params: dict


STATE = State(step=jnp.zeros((), jnp.int32), params={"b": jnp.zeros(2), "w": jnp.zeros((4, 2))})
BATCH = {"x": jnp.zeros((8, 4))}


def traced(function, *args, names=("state", "batch"), donate=(0,), batch=(1,)):
    return trace(function, args, names=names[: len(args)], donate=donate, batch=batch)


def update(state, batch):
    loss = jnp.sum(batch["x"] @ state.params["w"] + state.params["b"])
    return State(step=state.step + 1, params=jax.tree.map(lambda p: p - loss, state.params)), {"loss": loss}


def test_leaves_have_readable_paths_and_know_their_argument():
    step = traced(update, STATE, BATCH)
    assert step.name == "update"
    assert step.in_paths == ("state.step", "state.params['b']", "state.params['w']", "batch['x']")
    assert step.out_paths == (
        "result[0].step", "result[0].params['b']", "result[0].params['w']", "result[1]['loss']",
    )  # fmt: skip
    assert step.argument_of == (0, 0, 0, 1)
    assert step.donated == {0, 1, 2}
    assert step.batch == {3}


def test_a_boxed_array_has_the_path_of_its_box():
    state = nnx.State({"w": nnx.Param(jnp.ones(2))}), nn.Partitioned(jnp.ones(2), ("x",))
    assert traced(lambda s: s, state).in_paths == ("state[0]['w']", "state[1]")


def test_the_new_state_is_tied_to_the_old_one():
    assert traced(update, STATE, BATCH).tied == {0: 0, 1: 1, 2: 2}


def test_a_state_returned_second_is_found():
    step = traced(lambda state, batch: update(state, batch)[::-1], STATE, BATCH)
    assert step.tied == {0: 1, 1: 2, 2: 3}


def test_a_state_that_is_the_only_result_is_found():
    assert traced(lambda state, batch: update(state, batch)[0], STATE, BATCH).tied == {0: 0, 1: 1, 2: 2}


def test_a_state_of_other_shapes_is_not_tied():
    def step(state, batch):
        return state._replace(params=jax.tree.map(lambda p: p[:1], state.params))

    assert traced(step, STATE, BATCH).tied == {}


def test_what_is_not_donated_is_not_tied():
    assert traced(update, STATE, BATCH, donate=()).tied == {}


def test_two_donated_arguments_take_different_results():
    step = traced(lambda a, b: (b + 1.0, a + 1.0), jnp.zeros(3), jnp.zeros(3), donate=(0, 1), batch=())
    assert step.tied == {0: 0, 1: 1}


def test_arrays_that_are_closed_over_are_constants():
    table = jnp.arange(3.0)
    (constant,) = traced(lambda x: x + table, jnp.zeros(3), donate=(), batch=()).constants
    assert constant.tolist() == [0.0, 1.0, 2.0]


def test_the_fingerprint_is_the_same_for_the_same_computation_only():
    def fingerprint(function, *args):
        return traced(function, *args, donate=(), batch=()).fingerprint

    x = jnp.zeros(3)
    first = fingerprint(lambda x: jnp.sin(x) * 2.0, x)
    assert fingerprint(lambda y: jnp.sin(y) * 2.0, x) == first
    others = {
        "literal": fingerprint(lambda x: jnp.sin(x) * 3.0, x),
        "shape": fingerprint(lambda x: jnp.sin(x) * 2.0, jnp.zeros(4)),
        "primitive": fingerprint(lambda x: jnp.cos(x) * 2.0, x),
        "dtype": fingerprint(lambda x: jnp.sin(x) * 2.0, x.astype(jnp.bfloat16)),
    }
    assert len({first, *others.values()}) == 1 + len(others)


def test_the_fingerprint_holds_constants_and_inner_functions():
    def with_constant(values):
        constant = jnp.array(values)
        return traced(lambda x: x + constant, jnp.zeros(3), donate=(), batch=()).fingerprint

    def with_body(body):
        def loop(x):
            return jax.lax.scan(lambda c, _: (body(c), None), x, None, length=2)[0]

        return traced(loop, jnp.zeros(3), donate=(), batch=()).fingerprint

    assert with_constant([1.0, 2.0, 3.0]) == with_constant([1.0, 2.0, 3.0]) != with_constant([1.0, 2.0, 4.0])
    assert with_body(jnp.sin) == with_body(jnp.sin) != with_body(jnp.cos)


def test_a_function_that_changes_between_traces_is_refused():
    counter = itertools.count()
    assert impurity(traced(lambda x: x * 2, jnp.zeros(3), donate=(), batch=())) is None
    found = impurity(traced(lambda x: x * next(counter), jnp.zeros(3), donate=(), batch=()))
    assert "two traces of the function differ (mul at" in found
    assert "frontend/test_tracing.py" in found


def test_side_effects_are_refused():
    seen = jax.new_ref(jnp.zeros(()))

    def step(x):
        seen[...] = x.sum()
        return x

    with pytest.raises(UnsupportedError, match="side effects"):
        traced(step, jnp.zeros(3), donate=(), batch=())


def test_a_leaf_that_is_no_array_is_refused_by_its_path():
    with pytest.raises(InvalidArgumentError, match=r"state\['names'\]"):
        traced(lambda state: state["x"], {"names": {"text"}, "x": jnp.zeros(3)}, donate=(), batch=())


def test_abstract_values_of_leaves():
    def aval(leaf):
        found = abstract(leaf, "x")
        return found.shape, str(found.dtype), found.weak_type

    assert aval(np.zeros((2, 3), np.float64)) == ((2, 3), "float32", False)  # as jax would take it
    assert aval(2.0) == ((), "float32", True)
    assert aval(3) == ((), "int32", True)
    assert aval(True)[:2] == ((), "bool")
    assert aval(jax.ShapeDtypeStruct((4,), jnp.bfloat16)) == ((4,), "bfloat16", False)


class Trainer:
    def method(self, state, batch):
        return branching(state, batch)

    @autopar.parallelize
    def decorated(self, state, batch):
        return branching(state, batch)

    def __call__(self, state, batch):
        return branching(state, batch)


def branching(state, batch):
    return state, jnp.ones(3) if batch["x"].sum() > 0 else jnp.zeros(3)


def with_settings(settings, state, batch):
    return branching(state, batch)


@pytest.mark.parametrize("form", ["branching", "method", "decorated", "__call__", "with_settings"])
def test_errors_of_tracers_name_the_users_function_and_arguments(form):
    trainer = Trainer()
    step = {
        "branching": branching,
        "method": trainer.method,
        "__call__": trainer,
        "with_settings": functools.partial(with_settings, 3),
    }.get(form)
    step = trainer.decorated if step is None else autopar.parallelize(step, cache_dir=None)
    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        step.plan({"w": jnp.ones(3)}, {"x": jnp.ones((8, 3)), "y": jnp.ones(8)})
    assert f"tracing the function {form} at {__file__}" in str(caught.value)
    assert "the argument batch['x']" in str(caught.value)
