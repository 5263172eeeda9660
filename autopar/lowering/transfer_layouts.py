"""The layouts in which a value crosses from one stage's mesh to another's.

Each byte should cross once. Where the value is replicated over some devices, each of them sends a part, and the
receiving stage gathers the parts (Zhuang et al., "On optimizing the communication of model parallelism", 2022: local
all-gather). Both ends therefore hold the value split as finely as their mesh allows. Where one end has finer pieces
than the other, pieces are cut before they cross, or joined afterwards (`autopar.runtime.execution.cross_mesh`).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable

from autopar.ir.layout import Layout, replicated
from autopar.ir.mesh import LogicalMesh


@functools.cache
def wire_layouts(shape: tuple[int, ...], source: LogicalMesh, target: LogicalMesh) -> tuple[Layout, Layout]:
    """The layouts on both meshes, leading dimensions split first."""
    free = replicated(len(shape))
    return refined(shape, (free, source), (free, target))


def refined(
    shape: tuple[int, ...], source: tuple[Layout, LogicalMesh], target: tuple[Layout, LogicalMesh]
) -> tuple[Layout, Layout]:
    """Two layouts split further over the axes that replicate them, so that little crosses and on many links at once.

    First the target gets as many different pieces as can be (each of its copies is one more crossing), then the source;
    then both the same grid of pieces if that can be, else the one with the least to cut.
    """
    mine, theirs = (_by_grid(shape, *end) for end in (source, target))
    best = max(itertools.product(mine, theirs), key=lambda grids: _rank(*grids))
    return mine[best[0]], theirs[best[1]]


def grid_of(layout: Layout, mesh: LogicalMesh) -> tuple[int, ...]:
    """Into how many pieces each dimension is split."""
    return tuple(mesh.size(axes) for axes in layout.dims)


def common_grid(grid: Iterable[int], other: Iterable[int]) -> tuple[int, ...]:
    """The coarsest grid that cuts no piece of either."""
    return tuple(math.lcm(a, b) for a, b in zip(grid, other, strict=True))


def _by_grid(shape: tuple[int, ...], layout: Layout, mesh: LogicalMesh) -> dict[tuple[int, ...], Layout]:
    """A layout with some of its idle axes behind the ones that split its dimensions, one for each grid of pieces."""
    assert not layout.partial, "what crosses is no sum"
    idle = [a for a, n in enumerate(mesh.axis_sizes) if n > 1 and a not in layout.sharded_axes]
    found: dict[tuple[int, ...], Layout] = {}
    for places in itertools.product((None, *range(len(shape))), repeat=len(idle)):
        dims = [
            (*axes, *(a for a, place in zip(idle, places, strict=True) if place == d))
            for d, axes in enumerate(layout.dims)
        ]
        finer = Layout(tuple(dims))
        if finer.fits(shape, mesh):
            found.setdefault(grid_of(finer, mesh), finer)
    return found


def _rank(source: tuple[int, ...], target: tuple[int, ...]) -> tuple[int, int, int, tuple[int, ...]]:
    fine = common_grid(source, target)
    return math.prod(target), math.prod(source), -math.prod(fine), source
