"""What another process reads of equations."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive

import autopar
from autopar.attention import ring
from autopar.common.jax_pickle import Absent, OnlyElsewhereError, dumps
from autopar.frontend.build_graph import build_graph
from autopar.frontend.tracing import trace
from autopar.ir.graph import OpKind, walk
from autopar.sharding.rules import RuleBook
from tests.small_steps import chain_step


def read_back(value):
    return pickle.loads(dumps(value))


def graph_of(step, *arguments):
    return build_graph(trace(step, arguments, names=("params", "batch"), donate=(0,), batch=(1,)), RuleBook())


def types(variable):
    """What an array is of; from jax 0.12 on, types of equal arrays are one object in each process."""
    return [getattr(variable.aval, name) for name in ("shape", "dtype", "weak_type", "sharding", "memory_space")]


def test_a_graph_comes_back_as_it_was():
    def step(params, batch):
        def body(carry, w):
            return jax.nn.relu(carry @ w), ()  # a custom_jvp, with a function

        hidden, _ = jax.lax.scan(body, batch["x"], params)
        return hidden.sum(), jax.lax.cond(hidden.sum() > 0, lambda p: p, lambda p: -p, params)

    graph = graph_of(step, jnp.ones((3, 4, 4)), {"x": jnp.ones((8, 4))})
    again = read_back(graph)
    assert again.values == graph.values
    assert again.donated == graph.donated
    assert again.tied == graph.tied
    assert {op.kind for op in graph.ops()} >= {OpKind.SCAN, OpKind.COND}
    for read, op in zip(walk(again.block), walk(graph.block), strict=True):
        assert (read.id, read.kind, read.key, read.rule, read.outputs) == (op.id, op.kind, op.key, op.rule, op.outputs)
        assert read.eqn.primitive is op.eqn.primitive
        assert [types(v) for v in read.eqn.invars] == [types(v) for v in op.eqn.invars]
        assert set(read.eqn.params) == set(op.eqn.params)


def test_what_nobody_runs_elsewhere_is_left_out():
    equation = jax.make_jaxpr(jax.nn.relu)(1.0).eqns[0]
    assert equation.source_info.traceback is not None
    read = read_back(equation)
    assert read.source_info.traceback is None

    function = read_back(lambda x: x)
    assert isinstance(function, Absent)
    with pytest.raises(OnlyElsewhereError, match="only in the process in which the step was traced"):
        function(1)
    assert read_back(np.add) is np.add
    assert read_back(jax.tree.map) is jax.tree.map


class OfTheUsers:
    """A class whose module another process would have to run."""


def test_objects_of_the_users_classes_are_refused():
    equation = jax.make_jaxpr(jnp.sin)(1.0).eqns[0]
    equation = equation.replace(params={"policy": lambda *_, **__: True})
    assert isinstance(read_back(equation).params["policy"], Absent)
    for value in (OfTheUsers(), OfTheUsers, equation.replace(params={**equation.params, "policy": OfTheUsers()})):
        with pytest.raises(pickle.PicklingError, match=r"test_jax_pickle\.OfTheUsers is the user's"):
            dumps(value)


def test_kernels_with_functions_are_refused():
    kernel = autopar.kernel(lambda x: x + 1, rule="b [d] -> b [d]", like=lambda x: x + 1)
    graph = graph_of(
        lambda params, batch: (kernel(batch["x"]) @ params, params), jnp.ones((4, 4)), {"x": jnp.ones((8, 4))}
    )
    with pytest.raises(pickle.PicklingError, match="is only in the process in which it was made"):
        dumps(graph)


def test_arrays_on_devices_keep_their_shapes_and_numbers_their_values():
    shape, number = read_back((jnp.ones((3, 2), jnp.bfloat16), jnp.float32(1.5)))
    assert (shape.shape, shape.dtype) == ((3, 2), jnp.bfloat16)
    assert isinstance(number, np.ndarray)
    assert number == np.float32(1.5)


def test_a_primitive_is_the_same_one_and_an_unknown_one_has_its_name():
    assert read_back(jax.lax.sin_p) is jax.lax.sin_p
    ours = next(v for v in vars(ring).values() if isinstance(v, Primitive))
    assert read_back(ours) is ours
    unknown = read_back(Primitive("of_the_users"))
    assert unknown.name == "of_the_users"


def test_a_step_of_layers_is_read_back_in_half_a_megabyte():
    matrix, rows = jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((16, 64), jnp.float32)
    graph = graph_of(chain_step, [matrix] * 20, {"x": rows, "y": rows})
    assert len(dumps(graph)) < 1000 * len(graph.block.ops)
