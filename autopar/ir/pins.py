"""Pins: layouts that a user fixes by path, each a pattern and a split over named mesh axes.

A pattern (`autopar.common.paths`) names leaves of the arguments, or, where it matches none, the results of modules. The
names of axes are the user's: which axis of a logical mesh has which name is a choice of its own, the same one for all
pins. A step's own code writes pins too: `with_sharding_constraint`, `reshard`, `out_sharding=`, over the code's mesh.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from autopar.common.paths import matches, parts_of
from autopar.errors import InvalidArgumentError
from autopar.hardware.cluster import Cluster
from autopar.ir.binding import Binding
from autopar.ir.graph import OpGraph, Value, read_by, values_of, walk
from autopar.ir.layout import Layout, LogicalMesh, factorisations, spec_text
from autopar.ir.traced_step import METADATA, RESHARD, TYPES, TracedStep, WrittenLayout

CLOSEST_SHOWN = 3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """`dims[d]` are the axes that split dimension d, major first; None leaves that dimension to the search. Dimensions
    behind the last one are whole.
    """

    pattern: str
    dims: tuple[tuple[str, ...] | None, ...]

    @property
    def text(self) -> str:
        """As it is written in Python: `P(None, "model")`."""
        return spec_text(self.dims)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pins:
    """Pins and the sizes of those of their axes for which one was given. `in_code` are those of values of the step's
    graph, by number, that its code names (`pins_in_code`). `closed`: they are the layouts of a whole program: an axis
    that no pin has splits nothing, and operations make values as they are pinned.
    """

    pins: tuple[Pin, ...]
    axis_sizes: tuple[tuple[str, int], ...] = ()
    in_code: tuple[tuple[int, Pin], ...] = ()
    closed: bool = False

    @property
    def every(self) -> tuple[Pin, ...]:
        """The pins by pattern, then those of the step's code, each once."""
        return (*self.pins, *dict.fromkeys(pin for _, pin in self.in_code))

    @property
    def used(self) -> tuple[str, ...]:
        """Every axis of a pin, in the order in which they are first spoken of."""
        return tuple(dict.fromkeys(name for pin in self.every for axes in pin.dims for name in axes or ()))

    @property
    def names(self) -> tuple[str, ...]:
        """Every axis, those with a size first."""
        return tuple(dict.fromkeys([*(name for name, _ in self.axis_sizes), *self.used]))

    @property
    def unused(self) -> tuple[str, ...]:
        """The axes with a size of several devices that no pin has."""
        return tuple(f"{name}={n}" for name, n in self.axis_sizes if n > 1 and name not in self.used)

    def found(self, traced: TracedStep, graph: OpGraph) -> Pinned:
        """What the patterns name in a step.

        Raises: InvalidArgumentError for a pattern that names nothing, or for two that name one thing and disagree.
        """
        leaves = ["/".join(parts_of(path)) for path in traced.in_paths]
        role = graph.forward_role
        modules = sorted({op.module for op in graph.ops() if op.role is role and op.module})
        modules = sorted({prefix for module in modules for prefix in _prefixes(module)})
        by_parameters = sorted({op.parameters for op in graph.ops() if op.role is role and op.place == op.parameters})
        of_leaf: dict[int, Pin] = {}
        of_module: dict[str, Pin] = {}
        for pin in self.pins:
            hits = [i for i, path in enumerate(leaves) if matches(pin.pattern, path)]
            inside = [] if hits else [module for module in modules if matches(pin.pattern, module)]
            if not hits and not inside:
                inside = [path for path in by_parameters if path and matches(pin.pattern, path)]
            if not hits and not inside:
                raise _names_nothing(pin, traced.name, [*leaves, *modules])
            for i in hits:
                if len(pin.dims) > len(traced.in_avals[i].shape):
                    raise _too_long(pin, leaves[i], traced.in_avals[i].shape)
                _agree(of_leaf.setdefault(i, pin), pin, leaves[i])
            for module in inside:
                _agree(of_module.setdefault(module, pin), pin, module)
        return Pinned(pins=self, leaves=of_leaf, modules=of_module, paths=tuple(leaves), in_code=dict(self.in_code))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pinned:
    """What is pinned in one step: leaves of its arguments by number, results of modules by the module's path.

    `paths` are those of all leaves, in parts. `in_code`: values that the step's code lays. A wish is kept where it can
    be, but for the values that are `bound`.
    """

    pins: Pins
    leaves: Mapping[int, Pin]
    modules: Mapping[str, Pin]
    paths: tuple[str, ...]
    in_code: Mapping[int, Pin] = dataclasses.field(default_factory=dict)
    is_wish: bool = False
    bound: frozenset[int] = frozenset()

    def num_named(self, pin: Pin) -> tuple[int, str]:
        """How many things a pin names, and what they are."""
        leaves = sum(p is pin for p in self.leaves.values())
        modules = sum(p is pin for p in self.modules.values())
        if values := sum(p is pin for p in self.in_code.values()):
            return values, "values"
        return (leaves, "leaves") if leaves else (modules, "modules")

    def only(self, pin: Pin) -> Pinned:
        """The same without all other pins."""
        return dataclasses.replace(
            self,
            leaves={i: p for i, p in self.leaves.items() if p is pin},
            modules={m: p for m, p in self.modules.items() if p is pin},
            in_code={v: p for v, p in self.in_code.items() if p is pin},
        )

    def values(self, graph: OpGraph, leaf_of: Sequence[int] | None = None) -> Iterator[tuple[Value, str, Pin]]:
        """(value, what it is called, its pin) of all that is pinned in a graph of the step.

        `leaf_of[i]` is the leaf that argument i of the graph is, or is a piece of; None where they are the same.
        Raises: InvalidArgumentError for a module none of whose results has as many dimensions as its pin.
        """
        first = len(graph.constants)
        for i, value in enumerate(graph.block.inputs[first:]):
            leaf = i if leaf_of is None else leaf_of[i]
            if leaf in self.leaves:
                yield graph.values[value], self.paths[leaf], self.leaves[leaf]
        for module, pin in self.modules.items():
            results = [graph.values[v] for v in _results_of(graph, module)]
            long_enough = [v for v in results if len(v.shape) >= len(pin.dims)]
            if results and not long_enough:
                raise _too_long(pin, f"the result of {module}", results[0].shape)
            yield from ((v, f"the result of {module}", pin) for v in long_enough)
        there = {*values_of(graph.block)} if self.bound else self.in_code.keys()  # repeated layers may be folded
        yield from ((graph.values[v], pin.pattern, pin) for v, pin in self.in_code.items() if v in there)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PinnedLayout:
    """What a pin leaves of the layouts of a value: the mesh axes of each dimension, None for any. `as_made`: its
    operation makes it so too, or sums of which it is a part.
    """

    name: str
    text: str
    dims: tuple[tuple[int, ...] | None, ...]
    is_wish: bool = False
    as_made: bool = False

    def allowed(self, layouts: Sequence[Layout]) -> np.ndarray:
        """Which of the layouts are as pinned."""
        return np.array([self.allows(layout) for layout in layouts], bool)

    def allows(self, layout: Layout) -> bool:
        pairs = zip(self.dims, layout.dims, strict=True)
        return not layout.partial and all(wanted is None or wanted == axes for wanted, axes in pairs)

    def is_made_by(self, layout: Layout) -> bool:
        """Whether a value that is left so becomes what is pinned by a reduction alone."""
        for wanted, axes in zip(self.dims, layout.dims, strict=True):
            if wanted is not None and (wanted[: len(axes)] != axes or set(wanted[len(axes) :]) - set(layout.partial)):
                return False
        return True

    def impossible(self, why: str) -> InvalidArgumentError:
        """The error where a value cannot lie so."""
        return InvalidArgumentError(
            where=f"constrain, {self.name}",
            expected="a spec that it can have",
            got=f"{self.text}: {why}",
            hint="pin what is computed before or after it, or a dimension that its operation treats as one",
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PinsOnMesh:
    """Pins whose axes are those of a mesh: `names[a]` is the name of axis a in the pins, empty if none has it."""

    pinned: Pinned
    mesh: LogicalMesh
    names: tuple[str, ...]

    def layouts(self, graph: OpGraph, leaf_of: Sequence[int] | None = None) -> dict[int, PinnedLayout]:
        """What the pins leave of the layouts of a graph's values; as in `Pinned.values`.

        Raises: InvalidArgumentError where a dimension does not divide.
        """
        found = {}
        for value, name, pin in self.pinned.values(graph, leaf_of):
            named = (*pin.dims, *((),) * (len(value.shape) - len(pin.dims)))
            dims = tuple(None if axes is None else self._axes(axes) for axes in named)
            uneven = [d for d, axes in enumerate(dims) if axes and value.shape[d] % self.mesh.size(axes)]
            is_wish = self.pinned.is_wish and value.id not in self.pinned.bound
            if uneven and is_wish:
                continue
            if uneven:
                d = uneven[0]
                raise _does_not_divide(pin, name, value.shape, d, self.mesh.size(dims[d] or ()))
            as_made = self.pinned.pins.closed and is_wish
            found[value.id] = PinnedLayout(name=name, text=pin.text, dims=dims, is_wish=is_wish, as_made=as_made)
        return found

    @property
    def idle(self) -> frozenset[int]:
        """The axes that may split nothing."""
        pins = self.pinned.pins
        return frozenset(a for a, name in enumerate(self.names) if pins.closed and name not in pins.used)

    def _axes(self, names: Sequence[str]) -> tuple[int, ...]:
        """The axes of these names; what has one device only is none."""
        return tuple(self.names.index(name) for name in names if name in self.names)


def on_meshes(
    pinned: Pinned,
    cluster: Cluster,
    max_axes: int,
    binding: Binding | None,
    graph: OpGraph,
    leaf_of: Sequence[int] | None = None,
) -> list[PinsOnMesh]:
    """Every mesh of a cluster's devices, with the names of its axes, on which all pins divide; with a binding its mesh.

    Raises: InvalidArgumentError where there is none.
    """
    meshes = _bound_meshes(pinned, cluster, binding) if binding is not None else _meshes(pinned, cluster, max_axes)
    found: list[PinsOnMesh] = []
    refused: list[InvalidArgumentError] = []
    for at in meshes:
        try:
            at.layouts(graph, leaf_of)
        except InvalidArgumentError as error:
            refused.append(error)
        else:
            found.append(at)
    if not found:
        raise refused[0]
    return found


def _meshes(pinned: Pinned, cluster: Cluster, max_axes: int) -> list[PinsOnMesh]:
    """Meshes and names that differ in what can be told apart: sizes of named axes, and links where those differ. Axes
    have the order of the given sizes, that of the code's mesh, so that arrays of that mesh lie as planned.
    """
    n, given = cluster.num_devices, dict(pinned.pins.axis_sizes)
    names = [name for name in pinned.pins.names if given.get(name) != 1]
    if n == 1:
        names = [name for name in names if name in given]
    before = {
        pair for pin in pinned.pins.every for axes in pin.dims if axes for pair in itertools.combinations(axes, 2)
    }
    found: dict[tuple, tuple[int, PinsOnMesh]] = {}
    for mesh in factorisations(n, max_axes):
        if not cluster.has_links_for(len(mesh.axis_sizes)):
            continue
        for sizes in dict.fromkeys([mesh.axis_sizes, *itertools.permutations(mesh.axis_sizes)]):
            links = cluster.axis_links(sizes)
            for places in itertools.permutations(range(len(sizes)), len(names)):
                at = dict(zip(names, places, strict=True))
                if any(given.get(name, sizes[a]) != sizes[a] for name, a in at.items()):
                    continue
                if any(at[major] > at[minor] for major, minor in before if major in at and minor in at):
                    continue
                of_axis = _named(at, len(sizes))
                alike = list(zip(of_axis, sizes, strict=True))
                key = tuple(zip(alike, links, strict=True)) if len(set(links)) > 1 else tuple(sorted(alike))
                in_order = [at[name] for name in given if name in at]
                order = sum(a > b for a, b in itertools.combinations(in_order, 2))
                if key not in found or order < found[key][0]:
                    found[key] = order, PinsOnMesh(pinned=pinned, mesh=LogicalMesh(axis_sizes=sizes), names=of_axis)
    if not found:
        sizes_text = ", ".join(f"{name}={given.get(name, 'any')}" for name in names)
        raise InvalidArgumentError(
            where="constrain",
            expected=f"mesh axes that {n} devices can have, and of which one that splits a dimension before another "
            "does so in every spec",
            got=sizes_text,
            hint=f"give sizes whose product divides {n}, or name fewer axes",
        )
    return [on for _, on in found.values()]


def _named(at: Mapping[str, int], num_axes: int) -> tuple[str, ...]:
    """The name of each axis; empty for those that no pin names."""
    of_axis = {a: name for name, a in at.items()}
    return tuple(of_axis.get(a, "") for a in range(num_axes))


def _bound_meshes(pinned: Pinned, cluster: Cluster, binding: Binding) -> list[PinsOnMesh]:
    mesh, constraints = binding.on(cluster.num_devices)
    known = [use.name for use in binding.axes]
    unknown = [name for name in pinned.pins.names if name not in known]
    if unknown or pinned.pins.axis_sizes:
        raise InvalidArgumentError(
            where="constrain(pins, recipe=...)",
            expected=f"the recipe's own mesh axes, of the sizes that it gives them: {', '.join(known)}",
            got=", ".join(unknown or (f"{name}={n}" for name, n in pinned.pins.axis_sizes)),
            hint="use the recipe's names and leave out axis_sizes, or leave out the recipe",
        )
    return [PinsOnMesh(pinned=pinned, mesh=mesh, names=tuple(use.name for use in constraints.axes))]


def _results_of(graph: OpGraph, module: str) -> list[int]:
    """The values that the forward pass makes inside of a module and reads outside of it, or hands out."""

    def is_inside(path: str) -> bool:
        return path == module or path.startswith(f"{module}/")

    role = graph.forward_role
    forward = [op for op in graph.ops() if op.role is role]
    made = [v for op in forward if is_inside(op.place) and not op.blocks for v in op.outputs]
    read = {v for op in forward if not is_inside(op.place) for v in read_by(op)}
    read |= {v for v in graph.block.outputs if isinstance(v, int)}
    return [v for v in made if v in read]


def _prefixes(module: str) -> list[str]:
    parts = module.split("/")
    return ["/".join(parts[:n]) for n in range(1, len(parts) + 1)]


def _agree(one: Pin, other: Pin, path: str) -> None:
    if one.dims != other.dims:
        raise InvalidArgumentError(
            where=f"constrain, {path}",
            expected="one spec",
            got=f"{one.text} of {one.pattern!r} and {other.text} of {other.pattern!r}",
            hint="make one of the patterns narrower, with more parts of the path in front",
        )


def _names_nothing(pin: Pin, step: str, paths: Sequence[str]) -> InvalidArgumentError:
    """The paths whose ends, of as many parts, are most like the pattern, but for what is optimiser state of another."""
    num_parts = pin.pattern.count("/") + 1
    ends: dict[str, str] = {}
    for path in paths:
        ends.setdefault("/".join(path.split("/")[-num_parts:]), path)
    closest = difflib.get_close_matches(pin.pattern, list(ends), n=CLOSEST_SHOWN, cutoff=0.0)
    return InvalidArgumentError(
        where=f"constrain, pattern {pin.pattern!r}",
        expected=f"a pattern that matches the end of a path of the arguments of {step}, or of a module",
        got=f"no match; closest: {', '.join(ends[end] for end in closest)}",
        hint="separate parts by slashes; * stands for characters of one part, ** for any number of parts",
    )


def _too_long(pin: Pin, path: str, shape: tuple[int, ...]) -> InvalidArgumentError:
    return InvalidArgumentError(
        where=f"constrain, {path}",
        expected=f"a spec of at most {len(shape)} dimension(s), for shape {tuple(shape)}",
        got=f"{pin.text} of {pin.pattern!r}, with {len(pin.dims)}",
        hint="give one entry for each dimension; those left out at the end are whole",
    )


def _does_not_divide(pin: Pin, path: str, shape: tuple[int, ...], d: int, parts: int) -> InvalidArgumentError:
    return InvalidArgumentError(
        where=f"constrain, {path}",
        expected=f"a dimension {d} that divides by the {parts} devices that split it",
        got=f"shape {tuple(shape)} under {pin.text} of {pin.pattern!r}",
        hint=f"pin another dimension, or give the axis a size (axis_sizes) that divides {math.gcd(shape[d], parts)}"
        if math.gcd(shape[d], parts) > 1
        else "pin another dimension",
    )


# Layouts of a value at one place, which another of the same value does not contradict.
_LAID_ANEW = frozenset({RESHARD, TYPES, METADATA})


def pins_in_code(graph: OpGraph, num_devices: int, *, is_wish: bool) -> Pins | None:
    """The layouts that the code gives to values of the graph; None where it gives none.

    Of several of one value a wish takes the first one, and so does a pin where one is of a reshard, a type or
    metadata: code may lay the value otherwise from there on. Raises: InvalidArgumentError, with the line, for a mesh
    that the devices cannot have, for axes of two sizes, and, unless it is a wish, for two layouts of one value.
    """
    alive = {*graph.block.inputs, *(v for op in walk(graph.block) for v in op.outputs)}
    alive |= {v for op in walk(graph.block) for block in op.blocks for v in block.inputs}
    sizes: dict[str, tuple[int, WrittenLayout]] = {}
    of_value: dict[int, tuple[Pin, WrittenLayout]] = {}
    pins: dict[Pin, Pin] = {}
    for value, written in graph.written:
        if value not in alive:
            continue
        _add_sizes(sizes, written)
        pin = Pin(pattern=_where(written), dims=written.dims)
        pin = pins.setdefault(pin, pin)
        other, before = of_value.setdefault(value, (pin, written))
        is_laid_anew = not _LAID_ANEW.isdisjoint((before.place.name, written.place.name))
        if other.dims != pin.dims and not is_wish and not is_laid_anew:
            raise InvalidArgumentError(
                where=_where(written),
                expected=f"one layout of a value, {other.text} of {_where(before)}",
                got=pin.text,
                hint="leave out one of both, or take Search(constraints='advice')",
            )
    if not of_value:
        return None
    _check_sizes(sizes, num_devices)
    of_meshes = dict.fromkeys(name for _, written in graph.written for name, _ in written.axis_sizes)
    return Pins(
        pins=(),
        axis_sizes=tuple((name, sizes[name][0]) for name in of_meshes if name in sizes),
        in_code=tuple((value, pin) for value, (pin, _) in of_value.items()),
    )


def joined(first: Pins | None, second: Pins) -> Pins:
    """Pins by pattern together with those of the code. Raises: InvalidArgumentError for an axis of two sizes."""
    if first is None:
        return second
    sizes = dict(second.axis_sizes)
    for name, n in first.axis_sizes:
        if sizes.setdefault(name, n) != n:
            raise InvalidArgumentError(
                where=f"constrain(axis_sizes={{{name!r}: {n}}})",
                expected=f"{name}={sizes[name]}, as the mesh in the step's code has it",
                got=f"{name}={n}",
                hint="leave out axis_sizes, or take another name",
            )
    return Pins(pins=first.pins, axis_sizes=tuple(sizes.items()), in_code=second.in_code)


def _where(written: WrittenLayout) -> str:
    place = written.place
    return f"{place.name} at {place.line}" if place.line else place.name


def _add_sizes(sizes: dict[str, tuple[int, WrittenLayout]], written: WrittenLayout) -> None:
    """Adds the axes that a layout names, with their sizes."""
    of_mesh = dict(written.axis_sizes)
    for name in dict.fromkeys(name for axes in written.dims for name in axes or ()):
        n, before = sizes.setdefault(name, (of_mesh[name], written))
        if n != of_mesh[name]:
            raise InvalidArgumentError(
                where=_where(written),
                expected=f"an axis {name!r} of {n} devices, as {_where(before)} has it",
                got=f"one of {of_mesh[name]}",
                hint="write all shardings over one mesh",
            )


def _check_sizes(sizes: dict[str, tuple[int, WrittenLayout]], num_devices: int) -> None:
    product: list[str] = []
    for name, (_, written) in sizes.items():
        product.append(name)
        if num_devices % math.prod(sizes[axis][0] for axis in product):
            raise InvalidArgumentError(
                where=_where(written),
                expected=f"mesh axes whose sizes multiply to a divisor of the plan's {num_devices} devices",
                got=_axes_text(product, sizes),
                hint="write the mesh for these devices, or take Search(constraints='ignore')",
            )


def _axes_text(names: Sequence[str], sizes: dict[str, tuple[int, WrittenLayout]]) -> str:
    return ", ".join(f"{name}={sizes[name][0]}" for name in names)
