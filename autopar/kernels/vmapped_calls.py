"""Pallas calls under `jax.vmap`: one axis of the grid for each dimension that was mapped.

Each step along such an axis is a call of its own, which sees neither the other steps nor its number. So the dimension
of operands and results that the axis goes along may be split over devices, and its elements are independent. Index maps
say which dimension that is: the one whose block number is the axis' own. Operands that were not mapped do not read it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from autopar.common import jax_compat

NAME = "pallas_call"


@dataclasses.dataclass(frozen=True, slots=True)
class MappedAxis:
    """The dimension along which an axis of the grid goes, of each operand and result; None where it was not mapped."""

    axis: int
    size: int
    operands: tuple[int | None, ...]
    results: tuple[int, ...]


def mapped_axes(eqn: Any) -> tuple[MappedAxis, ...]:
    """The axes that `jax.vmap` gave a call and that every result has; none of other equations."""
    if eqn is None or eqn.primitive.name != NAME:
        return ()
    grid = eqn.params["grid_mapping"]
    unblocked = grid.num_dynamic_grid_bounds + grid.num_index_operands
    found = []
    for axis in grid.vmapped_dims:
        dims = [_dims_along(block, axis) for block in grid.block_mappings]
        if any(d is None or len(d) > 1 for d in dims) or unblocked + len(dims) != len(eqn.invars) + len(eqn.outvars):
            continue
        only = [d[0] if d else None for d in dims if d is not None]
        of_results = tuple(d for d in only[grid.num_inputs :] if d is not None)
        if len(of_results) == grid.num_outputs:
            operands = (*(None,) * unblocked, *only[: grid.num_inputs])
            found.append(MappedAxis(axis, int(grid.grid[axis]), operands, of_results))
    return tuple(found)


def _dims_along(block: Any, axis: int) -> tuple[int, ...] | None:
    """The dimensions whose block number is an axis of the grid; None where the axis counts otherwise too."""
    index_map = jax_compat.open_jaxpr(block.index_map_jaxpr)
    number = index_map.invars[axis]
    is_read = any(atom is number for eqn in index_map.eqns for atom in eqn.invars)
    if is_read or len(index_map.outvars) != len(block.array_aval.shape):
        return None
    return tuple(d for d, atom in enumerate(index_map.outvars) if atom is number)


def with_sizes(eqn: Any, axes: Sequence[MappedAxis], sizes: Sequence[int]) -> Any:
    """The call with other sizes of some of its axes: what `jax.vmap` makes of so many elements."""
    if all(axis.size == n for axis, n in zip(axes, sizes, strict=True)):
        return eqn
    grid, outs = eqn.params["grid_mapping"], list(eqn.params["out_avals"])
    blocks, lengths, cost = list(grid.block_mappings), list(grid.grid), eqn.params["cost_estimate"]
    skipped = len(eqn.invars) - grid.num_inputs
    for axis, n in zip(axes, sizes, strict=True):
        lengths[axis.axis] = n
        for i, dim in enumerate((*axis.operands[skipped:], *axis.results)):
            if dim is not None:
                blocks[i] = dataclasses.replace(blocks[i], array_aval=_resized(blocks[i].array_aval, dim, n))
        outs = [_resized(aval, dim, n) for aval, dim in zip(outs, axis.results, strict=True)]
        if cost is not None:
            parts = {f.name: getattr(cost, f.name) for f in dataclasses.fields(cost)}
            cost = type(cost)(**{k: v * n // axis.size if v else v for k, v in parts.items()})
    mapping = grid.replace(grid=tuple(lengths), block_mappings=tuple(blocks))
    changed = {"grid_mapping": mapping, "out_avals": tuple(outs), "cost_estimate": cost}
    return eqn.replace(params={**eqn.params, **changed})


def _resized(aval: Any, dim: int, n: int) -> Any:
    shape = list(aval.shape)
    shape[dim] = n
    return aval.update(shape=tuple(shape))


def on_parts(eqn: Any, parts: Sequence[Any]) -> Any:
    """The call on operands of a part's shapes."""
    axes = mapped_axes(eqn)
    sizes = []
    for axis in axes:
        have = {part.shape[d] for part, d in zip(parts, axis.operands, strict=True) if d is not None}
        sizes.append(have.pop() if len(have) == 1 else axis.size)
    return with_sizes(eqn, axes, sizes)


def as_many(eqn: Any, other: Any, places: Sequence[int | None]) -> Any:
    """A call on parts of the operands of another call, on as many elements as that has in the dimensions `places`."""
    axes = [
        axis
        for axis in mapped_axes(eqn)
        if any(p is not None and p == d for p, d in zip(places, axis.operands, strict=True))
    ]
    if not axes:
        return eqn
    number, place = next((i, p) for i, p in enumerate(places) if p is not None)
    return with_sizes(eqn, axes, [other.invars[number].aval.shape[place] for _ in axes])
