"""Which devices' keys come to a device in a ring, and in which order positions lie on the devices.

Under a causal mask, positions in order would leave the last device with all steps and the first with one. Of 2 p parts
of the positions each device therefore takes one from the front and the one as far from the end (Brandon et al.,
"Striped Attention", 2023; the order of zigzag in Zhu, "ring-flash-attention", 2024). Under a window, positions stay in
order, and keys go only as far as the window reaches, unless fewer scores are computed in the balanced order.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar.ops.attention.form import (
    COMPARISONS,
    HIDDEN,
    KEY,
    AttentionForm,
    Expression,
    computed,
    evaluated,
    is_distance,
    linear,
    linear_sum,
)

# The scores that a mask surely hides, by the distance of a query's and a key's position, whatever its arrays hold.
#
# An expression of scores is evaluated in intervals: an array may hold any number, so what depends on it lies between
# two bounds. Segments of packed sequences, padding and biases are such arrays. A distance whose upper bound is hidden
# is hidden for all positions. Source of the arithmetic: Moore, "Interval Analysis", 1966.


Interval = tuple[np.ndarray, np.ndarray]
_LOGIC = frozenset({"and", "or", "not"})
# Functions that grow or fall with each operand, so that bounds of the operands give those of the result.
_MONOTONE = frozenset({"add", "add_any", "sub", "mul", "neg", "max", "min"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Visibility:
    """Of each distance from -positions + 1 to positions - 1 whether scores may be visible there.

    `leaves_rows`: whether scores that are surely hidden may be left out. Each row sees its own position, or what is
    hidden is minus infinity, which weighs nothing even where all of a row is hidden.
    """

    positions: int
    seen: np.ndarray
    leaves_rows: bool

    def between(self, first: int, last: int) -> bool:
        """Whether scores of a distance from `first` to `last` may be visible."""
        start, stop = max(first + self.positions - 1, 0), min(last + self.positions, self.seen.size)
        return bool(self.seen[start:stop].any()) if start < stop else False


@functools.cache
def visibility(form: AttentionForm, positions: int) -> Visibility:
    """That of attention over so many positions."""
    distance = np.arange(-positions + 1, positions)
    _, high = _Bounds(form, distance, is_own=False).of(form.score)
    seen = np.broadcast_to(~(high <= HIDDEN), distance.shape)
    low, _ = _Bounds(form, np.zeros(1, int), is_own=True).of(form.score)
    leaves_rows = bool(np.all(low > HIDDEN)) or not _hides_by_numbers(form.score)
    return Visibility(positions=positions, seen=seen, leaves_rows=leaves_rows)


def _hides_by_numbers(node: Expression) -> bool:
    """Whether a hidden score may be a number, rather than minus infinity: by a large constant, or an array that is
    added.
    """
    match node:
        case ("const", number, _):
            return np.isfinite(number) and abs(number) >= -HIDDEN
        case ("array", _):
            return True
        case ("score",) | ("iota", _, _):
            return False
        case ("select_n", (), _, no, yes):
            return _hides_by_numbers(no) or _hides_by_numbers(yes)
    if node[0] in COMPARISONS or node[0] in _LOGIC:
        return False
    return any(_hides_by_numbers(operand) for operand in node[2:])


class _Bounds:
    """Bounds of expressions at some distances; `is_own`: of a query and the key of its own position, where arrays that
    hold the same of both are equal.
    """

    def __init__(self, form: AttentionForm, distance: np.ndarray, *, is_own: bool) -> None:
        self.form, self.is_own = form, is_own
        query = np.maximum(distance, 0)
        self.at = {form.position: query, KEY: query - distance}
        self.known: dict[Expression, Interval] = {}

    def of(self, node: Expression) -> Interval:
        if node not in self.known:
            with np.errstate(invalid="ignore", over="ignore"):
                low, high = self._of(node)
            # What has no number (0 times infinity) may be any.
            self.known[node] = np.where(np.isnan(low), -np.inf, low), np.where(np.isnan(high), np.inf, high)
        return self.known[node]

    def _of(self, node: Expression) -> Interval:
        name = node[0]
        if name == "score":
            return np.full(1, 2.0), np.full(1, 2.0)
        if name == "const":
            number = np.full(1, float(node[1]))
            return number, number
        sloped = linear(node)
        if sloped is not None and is_distance(sloped, self.form.position):
            return self._exact(node)
        if name in ("iota", "array"):
            return np.full(1, -np.inf), np.full(1, np.inf)
        operands = node[2:]
        if name in COMPARISONS:
            return self._compared(node)
        bounds = [self.of(o) for o in operands]
        if name in _LOGIC:
            truths = [(np.clip(low, 0, 1), np.clip(high, 0, 1)) for low, high in bounds]
            if name == "not":
                ((low, high),) = truths
                return 1.0 - high, 1.0 - low
            choose = np.minimum if name == "and" else np.maximum
            return choose(truths[0][0], truths[1][0]), choose(truths[0][1], truths[1][1])
        if name == "select_n":
            return _selected(*bounds)
        if name == "convert_element_type":
            is_truth = np.dtype(node[1][0]).kind == "b"
            ((low, high),) = bounds
            return (np.clip(low, 0, 1), np.clip(high, 0, 1)) if is_truth else (low, high)
        if name == "abs":
            ((low, high),) = bounds
            least = np.where((low <= 0) & (high >= 0), 0.0, np.minimum(np.abs(low), np.abs(high)))
            return least, np.maximum(np.abs(low), np.abs(high))
        if name in _MONOTONE or (name == "div" and np.all(bounds[1][0] == bounds[1][1]) and np.all(bounds[1][0])):
            return _corners(name, bounds)
        return np.full(1, -np.inf), np.full(1, np.inf)

    def _exact(self, node: Expression) -> Interval:
        numbers = evaluated(node, self.at, 0.0)
        return numbers, numbers

    def _compared(self, node: Expression) -> Interval:
        name, _, left, right = node
        one, other = linear(left), linear(right)
        if one is not None and other is not None and is_distance(linear_sum(one, other, -1.0), self.form.position):
            return self._exact(node)
        if self.is_own and self._same(left) == self._same(right):
            truth = np.full(1, float(name in ("eq", "ge", "le")))
            return truth, truth
        (a, b), (c, d) = self.of(left), self.of(right)
        if name in ("gt", "ge"):
            (a, b), (c, d), name = (c, d), (a, b), {"gt": "lt", "ge": "le"}[name]
        match name:
            case "lt":
                return (b < c).astype(float), (a < d).astype(float)
            case "le":
                return (b <= c).astype(float), (a <= d).astype(float)
        surely, maybe = (a == b) & (c == d) & (a == c), (a <= d) & (c <= b)
        low, high = surely.astype(float), maybe.astype(float)
        return (low, high) if name == "eq" else (1.0 - high, 1.0 - low)

    def _same(self, node: Expression) -> Expression:
        """An expression by what it reads of a position, be that the query's or the key's."""
        if node[0] == "iota":
            return ("iota", KEY, node[2]) if node[1] == self.form.position else node
        if node[0] == "array":
            letters = self.form.arrays[node[1]].replace(self.form.position, KEY)
            return ("array", self.form.sources[node[1]] if self.form.sources else node[1], letters)
        return (*node[:2], *map(self._same, node[2:])) if node[0] not in ("score", "const") else node


def _selected(which: Interval, no: Interval, yes: Interval) -> Interval:
    """Bounds of what is chosen: both operands' where either may be."""
    surely, never = which[0] >= 1.0, which[1] <= 0.0
    low = np.where(surely, yes[0], np.where(never, no[0], np.minimum(no[0], yes[0])))
    high = np.where(surely, yes[1], np.where(never, no[1], np.maximum(no[1], yes[1])))
    return low, high


def _corners(name: str, bounds: list[Interval]) -> Interval:
    """Bounds of a function that grows or falls with each operand: its least and largest at their ends."""
    if len(bounds) == 1:
        ends: list[Any] = [computed(name, [end], np) for end in bounds[0]]
    else:
        ends = [computed(name, [a, b], np) for a in bounds[0] for b in bounds[1]]
    ends = list(np.broadcast_arrays(*ends))
    if name == "mul":  # zero times any number is zero
        ends = [np.where(np.isnan(end), 0.0, end) for end in ends]
    unknown = np.isnan(np.stack(ends)).any(axis=0)
    return np.where(unknown, -np.inf, np.min(ends, axis=0)), np.where(unknown, np.inf, np.max(ends, axis=0))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RingOrder:
    """Steps of a ring of `count` devices beside that of a device's own keys, on all devices the same.

    In `ahead` steps come the keys of the devices before, the next one first (all others' where that is count - 1); in
    `behind` steps those of the devices behind. `balanced`: each device has a part from the front and one from the end.
    """

    count: int
    ahead: int
    behind: int = 0
    balanced: bool = False

    @property
    def steps(self) -> int:
        return self.ahead + self.behind

    @property
    def is_whole(self) -> bool:
        """Whether the keys of all devices come."""
        return self.ahead == self.count - 1

    @property
    def computed_share(self) -> float:
        """The part of all blocks of scores that is computed: of a balanced ring half of each step but the first."""
        return (1.0 + self.steps / (2.0 if self.balanced else 1.0)) / self.count


@functools.cache
def ring_order(form: AttentionForm, positions: int, count: int) -> RingOrder:
    """The order with the fewest scores, then the fewest steps. `positions` are those of a device.

    Where all that a row has may be hidden by a number, that is what its weights are of: all scores are computed.
    """
    whole = RingOrder(count=count, ahead=count - 1)
    if count == 1 or not (seen := visibility(form, positions * count)).leaves_rows:
        return whole
    # Between positions of devices j apart lie from j - 1 to j + 1 devices' positions, exclusive.
    reach = [((j - 1) * positions + 1, (j + 1) * positions - 1) for j in range(1, count)]
    ahead = max((j for j, (near, far) in enumerate(reach, 1) if seen.between(near, far)), default=0)
    behind = max((j for j, (near, far) in enumerate(reach, 1) if seen.between(-far, -near)), default=0)
    in_order = RingOrder(count=count, ahead=ahead, behind=behind) if ahead + behind < count - 1 else whole
    if behind or positions % 2:
        return in_order
    balanced = dataclasses.replace(whole, balanced=True)
    return min(in_order, balanced, key=lambda order: (order.computed_share, order.steps))


def exchanges(count: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(source, target) of the first half of each of so many devices' positions, and of the second.

    Of 2 p parts, device i has parts 2 i and 2 i + 1 and takes i and 2 p - 1 - i, of which one has an even number.
    """

    def taker(part: int) -> int:
        return min(part, 2 * count - 1 - part)

    return [(i, taker(2 * i)) for i in range(count)], [(i, taker(2 * i + 1)) for i in range(count)]


@dataclasses.dataclass(frozen=True, slots=True)
class Positions:
    """Runs of equally many neighbouring positions: where each begins, which may be known on the device only."""

    starts: tuple[Any, ...]
    length: int

    @staticmethod
    def of_device(order: RingOrder, device: Any, positions: int) -> Positions:
        """Those that a device has while the ring runs."""
        if not order.balanced:
            return Positions((device * positions,), positions)
        half = positions // 2
        return Positions((device * half, (2 * order.count - 1 - device) * half), half)

    def numbers(self) -> Any:
        return jnp.concatenate([start + jnp.arange(self.length) for start in self.starts])

    def taken(self, array: Any, axis: int) -> Any:
        """Of an array of all positions those of the runs."""
        if array.shape[axis] == self.length * len(self.starts):
            return array
        parts = [lax.dynamic_slice_in_dim(array, start, self.length, axis) for start in self.starts]
        return jnp.concatenate(parts, axis) if len(parts) > 1 else parts[0]

    def half(self, which: int) -> Positions:
        """The first (0) or the second (1) of two runs."""
        return Positions(self.starts[which : which + 1], self.length)
