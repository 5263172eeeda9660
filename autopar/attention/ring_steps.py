"""A ring step by step: the queries of a device, and the keys and values that have come to it.

`autopar.attention.ring_order` says whose keys come, and `autopar.attention.step_kernels` what computes a step. What
comes next is on its way while a step is computed. In the backward pass a step takes the result and the sum of all
steps, and gives the part of the gradients that comes of one (Liu et al., "Ring Attention with Blockwise Transformers",
2023).

In a balanced ring queries, keys and values change places before the first step, and results after the last. Then each
step but the first has half its scores hidden wholly, the half of the queries or that of the keys, on every device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from autopar.attention import ring
from autopar.attention.form import AttentionForm, Gradients
from autopar.attention.kernels import Kernel
from autopar.attention.ring import At, Places
from autopar.attention.ring_order import Positions, RingOrder, exchanges, ring_order
from autopar.attention.step_kernels import Arrays, StepKernel, step_kernel


def forward(
    form: AttentionForm, kernel: Kernel, places: Places, query: Any, key: Any, value: Any, *arrays: Any
) -> tuple[Any, Any, Any]:
    """As `ring.forward`; the largest of each row is the logarithm of its sum, and the sum one."""
    steps = _steps(form, None, kernel, places, query, arrays)
    runs = steps.runs
    q, k, v = steps.placed(runs.operands(query, key, value), runs.axes.operands)
    done = runs.forward(q, k, v, steps.own, True)
    for way, count in steps.ways():

        def turn(carry: Any, step: Any, way: int = way) -> tuple[Any, None]:
            moving, done = carry
            arriving = steps.next(moving, way)
            return (arriving, runs.joined(done, steps.other(q, moving, steps.source(way, step)))), None

        moving = steps.next((k, v), way)
        if count > 1:
            (moving, done), _ = lax.scan(turn, (moving, done), jnp.arange(1, count))
        done = runs.joined(done, steps.other(q, moving, steps.source(way, count)))
    out, rows = runs.native_result(*steps.placed_back(runs.result(done, v.dtype), runs.axes.result))
    return out, rows, jnp.ones_like(rows)


def backward(
    form: AttentionForm,
    gradients: Gradients,
    kernel: Kernel,
    places: Places,
    operands: tuple[Any, Any, Any],
    saved: tuple[Any, Any, Any],
    args: tuple[Any, ...],
) -> tuple[Any, ...]:
    """As `ring.backward`; `args` are the gradient of the result, and what scores read."""
    # What changed places and came round in the forward pass does so again, rather than being kept until now.
    query, key, value, change = lax.optimization_barrier((*operands, args[0]))
    steps = _steps(form, gradients, kernel, places, query, args[1:])
    runs, (out, largest, total) = steps.runs, saved
    q, k, v = steps.placed(runs.operands(query, key, value), runs.axes.operands)
    rows = steps.placed(runs.rows(out, largest + jnp.log(total), change), runs.axes.rows)
    of_query, *own = runs.backward(q, k, v, rows, steps.own, True)
    sums = tuple(own)
    for way, count in steps.ways():
        of_query, sums = _way_back(steps, (q, k, v, rows), (of_query, sums), way, count)
    made = of_query.astype(q.dtype), *(a.astype(b.dtype) for a, b in zip(sums, (k, v), strict=True))
    return runs.native_gradients(*steps.placed_back(made, runs.axes.gradients))


def _way_back(steps: _Steps, operands: Any, done: tuple[Any, Arrays], way: int, count: int) -> tuple[Any, Arrays]:
    """Gradients of the queries, and of the device's keys and values, with those of `count` steps.

    Sums begin with the first keys that come, go along with them, a step behind, and come home after the last.
    """
    (q, k, v, rows), (of_query, own) = operands, done

    def turn(carry: Any, step: Any) -> tuple[Any, None]:
        moving, of_query, sums = carry
        arriving = steps.next(moving, way)
        return (arriving, *added(moving, of_query, sums, step)), None

    def added(moving: Any, of_query: Any, sums: Arrays, step: Any) -> tuple[Any, Arrays]:
        arrived = steps.next(sums, way)
        more, *of_keys = steps.other_back(q, moving, rows, steps.source(way, step))
        return of_query + more, _added(arrived, of_keys)

    moving = steps.next((k, v), way)
    more, *of_keys = steps.other_back(q, moving, rows, steps.source(way, 1))
    of_query, sums = of_query + more, tuple(of_keys)
    if count > 1:
        carry = (steps.next(moving, way), of_query, sums)
        if count > 2:
            carry, _ = lax.scan(turn, carry, jnp.arange(2, count))
        of_query, sums = added(*carry, count)
    return of_query, _added(own, steps.next(sums, -way * count))


def _added(some: Any, others: Any) -> tuple[Any, ...]:
    return tuple(a + b for a, b in zip(some, others, strict=True))


def _steps(
    form: AttentionForm, gradients: Gradients | None, kernel: Kernel, places: Places, query: Any, arrays: Sequence[Any]
) -> _Steps:
    positions, count = query.shape[form.query.index(form.position)], places.size(form.position)
    order, here = ring_order(form, positions, count), places.index(form.position)
    steps = _Steps(
        runs=step_kernel(form, gradients, kernel, places, query),
        order=order,
        axes=places.axes[form.position],
        here=here,
        positions=positions,
        array_axes=tuple(names.find(form.position) for names in form.arrays),
        is_forward=gradients is None,
        own=At(Positions.of_device(order, here, positions), Positions.of_device(order, here, positions), ()),
    )
    placed = (
        steps.placed((a,), (axis,))[0] if axis >= 0 else a for a, axis in zip(arrays, steps.array_axes, strict=True)
    )
    return dataclasses.replace(steps, own=dataclasses.replace(steps.own, arrays=tuple(placed)))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Steps:
    """The steps of a ring on one device: what runs them, and where its parts come from.

    `array_axes`: the dimension of queries' positions of each array that scores read, -1 of those that have none.
    `own`: the device's positions, and those arrays.
    """

    runs: StepKernel
    order: RingOrder
    axes: tuple[str, ...]
    here: Any
    positions: int
    array_axes: tuple[int, ...]
    is_forward: bool
    own: At

    def ways(self) -> list[tuple[int, int]]:
        """(1 for keys of devices before, -1 for those behind; steps): all others' come the other way backward."""
        if self.order.is_whole:
            return [(1 if self.is_forward else -1, self.order.ahead)]
        return [(way, steps) for way, steps in ((1, self.order.ahead), (-1, self.order.behind)) if steps]

    def source(self, way: int, step: Any) -> Any:
        """The device whose keys are here in a step."""
        return (self.here - way * step) % self.order.count

    def next(self, arrays: Any, places: int) -> Any:
        """What the device so many places before had, or behind."""
        order = 1 if self.is_forward else -1
        return ring.passed_on(arrays, self.axes, self.order.count, places, order)

    # Positions

    def placed(self, arrays: Arrays, axes: tuple[int, ...]) -> Arrays:
        """Of each array the two parts that a device takes in a balanced ring, the earlier one first.

        In the backward pass pairs are in another order, so that no compiler makes one permute of both passes'.
        """
        if not self.order.balanced:
            return arrays
        return tuple(self._placed(a, axis) for a, axis in zip(arrays, axes, strict=True))

    def placed_back(self, arrays: Arrays, axes: tuple[int, ...]) -> Arrays:
        if not self.order.balanced:
            return arrays
        return tuple(self._placed_back(a, axis) for a, axis in zip(arrays, axes, strict=True))

    def _placed(self, array: Any, axis: int) -> Any:
        halves, order = jnp.split(array, 2, axis), 1 if self.is_forward else -1
        even, odd = (
            self._exchanged(half, pairs[::order])
            for half, pairs in zip(halves, exchanges(self.order.count), strict=True)
        )
        is_even = self.here % 2 == 0
        return jnp.concatenate([jnp.where(is_even, even, odd), jnp.where(is_even, odd, even)], axis)

    def _placed_back(self, array: Any, axis: int) -> Any:
        early, late = jnp.split(array, 2, axis)
        is_even = self.here % 2 == 0
        halves = jnp.where(is_even, early, late), jnp.where(is_even, late, early)
        back = [
            self._exchanged(half, [(target, source) for source, target in pairs])
            for half, pairs in zip(halves, exchanges(self.order.count), strict=True)
        ]
        return jnp.concatenate(back, axis)

    def _exchanged(self, half: Any, pairs: list[tuple[int, int]]) -> Any:
        return lax.ppermute(half, self.axes, pairs) if any(i != j for i, j in pairs) else half

    # Steps with the keys of another device. In a balanced ring those of a device before see all queries with the first
    # half of their keys, those of one behind see the second half of the queries with all

    def at(self, source: Any) -> At:
        return dataclasses.replace(self.own, keys=Positions.of_device(self.order, source, self.positions))

    def at_halves(self, source: Any) -> tuple[At, At]:
        """The first half of the keys; the last half of the queries."""
        at = self.at(source)
        pairs = zip(at.arrays, self.array_axes, strict=True)
        last = tuple(_last(a, axis) if axis >= 0 else a for a, axis in pairs)
        return dataclasses.replace(at, keys=at.keys.half(0)), At(at.queries.half(1), at.keys, last)

    def other(self, q: Any, keys: Arrays, source: Any) -> Arrays:
        runs, (k, v) = self.runs, keys
        if not self.order.balanced:
            return runs.forward(q, k, v, self.at(source), False)
        of_query, of_key, of_value = runs.axes.operands
        first, last = self.at_halves(source)

        def first_keys() -> Arrays:
            return runs.forward(q, _first(k, of_key), _first(v, of_value), first, False)

        def last_queries() -> Arrays:
            made = runs.forward(_last(q, of_query), k, v, last, False)
            nothing = (0.0, -jnp.inf, 0.0)[: len(made)]
            return tuple(_behind(a, n, axis) for a, n, axis in zip(made, nothing, runs.axes.part, strict=True))

        return lax.cond(source < self.here, first_keys, last_queries)

    def other_back(self, q: Any, keys: Arrays, rows: Arrays, source: Any) -> Arrays:
        runs, (k, v) = self.runs, keys
        if not self.order.balanced:
            return runs.backward(q, k, v, rows, self.at(source), False)
        of_query, of_key, of_value = runs.axes.operands
        first, last = self.at_halves(source)
        made_axes = runs.axes.gradients

        def first_keys() -> Arrays:
            made = runs.backward(q, _first(k, of_key), _first(v, of_value), rows, first, False)
            return made[0], *(_before(a, axis) for a, axis in zip(made[1:], made_axes[1:], strict=True))

        def last_queries() -> Arrays:
            late = tuple(_last(a, axis) for a, axis in zip(rows, runs.axes.rows, strict=True))
            made = runs.backward(_last(q, of_query), k, v, late, last, False)
            return _behind(made[0], 0.0, made_axes[0]), *made[1:]

        return lax.cond(source < self.here, first_keys, last_queries)


def _first(array: Any, axis: int) -> Any:
    return jnp.split(array, 2, axis)[0]


def _last(array: Any, axis: int) -> Any:
    return jnp.split(array, 2, axis)[1]


def _before(array: Any, axis: int) -> Any:
    """An array in front of as many positions with zeros."""
    return jnp.concatenate([array, jnp.zeros_like(array)], axis)


def _behind(array: Any, number: float, axis: int) -> Any:
    """An array behind as many positions with one number."""
    return jnp.concatenate([jnp.full_like(array, number), array], axis)
