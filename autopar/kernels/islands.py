"""Islands: calls of `jax.shard_map` in a step, each one operation of the plan.

An island is written for a mesh of its own. Each of its axes is a factor, the major part of the dimensions that its
specs split by that axis, and the mesh axes that split the factor are the island's axis: all of it, or none. An axis
that no mesh axes stand for is run on every device, part by part (`run_island`), which computes the same.

Axes that an island leaves to the compiler (`axis_names=`) say nothing of what is computed: it has the others only. An
island inside of an island is a part of its body: every device runs all parts of the inner one.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

from autopar.common import jax_compat
from autopar.errors import UnsupportedError
from autopar.ir.graph import Factor, FactorKind, Op, OpGraph, Rule
from autopar.ir.layout import Layout
from autopar.ir.mesh import LogicalMesh
from autopar.kernels.operation import Shapes

NAME = "shard_map"
# Axes of an island that split each dimension of an array, major first.
Spec = tuple[tuple[str, ...], ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Island:
    """What an equation of `shard_map` says: its axes with their sizes, and which of them split what."""

    axes: tuple[tuple[str, int], ...]
    operands: tuple[Spec, ...]
    results: tuple[Spec, ...]

    @property
    def sizes(self) -> dict[str, int]:
        return dict(self.axes)

    @property
    def shards(self) -> int:
        return math.prod(self.sizes.values())


def is_island(eqn: Any) -> bool:
    return eqn is not None and eqn.primitive.name == NAME


def island_of(eqn: Any) -> Island:
    """Raises: UnsupportedError for an island that is not taken, with the line of its call."""
    mesh, params = eqn.params["mesh"], eqn.params
    sizes = {str(name): int(n) for name, n in mesh.shape.items()}
    manual = params.get("newly_manual_axes", params.get("manual_axes", frozenset(sizes)))
    island = Island(
        axes=tuple((name, n) for name, n in sizes.items() if name in manual),
        operands=_specs(params["in_specs"], eqn.invars),
        results=_specs(params["out_specs"], eqn.outvars),
    )
    named = {name for spec in (*island.operands, *island.results) for names in spec for name in names}
    if around := sorted(named - set(island.sizes)):
        # The types of kept values have the axes of both calls; jax.jit cannot lower such specs either.
        raise UnsupportedError(
            where=f"shard_map at {jax_compat.source_line(eqn)}",
            expected="a shard_map inside of another one whose specs name axes of its own",
            got=f"specs over {', '.join(around)}, an axis of the call around it, which jax.grad writes",
            hint="pass check_vma=False to both calls of jax.shard_map; jax.jit does not run the gradient without it",
        )
    return island


def check_islands_inside(eqn: Any) -> None:
    """Raises: UnsupportedError for an island in an island's body that is not taken."""
    for inner in jax_compat.equations_in(jax_compat.open_jaxpr(eqn.params["jaxpr"])):
        if is_island(inner):
            island_of(inner)


def _specs(specs: Sequence[Any], variables: Sequence[Any]) -> tuple[Spec, ...]:
    def names(entry: Any) -> tuple[str, ...]:
        if entry is None:
            return ()
        return tuple(map(str, entry)) if isinstance(entry, tuple) else (str(entry),)

    out = []
    for spec, v in zip(specs, variables, strict=True):
        dims = [names(entry) for entry in spec]
        out.append(tuple(dims + [()] * (len(v.aval.shape) - len(dims))))
    return tuple(out)


def island_rule(eqn: Any) -> Rule:
    """Axes are factors that may be split; what a device has of a dimension is whole."""
    island = island_of(eqn)
    number: dict[str, int] = {}
    factors: list[Factor] = []

    def factor(name: str) -> int:
        if name not in number:
            number[name] = len(factors)
            factors.append(Factor(island.sizes[name], FactorKind.PASS))
        return number[name]

    def dims(spec: Spec, shape: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        out = []
        for names, n in zip(spec, shape, strict=True):
            split = [name for name in names if island.sizes[name] > 1]
            row = [factor(name) for name in split]
            rest = n // math.prod(island.sizes[name] for name in split)
            if rest > 1:
                factors.append(Factor(rest, FactorKind.FIXED))
                row.append(len(factors) - 1)
            out.append(tuple(row))
        return tuple(out)

    operands = tuple(dims(spec, v.aval.shape) for spec, v in zip(island.operands, eqn.invars, strict=True))
    results = tuple(dims(spec, v.aval.shape) for spec, v in zip(island.results, eqn.outvars, strict=True))
    return Rule(tuple(factors), operands, results)


def mesh_axes(island: Island, layouts: Sequence[Layout], mesh: LogicalMesh) -> dict[str, tuple[int, ...]] | None:
    """The mesh axes that stand for each axis of an island, from the layouts of its operands and results.

    None where they do not: an axis that is split in part, or by mesh axes that are not neighbours in their order.
    """
    found: dict[str, tuple[int, ...]] = {}
    for spec, layout in zip((*island.operands, *island.results), layouts, strict=True):
        for names, on in zip(spec, layout.dims, strict=True):
            rest = list(on)
            for name in names:
                taken: tuple[int, ...] = ()
                while rest and mesh.size(taken) < island.sizes[name]:
                    taken = (*taken, rest.pop(0))
                if found.setdefault(name, taken) != taken:
                    return None
            if rest:
                return None
    for name, axes in found.items():
        wide = [a for a in axes if mesh.axis_sizes[a] > 1]
        if wide and mesh.size(axes) != island.sizes[name]:
            return None
        if any(b != a + 1 for a, b in itertools.pairwise(axes)):
            return None
    return {name: axes for name, axes in found.items() if mesh.size(axes) > 1}


@dataclasses.dataclass(frozen=True, slots=True)
class IslandAdmits:
    """Whether mesh axes stand for an island's axes under a strategy."""

    island: Island

    def __call__(self, operands: Shapes, results: Shapes, layouts: tuple[Layout, ...], mesh: LogicalMesh) -> bool:
        return mesh_axes(self.island, layouts, mesh) is not None


def check_islands(graph: OpGraph, num_devices: int) -> None:
    """Raises: UnsupportedError for an island that so many devices cannot host, with the line of its call."""
    for op in graph.ops():
        if is_island(op.eqn):
            _check_island(op, num_devices)
            check_islands_inside(op.eqn)


def _check_island(op: Op, num_devices: int) -> None:
    island = island_of(op.eqn)
    if num_devices % island.shards == 0:
        return
    sizes = " x ".join(f"{name} {n}" for name, n in island.sizes.items())
    taken = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
    raise UnsupportedError(
        where=f"shard_map at {jax_compat.source_line(op.eqn)}",
        expected=f"a mesh that {num_devices} devices can host: of {', '.join(map(str, taken))} devices",
        got=f"one of {island.shards} devices ({sizes})",
        hint="write its mesh for a divisor of the devices, such as jax.make_mesh((jax.device_count(),), ...)",
    )
