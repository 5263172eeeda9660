"""The logical mesh: named axes over which values are split."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable

AXIS_NAMES = ("x", "y", "z")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LogicalMesh:
    """Devices in a grid, row-major: axis 0 is the slowest varying.

    A value's layout refers to axes by index. Example: `LogicalMesh(axis_sizes=(2, 4))` puts devices 0-3 in row 0
    and 4-7 in row 1, so axis 1 joins neighbours and axis 0 joins devices 4 apart. The meshes of a search have the axes
    x, y, z; those of a plan are named by what they split. Meshes of the same sizes are equal under any names.
    """

    axis_sizes: tuple[int, ...]
    names: tuple[str, ...] = dataclasses.field(default=(), compare=False)

    def __post_init__(self) -> None:
        assert 1 <= len(self.axis_sizes) <= len(AXIS_NAMES), f"a mesh has 1 to 3 axes, got {self.axis_sizes}"
        assert all(n >= 1 for n in self.axis_sizes), f"axis sizes are positive, got {self.axis_sizes}"

    @property
    def axis_names(self) -> tuple[str, ...]:
        return self.names or AXIS_NAMES[: len(self.axis_sizes)]

    @property
    def num_devices(self) -> int:
        return math.prod(self.axis_sizes)

    def size(self, axes: Iterable[int]) -> int:
        """Number of devices along `axes` together."""
        size = 1
        for a in axes:
            size *= self.axis_sizes[a]
        return size

    def __str__(self) -> str:
        """`data=2 x model=4`, or `2x4` of a mesh whose axes have no names yet."""
        if not self.names:
            return "x".join(map(str, self.axis_sizes))
        return " x ".join(f"{name}={size}" for name, size in zip(self.names, self.axis_sizes, strict=True))


def axes_text(names: Iterable[str]) -> str:
    """Mesh axes that split something together, as tables and pages write them: `data, model`."""
    return ", ".join(names)


def factorisations(num_devices: int, max_axes: int = 3) -> tuple[LogicalMesh, ...]:
    """Every logical mesh of `num_devices` with at most `max_axes` axes of size 2 or more, up to the order of axes.

    Axis sizes are given with the largest last, so that the axis with most traffic joins neighbouring devices.
    The order matters only where links differ; `orderings` gives the others.
    """
    if num_devices == 1:
        return (LogicalMesh(axis_sizes=(1,)),)
    all_sizes: list[tuple[int, ...]] = []

    def extend(rest: int, smallest: int, sizes: tuple[int, ...]) -> None:
        if rest == 1:
            all_sizes.append(sizes)
            return
        if len(sizes) == max_axes:
            return
        for size in range(smallest, rest + 1):
            if rest % size == 0:
                extend(rest // size, size, (*sizes, size))

    extend(num_devices, 2, ())
    return tuple(LogicalMesh(axis_sizes=sizes) for sizes in sorted(all_sizes, key=lambda s: (len(s), s)))


def orderings(mesh: LogicalMesh) -> tuple[LogicalMesh, ...]:
    """The distinct orders of a mesh's axes, the given one first."""
    orders = dict.fromkeys([mesh.axis_sizes, *itertools.permutations(mesh.axis_sizes)])
    return tuple(LogicalMesh(axis_sizes=sizes) for sizes in orders)
