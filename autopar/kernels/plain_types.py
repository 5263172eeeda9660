"""Parameters of an equation without the mesh of the island in which it was traced.

Inside of `jax.shard_map` the type of every value names the mesh. An equation that is bound again under the mesh of a
plan must not bring such types: those of a Pallas call are its `out_avals`, and in the jaxprs of its kernel and of its
index maps.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from autopar.common import jax_compat, jax_local


def without_island_mesh(value: Any) -> Any:
    """A parameter without meshes in its types; the same object where none names one."""
    if isinstance(value, jax_compat.ShapedArray):
        return _type(value)
    if jax_compat.is_jaxpr(value):
        return _jaxpr(value)
    if isinstance(value, (tuple, list)):
        members = [without_island_mesh(v) for v in value]
        if all(a is b for a, b in zip(members, value, strict=True)):
            return value
        return type(value)(*members) if hasattr(value, "_fields") else type(value)(members)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        found = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        changed = {name: without_island_mesh(v) for name, v in found.items()}
        changed = {name: v for name, v in changed.items() if v is not found[name]}
        return dataclasses.replace(value, **changed) if changed else value
    return value


def _type(aval: Any) -> Any:
    inner = getattr(aval, "inner_aval", None)  # of a reference, in the body of a kernel
    if inner is not None:
        plain = _type(inner)
        return aval if plain is inner else aval.update(inner_aval=plain)
    if not isinstance(aval, jax_compat.ShapedArray) or aval.sharding.mesh.empty:
        return aval
    return jax_compat.ShapedArray(aval.shape, aval.dtype, aval.weak_type, memory_space=aval.memory_space)


def _jaxpr(closed: Any) -> Any:
    inner = jax_compat.open_jaxpr(closed)
    renamed: dict[Any, Any] = {}

    def plain(var: Any) -> Any:
        aval = _type(var.aval)
        return var if aval is var.aval else renamed.setdefault(var, type(var)(aval))

    def read(atom: Any) -> Any:
        if isinstance(atom, jax_compat.Literal):
            aval = _type(atom.aval)  # its number may have a type of its own
            return atom if aval is atom.aval else type(atom)(np.asarray(atom.val, aval.dtype), aval)
        return renamed.get(atom, atom)

    constvars, invars = [plain(v) for v in inner.constvars], [plain(v) for v in inner.invars]
    eqns, is_changed = [], bool(renamed)
    for traced in inner.eqns:
        eqn = jax_local.without_context_mesh(traced)
        ins, params = [read(a) for a in eqn.invars], {k: without_island_mesh(v) for k, v in eqn.params.items()}
        outs = [plain(v) for v in eqn.outvars]
        same = all(a is b for a, b in zip((*ins, *outs), (*eqn.invars, *eqn.outvars), strict=True))
        same = same and all(params[k] is v for k, v in eqn.params.items())
        is_changed = is_changed or not same or eqn is not traced
        eqns.append(eqn if same else eqn.replace(invars=ins, outvars=outs, params=params))
    outvars = [read(a) for a in inner.outvars]
    if not is_changed and all(a is b for a, b in zip(outvars, inner.outvars, strict=True)):
        return closed
    cleaned = inner.replace(constvars=constvars, invars=invars, eqns=eqns, outvars=outvars)
    is_open = inner is closed and not jax_compat.jaxpr_consts(closed)
    return cleaned if is_open else jax_compat.closed_like(closed, cleaned)
