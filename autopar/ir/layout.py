"""`Layout` of a value on a logical mesh: the mesh axes that split each dimension, and its partial axes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import msgspec

# The logical mesh: named axes over which values are split.


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

    def split(self, sizes: Iterable[int], axes: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Of the axes that split a dimension those that split each of its factors, major first, of these sizes; then
        those that are left.
        """
        rest = tuple(axes)
        for size in sizes:
            n = next((n for n in range(len(rest)) if self.size(rest[:n]) >= size), len(rest))
            yield rest[:n]
            rest = rest[n:]
        yield rest

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


class Layout(msgspec.Struct, frozen=True, gc=False, cache_hash=True):
    """`dims[d]` are the mesh axes that split dimension d, major first; `partial` are the axes over which devices hold
    summands of the value (unreduced). An axis stands in at most one place. All other axes replicate.

    Layouts are in the keys of most tables: their hash is worked out once.
    """

    dims: tuple[tuple[int, ...], ...]
    partial: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        used = [*self.partial]
        for axes in self.dims:
            if axes:
                used += axes
        if len(used) > 1 and len(used) != len(set(used)):
            raise ValueError(f"a mesh axis twice in {self.dims}, partial {self.partial}")

    @property
    def sharded_axes(self) -> frozenset[int]:
        return frozenset(a for axes in self.dims for a in axes)

    @property
    def is_replicated(self) -> bool:
        return not self.partial and not any(self.dims)

    @property
    def reduced(self) -> Layout:
        """The same split with nothing partial."""
        return Layout(self.dims) if self.partial else self

    def shards(self, mesh: LogicalMesh) -> int:
        """Into how many different pieces the value is split."""
        sizes, shards = mesh.axis_sizes, 1
        for axes in self.dims:
            for a in axes:
                shards *= sizes[a]
        return shards

    def part(self, shape: Sequence[int], mesh: LogicalMesh) -> tuple[int, ...]:
        """The shape of one device's part of a value, of unequal parts the largest."""
        return tuple(-(-n // mesh.size(axes)) for n, axes in zip(shape, self.dims, strict=True))

    def fits(self, shape: tuple[int, ...], mesh: LogicalMesh) -> bool:
        """Whether every dimension divides evenly."""
        # Asked for every step of every resharding: loops cost a third of what generators do.
        sizes = mesh.axis_sizes
        for n, axes in zip(shape, self.dims, strict=True):
            for a in axes:
                if n % sizes[a]:
                    return False
                n //= sizes[a]
        return True

    def text(self, mesh: LogicalMesh) -> str:
        """As jax writes a PartitionSpec, with an entry for each dimension: `P("data", None, unreduced={"model"})`."""
        names = mesh.axis_names
        return spec_text([[names[a] for a in axes] for axes in self.dims], [names[a] for a in self.partial])


def spec_text(dims: Sequence[Sequence[str] | None], unreduced: Sequence[str] = ()) -> str:
    """A PartitionSpec by the axes of each dimension, as it is written in Python; None leaves a dimension open."""

    def entry(axes: Sequence[str] | None) -> str:
        if axes is None:
            return "P.UNCONSTRAINED"
        names = [f'"{name}"' for name in axes]
        return f"({', '.join(names)})" if len(names) > 1 else names[0] if names else "None"

    entries = [entry(axes) for axes in dims]
    if unreduced:
        names = [f'"{name}"' for name in unreduced]
        entries.append(f"unreduced={{{', '.join(names)}}}")
    return f"P({', '.join(entries)})"


@functools.cache
def replicated(rank: int) -> Layout:
    return Layout(((),) * rank)


@functools.cache
def enumerate_layouts(shape: tuple[int, ...], mesh: LogicalMesh, order: tuple[int, ...] = ()) -> tuple[Layout, ...]:
    """Every layout of a value that divides evenly, none of them partial, the replicated one first.

    Axes of size one are never used; where two axes split one dimension, the major one is the one that comes first in
    `order`, the lower one where no order is given.
    """
    return _enumerate(shape, mesh, (None, *range(len(shape))), order)


@functools.cache
def enumerate_with_partial(
    shape: tuple[int, ...], mesh: LogicalMesh, order: tuple[int, ...] = ()
) -> tuple[Layout, ...]:
    """Every layout that divides evenly, partial over any of the axes that do not split it."""
    return _enumerate(shape, mesh, (None, *range(len(shape)), _PARTIAL), order)


_PARTIAL = -1


def _enumerate(
    shape: tuple[int, ...], mesh: LogicalMesh, choices: tuple[int | None, ...], order: tuple[int, ...]
) -> tuple[Layout, ...]:
    axes = [a for a in order or range(len(mesh.axis_sizes)) if mesh.axis_sizes[a] > 1]
    layouts = []
    for places in itertools.product(choices, repeat=len(axes)):
        on = [
            tuple(a for a, place in zip(axes, places, strict=True) if place == d)
            for d in (*range(len(shape)), _PARTIAL)
        ]
        layout = Layout(tuple(on[:-1]), tuple(sorted(on[-1])))
        if layout.fits(shape, mesh):
            layouts.append(layout)
    return tuple(layouts)


def local_bytes(shape: tuple[int, ...], itemsize: int, layout: Layout, mesh: LogicalMesh) -> int:
    """Bytes of a value on one device, of unequal parts the largest; a partial value is as large as a reduced one."""
    sizes, nbytes = mesh.axis_sizes, itemsize
    for n, axes in zip(shape, layout.dims, strict=True):
        for a in axes:
            n = -(-n // sizes[a])
        nbytes *= n
    return nbytes


def even_layout(shape: tuple[int, ...], mesh: LogicalMesh) -> Layout:
    """Splits the largest dimension that divides by the whole (one-axis) mesh."""
    n = mesh.num_devices
    dividing = [d for d, size in enumerate(shape) if size % n == 0 and size >= n > 1]
    split_dim = max(dividing, key=lambda d: shape[d], default=None)
    return Layout(tuple((0,) if d == split_dim else () for d in range(len(shape))))
