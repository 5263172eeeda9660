"""JAX API for code on one device's part that is private or differs between versions, under stable names."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax._src import custom_partitioning_sharding_rule as sharding_rules
from jax.extend import core as jax_core
from jax.interpreters import batching, mlir


def primitive(name: str, function: Callable[..., Any], batched: Callable[..., Any] | None = None) -> Any:
    """A new primitive with several results that does what a function of arrays and static parameters does.

    `batched` of arrays, their dimensions under `jax.vmap` and the parameters gives (results, their dimensions).
    """
    new_primitive = jax_core.Primitive(name)
    new_primitive.multiple_results = True

    def shapes(*avals: Any, **params: Any) -> list[Any]:
        args = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
        out = jax.eval_shape(functools.partial(function, **params), *args)
        return [jax.core.ShapedArray(a.shape, a.dtype) for a in out]

    new_primitive.def_abstract_eval(shapes)
    new_primitive.def_impl(function)
    mlir.register_lowering(new_primitive, mlir.lower_fun(function, multiple_results=True))
    if batched is not None:
        batching.primitive_batchers[new_primitive] = batched
    return new_primitive


def sharding_rule_of(eqn: Any) -> Any | None:
    """The sharding rule of an equation of `custom_partitioning`, in Shardy's terms; None where it has none.

    Raises: what the user's function for the rule raises.
    """
    rule, sizes = eqn.params["sharding_rule"], {}
    if callable(rule):
        types = [[jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in of] for of in (eqn.invars, eqn.outvars)]
        rule = rule(*eqn.params["static_args"], jax.sharding.AbstractMesh((), ()), *types)
        if isinstance(rule, (list, tuple)) and len(rule) == 2:
            rule, sizes = rule
    return sharding_rules.str_to_sdy_sharding_rule(rule, **sizes) if isinstance(rule, str) else rule


def closed(jaxpr: Any, consts: Sequence[Any]) -> Any:
    """An open jaxpr with its constants."""
    return jax_core.ClosedJaxpr(jaxpr, list(consts))


# Equations of kernels

MEGABLOX_FILE = "jax/experimental/pallas/ops/tpu/megablox/gmm.py"


def megablox() -> Any:
    """The module of jax that has `gmm` and `tgmm`."""
    return importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")


def with_primitive(eqn: Any, new_primitive: Any, **params: Any) -> Any:
    """An equation of the same variables, at the same line, with another primitive."""
    return eqn.replace(primitive=new_primitive, params=params, effects=jax_core.no_effects)


def transposed_first(eqn: Any) -> tuple[Any, Any] | None:
    """The transpose and the reshape of a reshape that takes the dimensions in another order, as the gradient of a
    product along an axis does; None of any other equation.
    """
    if eqn.primitive.name != "reshape" or eqn.params["dimensions"] is None:
        return None
    (operand,), order = eqn.invars, tuple(map(int, eqn.params["dimensions"]))
    between = jax_core.Var(operand.aval.update(shape=tuple(operand.aval.shape[d] for d in order)))
    transpose = eqn.replace(primitive=jax.lax.transpose_p, params={"permutation": order}, outvars=[between])
    return transpose, eqn.replace(invars=[between], params={**eqn.params, "dimensions": None})


def function_of(jaxpr: Any) -> tuple[str, str]:
    """(name, file) of the function that a jaxpr was traced from; empty texts where they are not known."""
    information = getattr(getattr(jaxpr, "debug_info", None), "func_src_info", None) or ""
    name, _, place = str(information).partition(" at ")
    return name, place.rpartition(":")[0]


def block_rows(size: Any) -> int | None:
    """The rows of one block of a Pallas call along a dimension; None where blocks may overlap or differ in size."""
    kind = type(size).__name__
    if size is None or kind == "Squeezed":
        return 1
    if isinstance(size, int):
        return size
    return int(size.block_size) if kind == "Blocked" else None


def smaller_call(eqn: Any, times: Mapping[int, int], shapes: Sequence[Sequence[int]]) -> Any:
    """A Pallas call whose grid dimensions are some times shorter, on operands and results of these shapes."""
    params = dict(eqn.params)
    mapping = params["grid_mapping"]
    blocks = shapes[len(eqn.invars) - mapping.num_inputs :]
    params["grid_mapping"] = mapping.replace(
        grid=tuple(n // times.get(g, 1) if g in times else n for g, n in enumerate(mapping.grid)),
        block_mappings=tuple(
            block.replace(array_aval=block.array_aval.update(shape=tuple(shape)))
            for block, shape in zip(mapping.block_mappings, blocks, strict=True)
        ),
    )
    made = zip(params["out_avals"], shapes[len(eqn.invars) :], strict=True)
    params["out_avals"] = tuple(aval.update(shape=tuple(shape)) for aval, shape in made)
    estimate, parts = params.get("cost_estimate"), math.prod(times.values())
    if estimate is not None:
        fields = {f.name: getattr(estimate, f.name) // parts for f in dataclasses.fields(estimate)}
        params["cost_estimate"] = type(estimate)(**fields)
    return eqn.replace(params=params)


def foreign_call_of(eqn: Any, shapes: Sequence[Sequence[int]]) -> Any:
    """A call of a foreign function (`jax.ffi`) with results of other sizes."""
    avals = eqn.params["result_avals"]
    made = tuple(aval.update(shape=tuple(shape)) for aval, shape in zip(avals, shapes, strict=True))
    return eqn.replace(params={**eqn.params, "result_avals": made})


def without_context_mesh(eqn: Any) -> Any:
    """An equation in the context in which it was traced, but for the mesh that was set."""
    if eqn.ctx.cur_abstract_mesh.empty:
        return eqn
    with eqn.ctx.manager, jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        return eqn.replace(ctx=type(eqn.ctx)())
