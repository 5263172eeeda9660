"""Collectives inside of one operation: of a pass of attention in a ring, and of an island's body.

In a ring keys and values go round, and positions change places before and after. An island's collectives go over the
mesh axes that stand for its axes, as they are written.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterator
from typing import Any

import jax

from autopar.common import jax_compat
from autopar.hardware.cluster import DeviceKind
from autopar.hardware.collective_cost import CollectiveKind, Fabric
from autopar.ir.graph import Op
from autopar.ir.layout import LogicalMesh, local_bytes
from autopar.ir.primitives import ATTENTION_PASSES
from autopar.ir.resharding import MeshLinks
from autopar.ir.strategies import Strategy
from autopar.ops.attention.work import KEYS_AND_VALUES, exchanged, order_of, travelling
from autopar.ops.kernels.islands import collective_axes, is_island, island_of, mesh_axes
from autopar.ops.kernels.operation import equations_of_first_turn, is_kernel
from autopar.ops.kernels.row_exchange import sent_arrays


class Moment(enum.Enum):
    """When an array is sent: before the first step, beside steps, or after the last one."""

    BEFORE = "before"
    BESIDE = "beside"
    AFTER = "after"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RingPermute:
    """One array's permutes in one run of a pass: `sent_bytes` by a device each time, `time_s` of all `count`."""

    moment: Moment
    array: str
    sent_bytes: float
    count: int
    time_s: float


def ring_permutes(op: Op, strategy: Strategy, device: DeviceKind, links: MeshLinks) -> Iterator[RingPermute]:
    """Those of an operation under a strategy; none where it makes no ring."""
    ring = links.mesh.size(strategy.ring)
    if ring == 1 or op.primitive not in ATTENTION_PASSES:
        return
    order = order_of(op.eqn, ring)
    for number, (i, itemsize) in enumerate(travelling(op.eqn) if order.steps else ()):
        aval = op.eqn.invars[i].aval
        # Sums go round in 32 bits whatever the type of the operand is.
        widening = device.widening(str(aval.dtype)) if itemsize == aval.dtype.itemsize else 1.0
        nbytes = local_bytes(aval.shape, itemsize, strategy.operands[i], links.mesh) * widening
        # Behind the last step sums go all the way home: from the last device of a whole ring to the next one.
        is_sum = number >= KEYS_AND_VALUES
        home = 0 if order.is_whole or not is_sum else sum(steps > 1 for steps in (order.ahead, order.behind))
        time_s = (order.steps - home) * links.time_s(CollectiveKind.COLLECTIVE_PERMUTE, nbytes, strategy.ring)
        yield RingPermute(
            moment=Moment.BESIDE,
            array=f"{aval.dtype}{list(aval.shape)}",
            sent_bytes=nbytes,
            count=order.steps,
            time_s=time_s + (home * far_permute_s(nbytes, strategy.ring, links) if home else 0.0),
        )
    if order.balanced and not links.link(strategy.ring).has_ring_order:
        yield from _exchanges(op, strategy, device, links)


def _exchanges(op: Op, strategy: Strategy, device: DeviceKind, links: MeshLinks) -> Iterator[RingPermute]:
    """Half of each array in each of two permutes; of two devices the first of them moves nothing."""
    places, ring = exchanged(op.eqn), links.mesh.size(strategy.ring)
    arrays = [(Moment.BEFORE, op.eqn.invars[i].aval, strategy.operands[i]) for i in places.operands]
    arrays += [(Moment.AFTER, op.eqn.outvars[i].aval, strategy.results[i]) for i in places.results]
    for moment, aval, layout in arrays:
        half = local_bytes(aval.shape, aval.dtype.itemsize, layout, links.mesh) / 2 * device.widening(str(aval.dtype))
        count = 1 if ring == 2 else 2
        yield RingPermute(
            moment=moment,
            array=f"{aval.dtype}{list(aval.shape)}",
            sent_bytes=half,
            count=count,
            time_s=count * far_permute_s(half, strategy.ring, links),
        )


def far_permute_s(nbytes: float, axes: tuple[int, ...], links: MeshLinks) -> float:
    """A permute between devices that are no neighbours. Its bytes take as long as in an all-to-all, in which as many go
    as far: over more wires of a torus, or over the links between hosts. On a torus so do the hops; elsewhere it is one
    step.
    """
    neighbours_s = links.time_s(CollectiveKind.COLLECTIVE_PERMUTE, nbytes, axes)
    far_s = links.time_s(CollectiveKind.ALL_TO_ALL, nbytes, axes)
    if links.link(axes).fabric is not Fabric.TORUS:
        steps_s = links.time_s(CollectiveKind.ALL_TO_ALL, 0.0, axes)
        far_s = links.time_s(CollectiveKind.COLLECTIVE_PERMUTE, 0.0, axes) + far_s - steps_s
    return max(neighbours_s, far_s)


_KINDS = {
    "psum": CollectiveKind.ALL_REDUCE, "psum_invariant": CollectiveKind.ALL_REDUCE, "pmax": CollectiveKind.ALL_REDUCE,
    "pmin": CollectiveKind.ALL_REDUCE, "all_gather": CollectiveKind.ALL_GATHER,
    "all_gather_invariant": CollectiveKind.ALL_GATHER, "reduce_scatter": CollectiveKind.REDUCE_SCATTER,
    "all_to_all": CollectiveKind.ALL_TO_ALL, "ppermute": CollectiveKind.COLLECTIVE_PERMUTE,
    "ragged_all_to_all": CollectiveKind.RAGGED_ALL_TO_ALL,
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class IslandCollective:
    """`count` runs of a collective in one run of an island, with `result_bytes` of `dtype` on each device; `busiest`
    times as many on the one for which the others wait.
    """

    kind: CollectiveKind
    axes: tuple[int, ...]
    result_bytes: float
    dtype: str
    count: float
    busiest: float = 1.0


def island_collectives(op: Op, strategy: Strategy, mesh: LogicalMesh, platform: str) -> tuple[IslandCollective, ...]:
    """Those of an operation under a strategy, on a platform of JAX; none of other operations. Parts that one device
    runs beside the others of theirs are sent together.
    """
    if is_kernel(op.eqn):
        return exchanges(op, strategy, mesh, platform)
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


def parts_of_operands(op: Op, strategy: Strategy, mesh: LogicalMesh) -> list[jax.ShapeDtypeStruct]:
    """Shapes and types of one device's parts."""
    return [
        jax.ShapeDtypeStruct(at.part(v.aval.shape, mesh), v.aval.dtype)
        for v, at in zip(op.eqn.invars, strategy.operands, strict=True)
    ]


def exchanges(op: Op, strategy: Strategy, mesh: LogicalMesh, platform: str) -> tuple[IslandCollective, ...]:
    """Those by which a kernel sends rows to the devices that share another factor, which get equal numbers of rows
    but for the busiest one.
    """
    function, axes = op.eqn.params["function"], strategy.ring
    if not axes:
        return ()
    avals, found = parts_of_operands(op, strategy, mesh), []
    count = mesh.size(axes)
    program = function.exchanging_program(avals, count, platform)
    busiest, num_turns = function.busiest(count), float(function.num_turns(count))
    sending = (e for e in equations_of_first_turn(jax_compat.open_jaxpr(program)) if e.primitive.name in _KINDS)
    for eqn in sending:
        for aval in sent_arrays(eqn):
            kind = _KINDS[eqn.primitive.name]
            found.append(
                IslandCollective(
                    kind=kind, axes=axes, dtype=str(aval.dtype), count=1.0,
                    result_bytes=_in_rows_of_tiles(aval, eqn.primitive.name, platform),
                    busiest=busiest if kind is CollectiveKind.RAGGED_ALL_TO_ALL else num_turns,
                )
            )  # fmt: skip
    return tuple(found)


# TPUs send rows of whole tiles in a ragged all-to-all (seen in programs that libtpu 0.0.42.1 compiles for v5p).
_ROW_BYTES = 512


def _in_rows_of_tiles(aval: Any, primitive: str, platform: str) -> float:
    nbytes = float(aval.size * jax_compat.itemsize(aval))
    if platform != "tpu" or primitive != "ragged_all_to_all" or not nbytes:
        return nbytes
    row_bytes = nbytes / aval.shape[0]
    return aval.shape[0] * math.ceil(row_bytes / _ROW_BYTES) * _ROW_BYTES


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
