"""Pins that a step's own code writes: `with_sharding_constraint`, `reshard`, `out_sharding=`, over the code's mesh."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.errors import InvalidArgumentError
from autopar.ir.graph import OpGraph, walk
from autopar.ir.traced_step import WrittenLayout
from autopar.sharding.pins import Pin, Pins


def pins_in_code(graph: OpGraph, num_devices: int, *, is_wish: bool) -> Pins | None:
    """The layouts that the code gives to values of the graph; None where it gives none.

    Of several of one value a wish takes the first one. Raises: InvalidArgumentError, with the line, for a mesh that the
    devices cannot have, for axes of two sizes, and, unless it is a wish, for two layouts of one value.
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
        if other.dims != pin.dims and not is_wish:
            raise InvalidArgumentError(
                where=_where(written),
                expected=f"one layout of a value, {other.text} of {_where(before)}",
                got=pin.text,
                hint="leave out one of both, or take Search(constraints='advice')",
            )
    if not of_value:
        return None
    _check_sizes(sizes, num_devices)
    return Pins(
        pins=(),
        axis_sizes=tuple((name, n) for name, (n, _) in sizes.items()),
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
