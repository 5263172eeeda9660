"""In which layout a value crosses from one stage's mesh to another's.

Each byte should cross once: where the value is replicated over some devices, each of them sends a part, and the
receiving stage gathers the parts (Zhuang et al., "On optimizing the communication of model parallelism", 2022, call it
local all-gather). So both ends hold the value split as finely as both meshes can, in the same grid of pieces.
"""

from __future__ import annotations

import functools

from autopar.layout import Layout, enumerate_layouts
from autopar.mesh import LogicalMesh


@functools.cache
def wire_layouts(shape: tuple[int, ...], source: LogicalMesh, target: LogicalMesh) -> tuple[Layout, Layout]:
    """The layouts on both meshes: equal grids of as many pieces as can be, leading dimensions split first."""
    grids: dict[tuple[int, ...], Layout] = {}
    for layout in enumerate_layouts(shape, source):
        grids.setdefault(_grid(layout, source), layout)
    best: tuple[tuple[int, ...], Layout, Layout] | None = None
    for layout in enumerate_layouts(shape, target):
        grid = _grid(layout, target)
        if grid in grids and (best is None or _rank(grid) > _rank(best[0])):
            best = grid, grids[grid], layout
    assert best is not None, "the replicated layout is on every mesh"
    return best[1], best[2]


def _grid(layout: Layout, mesh: LogicalMesh) -> tuple[int, ...]:
    return tuple(mesh.size(axes) for axes in layout.dims)


def _rank(grid: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    pieces = 1
    for n in grid:
        pieces *= n
    return pieces, grid
