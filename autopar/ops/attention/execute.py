"""Runs a pass of attention on one device's part: by a library's kernel or in blocks, alone or in a ring."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import jax.numpy as jnp
from jax import lax

from autopar.common.jax_local import ScoreOptions
from autopar.ops.attention import kernels, ring
from autopar.ops.attention.form import KEY, AttentionForm, DistanceMask, Gradients, distance_mask, exact_type
from autopar.ops.attention.kernels import KERNEL_CALLS, CanonicalShape, Kernel
from autopar.ops.attention.ring import At, Places
from autopar.ops.attention.ring_order import Positions, RingOrder, exchanges, ring_order

# What computes one step of a ring: a kernel of a library, or blocks of XLA's.
#
# Results of a part of the keys are joined by the largest or the sum of each row. The arrays lie as the kernel takes
# them.


Arrays = tuple[Any, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """The dimension of positions of the arrays of a step."""

    operands: tuple[int, ...]  # queries, keys and values
    rows: tuple[int, ...]  # the result, the logarithm of each row's sum, and the gradient of the result
    part: tuple[int, ...]  # the result of a part of the keys
    result: tuple[int, ...]  # the result, and the logarithm of each row's sum
    gradients: tuple[int, ...]  # of queries, keys and values


class StepKernel(Protocol):
    """What computes steps, and how their arrays lie."""

    axes: Axes

    def operands(self, query: Any, key: Any, value: Any) -> Arrays: ...

    def rows(self, out: Any, log_sum: Any, change: Any) -> Arrays: ...

    def forward(self, q: Any, k: Any, v: Any, at: At, is_own: bool) -> Arrays:
        """The result of a part of the keys."""
        ...

    def joined(self, one: Arrays, other: Arrays) -> Arrays:
        """The result of both parts; of the first each row has seen some keys."""
        ...

    def result(self, part: Arrays, dtype: Any) -> Arrays:
        """(result, logarithm of the sum of each row) of all keys."""
        ...

    def backward(self, q: Any, k: Any, v: Any, rows: Arrays, at: At, is_own: bool) -> Arrays:
        """Gradients of queries, keys and values, of a part of the keys, in 32 bits."""
        ...

    def native_result(self, out: Any, log_sum: Any) -> Arrays:
        """The results as the operation has them."""
        ...

    def native_gradients(self, of_query: Any, of_key: Any, of_value: Any) -> Arrays: ...


def step_kernel(
    form: AttentionForm, gradients: Gradients | None, kernel: Kernel, places: Places, query: Any
) -> StepKernel:
    if kernel is Kernel.BLOCKS:
        return _BlockSteps(form, gradients, places)
    mask = distance_mask(form, query.shape[form.query.index(form.position)] * places.size(form.position))
    assert mask is not None, "the kernel was chosen for its mask"
    return _KernelSteps(form, gradients, kernel, mask, query)


class _KernelSteps:
    """Steps of a library's kernel: (examples, heads, positions, width)."""

    axes = Axes(operands=(2, 2, 2), rows=(2, 2, 2), part=(2, 2), result=(2, 2), gradients=(2, 2, 2))

    def __init__(
        self, form: AttentionForm, gradients: Gradients | None, kernel: Kernel, mask: DistanceMask, query: Any
    ) -> None:
        self.form, self.gradients, self.kernel, self.mask = form, gradients, kernel, mask
        self.shape, self.exact = CanonicalShape(form, query), exact_type(query)

    def operands(self, query: Any, key: Any, value: Any) -> Arrays:
        return self.shape.operands(query, key, value)

    def rows(self, out: Any, log_sum: Any, change: Any) -> Arrays:
        form, gradients = self.form, self.gradients
        assert gradients is not None, "rows are read in a backward pass"
        names = (form.out, form.rows, gradients.out)
        return tuple(self.shape.into(a, n, form.position) for a, n in zip((out, log_sum, change), names, strict=True))

    def forward(self, q: Any, k: Any, v: Any, at: At, is_own: bool) -> Arrays:
        run, _ = KERNEL_CALLS[self.kernel]
        out, largest, total = run(q, k, v, self._options(at, is_own))
        return out.astype(self.exact), largest + jnp.log(total)

    def joined(self, one: Arrays, other: Arrays) -> Arrays:
        log_sum = jnp.logaddexp(one[1], other[1])
        by = [jnp.exp(part[1] - log_sum)[..., None] for part in (one, other)]
        return one[0] * by[0] + other[0] * by[1], log_sum

    def result(self, part: Arrays, dtype: Any) -> Arrays:
        return part[0].astype(dtype), part[1]

    def backward(self, q: Any, k: Any, v: Any, rows: Arrays, at: At, is_own: bool) -> Arrays:
        out, log_sum, change = rows
        _, run = KERNEL_CALLS[self.kernel]
        saved = (out, log_sum, jnp.ones_like(log_sum))
        made = run(q, k, v, saved, change, self._options(at, is_own))
        return tuple(a.astype(self.exact) for a in made)

    def _options(self, at: At, is_own: bool) -> ScoreOptions:
        mask, arrays = self.mask, [*at.arrays]
        if mask.segments is not None:
            of_key = mask.segments[1]
            arrays[of_key] = at.keys.taken(arrays[of_key], self.form.arrays[of_key].index(KEY))
        # Its own positions are in order on each device, so that the mask is that of neighbouring ones.
        causal = mask.causal and is_own
        return ScoreOptions(mask.scale, causal, segments=self.shape.segments(mask, arrays))

    def native_result(self, out: Any, log_sum: Any) -> Arrays:
        form = self.form
        return self.shape.back(out, form.out, form.position), self.shape.back(log_sum, form.rows, form.position)

    def native_gradients(self, of_query: Any, of_key: Any, of_value: Any) -> Arrays:
        assert self.gradients is not None, "gradients are made in a backward pass"
        names = (self.gradients.query, self.form.position), (self.gradients.key, KEY), (self.gradients.value, KEY)
        return tuple(self.shape.back(a, *name) for a, name in zip((of_query, of_key, of_value), names, strict=True))


class _BlockSteps:
    """Steps in blocks of XLA's, of any form: arrays lie as the operation has them."""

    def __init__(self, form: AttentionForm, gradients: Gradients | None, places: Places) -> None:
        self.form, self.gradients, self.places = form, gradients, places
        at, rows = form.position, form.rows.index(form.position)
        made = gradients or Gradients(out=form.out, query=form.query, key=form.key, value=form.value)
        self.axes = Axes(
            operands=(form.query.index(at), form.key.index(KEY), form.value.index(KEY)),
            rows=(form.out.index(at), rows, made.out.index(at)),
            part=(ring.weighed(form).index(at), rows, rows),
            result=(form.out.index(at), rows),
            gradients=(made.query.index(at), made.key.index(KEY), made.value.index(KEY)),
        )

    def operands(self, query: Any, key: Any, value: Any) -> Arrays:
        return query, key, value

    def rows(self, out: Any, log_sum: Any, change: Any) -> Arrays:
        return out, log_sum, change

    def forward(self, q: Any, k: Any, v: Any, at: At, is_own: bool) -> Arrays:
        return ring.block_forward(self.form, self.places, at, q, k, v)

    def joined(self, one: Arrays, other: Arrays) -> Arrays:
        return ring.joined(self.form, one, other)

    def result(self, part: Arrays, dtype: Any) -> Arrays:
        return ring.weighed_result(self.form, part, dtype), part[1] + jnp.log(part[2])

    def backward(self, q: Any, k: Any, v: Any, rows: Arrays, at: At, is_own: bool) -> Arrays:
        assert self.gradients is not None, "gradients are made in a backward pass"
        out, log_sum, change = rows
        along = ring.change_along(self.form, self.gradients, out, change)
        # Weights of a row that sees nothing have no number, as plain jax's.
        total = jnp.where(jnp.isneginf(log_sum), 0.0, jnp.ones_like(log_sum))
        given = change, log_sum, total, along
        return ring.block_backward(self.form, self.gradients, self.places, at, (q, k, v), given)

    def native_result(self, out: Any, log_sum: Any) -> Arrays:
        return out, log_sum

    def native_gradients(self, of_query: Any, of_key: Any, of_value: Any) -> Arrays:
        return of_query, of_key, of_value


# A ring step by step: the queries of a device, and the keys and values that have come to it.
#
# `autopar.ops.attention.ring_order` says whose keys come; what computes a step is above. What
# comes next is on its way while a step is computed. In the backward pass a step takes the result and the sum of all
# steps, and gives the part of the gradients that comes of one (Liu et al., "Ring Attention with Blockwise
# Transformers", 2023).
#
# In a balanced ring queries, keys and values change places before the first step, and results after the last. Then each
# step but the first has half its scores hidden wholly, the half of the queries or that of the keys, on every device.


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


def run(
    form: AttentionForm, gradients: Gradients | None, places: Places, args: Sequence[Any], library: Kernel
) -> tuple[Any, ...]:
    """Forward, or with gradients backward."""
    read = args[len(args) - len(form.arrays) :]
    shapes, dtypes = [a.shape for a in args[:3]], [a.dtype for a in (*args[:3], *read)]
    count, positions = places.size(form.position), shapes[0][form.query.index(form.position)]
    kernel = kernels.kernel_of(form, shapes, dtypes, library, count)
    steps = kernels.runs_in_steps(form, kernel, positions, count)
    if kernel is Kernel.BLOCKS and not steps:
        return ring.run(form, gradients, places, args)
    if gradients is None:
        return forward(form, kernel, places, *args) if steps else kernels.forward(form, kernel, *args)
    query, key, value, out, largest, total, *rest = args
    passed = (query, key, value), (out, largest, total)
    if steps:
        return backward(form, gradients, kernel, places, *passed, tuple(rest))
    return kernels.backward(form, gradients, kernel, *passed, *rest)
