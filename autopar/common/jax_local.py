"""JAX API for code on one device's part that is private or differs between versions, under stable names."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
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
