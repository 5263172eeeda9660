"""Removes from a jaxpr the shardings and devices that the step's code names: the plan determines them.

`with_sharding_constraint`, `reshard`, `device_put` and the like change the placement of a value, not the value. XLA
would follow them besides the plan's layouts, with communication that no plan predicts, and a stage on some of the
devices could not be compiled with shardings over all of them. Each is replaced by its operand, also in the bodies of
loops, branches and calls; variables and parameters lose the meshes with which they were traced.

Moves to the memory of the host, which offload policies of `jax.checkpoint` write, stay as names of values
(`jax_compat.in_host_memory`): the plan keeps them there (`autopar.lowering.host_copies`).

Conversions between a weak type and the same strong type are removed too, without a note: they do not change values. A
step traced with numbers or weakly typed arrays then differs from the step traced with strongly typed arrays only in the
weak types themselves, and one plan holds for both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec, Sharding

from autopar.common import jax_compat
from autopar.common.jax_compat import with_body, with_jaxprs
from autopar.ir.jax_sharding import dims_of
from autopar.ir.traced_step import RESHARD, TYPES, Placement, ShardingsInCode, TracedStep, WrittenLayout
from autopar.ops.kernels import islands

# Equations whose results are their operands, one by one, in another place. What the user's code calls them.
_PLACING = {
    "sharding_constraint": "with_sharding_constraint",
    "layout_constraint": "with_layout_constraint",
    "reshard": RESHARD,
    "mesh_cast": "auto_axes or explicit_axes",
    "device_put": "device_put",
}

# The parameter of these that says how the value lies.
_LAYING = {"sharding_constraint": "sharding", "reshard": "dst_sharding"}


@dataclasses.dataclass(frozen=True, slots=True)
class Removed:
    """What was removed: by line of code, and the layouts, by the variables of the cleaned jaxpr."""

    placements: tuple[Placement, ...]
    written: tuple[tuple[Any, WrittenLayout], ...]


def without_placements(closed: Any, known: Sequence[tuple[Any | None, Placement]] = ()) -> tuple[Any, Removed]:
    """(a closed jaxpr without shardings and devices of its equations, the removed ones).

    `known` are the shardings of its arguments and results, where there are any, and who says so.
    """
    remover = _PlacementRemover()
    cleaned = remover.jaxpr(closed)
    of_code, remover.written = remover.written, []  # those come first: from these layouts a value is resharded
    inner = jax_compat.open_jaxpr(cleaned)
    for atom, (sharding, place) in zip((*inner.invars, *inner.outvars), known, strict=False):
        if sharding is not None and any(sharding.spec):
            remover.write(atom, sharding, place)
    return cleaned, Removed(tuple(remover.placements), (*remover.written, *of_code))


def placement_note(traced: TracedStep, constraints: ShardingsInCode) -> str:
    """The note for the user on removed placements, by what is done with them."""
    written = dict.fromkeys(w.place for w in traced.layouts_in_code)
    moved = ""
    if constraints is not ShardingsInCode.PINS and any(place.name == TYPES for place in written):
        moved = (
            f". Arrays move between the plan's layouts and those of {TYPES} at each call, which no time and no memory "
            "includes"
        )
    if constraints is ShardingsInCode.IGNORE or not written:
        return _dropped(tuple(dict.fromkeys((*traced.placements, *written)))) + moved
    what = _told(tuple(written))
    if constraints is ShardingsInCode.PINS:
        text = f"{what} are pins: the values lie as they say"
    else:
        text = (
            f"{what} are advice: the plan decides where values lie; "
            f"Search(constraints='pins') or pins of autopar.constrain have them kept{moved}"
        )
    others = [p for p in traced.placements if p not in written]
    return f"{text}; {_dropped(others)}" if others else text


def _puts_in_host(eqn: Any) -> bool:
    """Whether an equation moves values to the memory of the host, as offload policies of `jax.checkpoint` write it."""
    return eqn.primitive.name == "device_put" and any(_is(device, "Host") for device in eqn.params["devices"])


def _is_of_one_device(sharding: Any) -> bool:
    """Whether a layout is over a mesh of one device, which leaves nothing to say of several."""
    return isinstance(sharding, NamedSharding) and sharding.mesh.size == 1


def _is(device: Any, space: str) -> bool:
    return str(device) == f"MemorySpace.{space}"


def _dropped(placements: Sequence[Placement]) -> str:
    kept = "pin with autopar.constrain to have them kept"
    return f"{_told(placements)} are dropped: the plan decides where values lie; {kept}"


def _told(placements: Sequence[Placement]) -> str:
    names = ", ".join(dict.fromkeys(p.name for p in placements))
    count = f"{len(placements)} places" if len(placements) > 1 else "1 place"
    line = next((p.line for p in placements if p.line), "")
    return f"shardings that the step's code names at {count} ({names}{f'; first at {line}' if line else ''})"


class _PlacementRemover:
    def __init__(self) -> None:
        self.placements: dict[Placement, None] = {}
        self.written: list[tuple[Any, WrittenLayout]] = []
        self._num_eqns = 0

    def jaxpr(self, closed: Any) -> Any:
        """An open or closed jaxpr, rewritten; the same object where there is nothing to remove."""
        inner = jax_compat.open_jaxpr(closed)
        replacement: dict[Any, Any] = {}

        def read(atom: Any) -> Any:
            return atom if isinstance(atom, jax_compat.Literal) else replacement.get(atom, atom)

        def renamed(var: Any) -> Any:
            plain = jax_compat.without_mesh(var)
            if plain is not var:
                replacement[var] = plain
            return plain

        constvars, invars = [renamed(v) for v in inner.constvars], [renamed(v) for v in inner.invars]
        eqns, changed = [], bool(replacement)
        for eqn in inner.eqns:
            self._num_eqns += 1
            ins = [read(a) for a in eqn.invars]
            if _puts_in_host(eqn):
                for operand, device, var in zip(ins, eqn.params["devices"], eqn.outvars, strict=True):
                    if _is(device, "Host") and not isinstance(operand, jax_compat.Literal):
                        eqns.append(jax_compat.in_host_memory(eqn, operand, renamed(var)))
                    else:
                        replacement[var] = operand
                changed = True
                continue
            if self.places(eqn):
                if eqn.primitive.name in _LAYING:
                    name = eqn.primitive.name
                    place = Placement(_PLACING[name], jax_compat.source_line(eqn))
                    self.write(ins[0], eqn.params[_LAYING[name]], place)
                replacement.update(zip(eqn.outvars, ins, strict=True))
                changed = True
                continue
            if (call := islands.of_one_device(eqn)) is not None:
                eqn, changed = call.replace(invars=eqn.invars, outvars=eqn.outvars), True
            # The body of a shard_map is typed by the mesh of its own that it names.
            is_rewritten = eqn.primitive.name != "shard_map"
            params = {name: self.param(name, value) if is_rewritten else value for name, value in eqn.params.items()}
            params_are_same = all(params[name] is value for name, value in eqn.params.items())
            outs = [renamed(v) for v in eqn.outvars]
            if any(getattr(eqn.params.get("out_sharding"), "spec", ())):
                place = Placement("out_sharding", jax_compat.source_line(eqn))
                self.placements.setdefault(place)
                self.write(outs[0], eqn.params["out_sharding"], place)
            changed = changed or bool(replacement) or not params_are_same
            eqns.append(eqn.replace(invars=ins, outvars=outs, params=eqn.params if params_are_same else params))
        if not changed:
            return closed
        outvars = [read(a) for a in inner.outvars]
        return with_body(closed, inner.replace(constvars=constvars, invars=invars, eqns=eqns, outvars=outvars))

    def places(self, eqn: Any) -> bool:
        """Whether an equation names only a placement, or a weak type. Records placements, and calls that name them."""
        name = eqn.primitive.name
        if name == "convert_element_type" and eqn.params["new_dtype"] == eqn.invars[0].aval.dtype:
            return True
        shardings = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
        if any(isinstance(s, Sharding) for s in shardings):
            self.placements.setdefault(Placement("shardings of jax.jit", jax_compat.source_line(eqn)))
        if name not in _PLACING:
            return False
        if name == "device_put" and not any((*eqn.params["devices"], *eqn.params["srcs"])):
            return False  # what jnp.asarray and the like leave behind
        if name == "sharding_constraint" and _is_of_one_device(eqn.params["sharding"]):
            return True
        if name == "device_put" and all(_is(device, "Device") for device in eqn.params["devices"]):
            return True  # back from the memory of the host: read where it is read
        # Where typed and untyped arrays meet, jax reshards by itself, to no axis.
        if name != "reshard" or any(eqn.params["dst_sharding"].spec):
            self.placements.setdefault(Placement(_PLACING[name], jax_compat.source_line(eqn)))
        return True

    def write(self, atom: Any, sharding: Any, place: Placement) -> None:
        """Records the layout that a place of the code gives to a variable."""
        if isinstance(atom, jax_compat.Literal) or not isinstance(sharding, NamedSharding):
            return
        if _is_of_one_device(sharding):
            return
        if place.name != _PLACING["sharding_constraint"] and not any(sharding.spec):
            return  # what jax reshards by itself
        layout = WrittenLayout(
            place=place,
            dims=dims_of(sharding.spec, len(atom.aval.shape)),
            axis_sizes=tuple((str(axis), int(n)) for axis, n in sharding.mesh.shape.items()),
            number=self._num_eqns,
        )
        self.written.append((atom, layout))

    def param(self, name: str, value: Any) -> Any:
        if isinstance(value, (Sharding, PartitionSpec)):
            return None
        if name in ("in_shardings", "out_shardings") and any(isinstance(s, Sharding) for s in value):
            return tuple(jax_compat.UNSPECIFIED_SHARDING if isinstance(s, Sharding) else s for s in value)
        return with_jaxprs(value, self.jaxpr)
