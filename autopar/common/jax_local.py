"""JAX API for code on one device's part that is private or differs between versions, under stable names."""

from __future__ import annotations

import functools
from collections.abc import Callable
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


def without_context_mesh(eqn: Any) -> Any:
    """An equation in the context in which it was traced, but for the mesh that was set."""
    if eqn.ctx.cur_abstract_mesh.empty:
        return eqn
    with eqn.ctx.manager, jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        return eqn.replace(ctx=type(eqn.ctx)())
