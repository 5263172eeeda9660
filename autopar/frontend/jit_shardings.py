"""The shardings and donations that a step's own `jax.jit` names, and those of the arrays that a function returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding

from autopar.common import jax_compat
from autopar.errors import UnsupportedError

_CALLS = ("jit", "pjit")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JitShardings:
    """What `jax.jit` says of a step, by leaf: shardings of arguments and results (None: nothing), donated arguments.
    `is_jit`: the step is one call of `jax.jit`. `out_tree`: the shapes of its results.
    """

    arguments: tuple[Any, ...]
    results: tuple[Any, ...]
    donated: tuple[bool, ...]
    out_tree: Any
    is_jit: bool


def jit_shardings_of(function: Callable[..., Any], args: Sequence[Any]) -> JitShardings:
    """Traces a step; of arguments without shardings in its `jax.jit` the arrays' and shapes' own count.

    Raises: UnsupportedError for shardings without names of axes.
    """
    own = [named_sharding(getattr(leaf, "sharding", None)) for leaf in jax.tree.leaves(tuple(args))]
    closed, out_tree = jax.make_jaxpr(function, return_shape=True)(*jax.tree.map(_shape, tuple(args)))
    jaxpr = jax_compat.open_jaxpr(closed)
    call = jaxpr.eqns[0] if len(jaxpr.eqns) == 1 and jaxpr.eqns[0].primitive.name in _CALLS else None
    if call is None or not all(v in call.outvars for v in jaxpr.outvars if not isinstance(v, jax_compat.Literal)):
        nothing = (None,) * len(jaxpr.outvars)
        donated = (False,) * len(own)
        return JitShardings(arguments=tuple(own), results=nothing, donated=donated, out_tree=out_tree, is_jit=False)
    names = ("in_shardings", "donated_invars")
    given = dict(zip(map(id, call.invars), zip(*(call.params[name] for name in names), strict=True), strict=True))
    made = dict(zip(map(id, call.outvars), call.params["out_shardings"], strict=True))
    rows = [given.get(id(v), (None, False)) for v in jaxpr.invars]
    return JitShardings(
        arguments=tuple(named_sharding(s) or of_array for (s, _), of_array in zip(rows, own, strict=True)),
        results=tuple(named_sharding(made.get(id(v))) for v in jaxpr.outvars),
        donated=tuple(is_donated for _, is_donated in rows),
        out_tree=out_tree,
        is_jit=True,
    )


def shardings_of_results(closed: Any) -> list[Any]:
    """Of each result of a traced function the sharding that `jax.jit(out_shardings=...)`, `jax.device_put` or
    `with_sharding_constraint` gives to it; None where none does.
    """
    known: dict[int, Any] = {}
    jaxpr = jax_compat.open_jaxpr(closed)
    for eqn in jaxpr.eqns:
        name, params = eqn.primitive.name, eqn.params
        if name in _CALLS:
            inner = shardings_of_results(params["jaxpr"])
            found = [named_sharding(s) or of for s, of in zip(params["out_shardings"], inner, strict=True)]
        elif name == "device_put":
            found = [named_sharding(device) for device in params["devices"]]
        elif name == "sharding_constraint":
            found = [named_sharding(params["sharding"])]
        else:
            continue
        known |= {id(v): s for v, s in zip(eqn.outvars, found, strict=True) if s is not None}
    return [known.get(id(v)) for v in jaxpr.outvars]


def _shape(leaf: Any) -> Any:
    """A leaf without its sharding, which is in its type where axes of a mesh are explicit."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) else leaf


def named_sharding(sharding: Any) -> NamedSharding | None:
    """A sharding over a mesh with names; None for none, and for a whole array on one device.

    Raises: UnsupportedError for another kind of sharding.
    """
    if isinstance(sharding, NamedSharding):
        return sharding if sharding.mesh.shape else None
    if not isinstance(sharding, Sharding) or isinstance(sharding, SingleDeviceSharding):
        return None
    raise UnsupportedError(
        where="a sharding of the step's arguments or results",
        expected="a jax.sharding.NamedSharding, over a mesh whose axes have names",
        got=f"{type(sharding).__name__} ({sharding!r:.60})",
        hint="write it as NamedSharding(mesh, P(...))",
    )
