"""The collectives that an island's body makes over the mesh axes that stand for its axes, as they are written."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from autopar.common import jax_compat
from autopar.hardware.collective_cost import CollectiveKind
from autopar.ir.graph import Op
from autopar.ir.mesh import LogicalMesh
from autopar.kernels.islands import collective_axes, is_island, island_of, mesh_axes
from autopar.sharding.strategies import Strategy

_KINDS = {
    "psum": CollectiveKind.ALL_REDUCE, "psum_invariant": CollectiveKind.ALL_REDUCE, "pmax": CollectiveKind.ALL_REDUCE,
    "pmin": CollectiveKind.ALL_REDUCE, "all_gather": CollectiveKind.ALL_GATHER,
    "all_gather_invariant": CollectiveKind.ALL_GATHER, "reduce_scatter": CollectiveKind.REDUCE_SCATTER,
    "all_to_all": CollectiveKind.ALL_TO_ALL, "ppermute": CollectiveKind.COLLECTIVE_PERMUTE,
    "ragged_all_to_all": CollectiveKind.RAGGED_ALL_TO_ALL,
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class IslandCollective:
    """`count` runs of a collective in one run of an island, with `result_bytes` of `dtype` on each device."""

    kind: CollectiveKind
    axes: tuple[int, ...]
    result_bytes: float
    dtype: str
    count: float


def island_collectives(op: Op, strategy: Strategy, mesh: LogicalMesh) -> tuple[IslandCollective, ...]:
    """Those of an operation under a strategy; none of other operations. Parts that one device runs beside the others of
    theirs are sent together.
    """
    if not is_island(op.eqn):
        return ()
    island = island_of(op.eqn)
    mapped = mesh_axes(island, (*strategy.operands, *strategy.results), mesh)
    assert mapped is not None, "the strategy was admitted"
    beside = island.shards / math.prod(island.sizes[name] for name in mapped)
    found = []
    for eqn, count in _sending(jax_compat.open_jaxpr(op.eqn.params["jaxpr"]), 1.0):
        axes = tuple(sorted(a for name in collective_axes(eqn) for a in mapped.get(name, ())))
        for v in eqn.outvars if axes else ():
            nbytes = float(v.aval.size * jax_compat.itemsize(v.aval)) * beside
            found.append(
                IslandCollective(
                    kind=_KINDS[eqn.primitive.name], axes=axes, result_bytes=nbytes, dtype=str(v.aval.dtype),
                    count=count,
                )
            )  # fmt: skip
    return tuple(found)


def _sending(jaxpr: Any, count: float) -> Iterator[tuple[Any, float]]:
    """(equation, how often it runs) of each collective of a body. Trips of a while loop are not known: they count once.
    Of a branch, all alternatives count.
    """
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _KINDS:
            yield eqn, count
        times = float(eqn.params["length"]) if eqn.primitive.name == "scan" else 1.0
        for inner in jax_compat.jaxprs_in(eqn):
            yield from _sending(inner, count * times)
