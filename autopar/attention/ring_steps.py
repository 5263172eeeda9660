"""A ring in whose steps a kernel runs: the queries of a device, and the keys and values that have come to it.

A kernel gives the result of a step, and the logarithm of each row's sum, by which results of several steps are brought
to one scale. In the backward pass it takes the result and the sum of all steps, and gives the part of the gradients
that comes of one. What comes next is on its way while a step is computed.

Under a causal mask, positions in order would leave the last device with all steps and the first with one. Of 2 p parts
of the positions each device therefore takes one from the front and the one as far from the end (Brandon et al.,
"Striped Attention", 2023; the order of zigzag in Zhu, "ring-flash-attention", 2024): queries, keys and values change
places before the first step, and results after the last. Then each step but the first, which is a causal one, has half
its scores hidden wholly, the half of the queries or that of the keys, on every device. Source of the backward pass's
use of whole sums: Liu et al., "Ring Attention with Blockwise Transformers", 2023.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax

from autopar.attention import ring
from autopar.attention.form import KEY, AttentionForm, Gradients, exact_type
from autopar.attention.kernels import KERNEL_CALLS, CanonicalShape, Kernel
from autopar.attention.masks import distance_mask
from autopar.attention.ring import HERE, Places

_POSITIONS = 2  # the dimension of positions of (examples, heads, positions, width)

# Blocks of XLA's as a kernel: queries of groups of heads that share keys.
_GROUPED: dict[str, Any] = {
    "query": "bhgqd", "key": "bhkd", "value": "bhke", "out": "bhgqe", "rows": "bhgq", "position": "q", "arrays": (),
}  # fmt: skip
_GRADIENTS = Gradients(out="bhgqe", query="bhgqd", key="bhkd", value="bhke")
_HIDDEN = -1e30


def forward(
    form: AttentionForm, kernel: Kernel, places: Places, query: Any, key: Any, value: Any
) -> tuple[Any, Any, Any]:
    """As `ring.forward`; the largest of each row is the logarithm of its sum, and the sum one."""
    shape, steps = CanonicalShape(form, query), _steps(form, kernel, places, query)
    q, k, v = steps.placed(shape.operands(query, key, value))
    done = steps.own(q, k, v)

    def turn(carry: Any, step: Any) -> tuple[Any, None]:
        moving, done = carry
        arriving = steps.next(moving, 1)
        return (arriving, _joined(done, steps.other(q, moving, steps.here >= step))), None

    moving, count = steps.next((k, v), 1), steps.count
    if count > 2:
        (moving, done), _ = lax.scan(turn, (moving, done), jnp.arange(1, count - 1))
    out, log_sum = _joined(done, steps.other(q, moving, steps.here >= count - 1))
    out, log_sum = steps.placed_back((out.astype(v.dtype), log_sum))
    rows = shape.back(log_sum, form.rows, form.position)
    return shape.back(out, form.out, form.position), rows, jnp.ones_like(rows)


def backward(
    form: AttentionForm,
    gradients: Gradients,
    kernel: Kernel,
    places: Places,
    operands: tuple[Any, Any, Any],
    saved: tuple[Any, Any, Any],
    change: Any,
) -> tuple[Any, Any, Any]:
    """As `ring.backward`."""
    shape, steps = CanonicalShape(form, operands[0]), _steps(form, kernel, places, operands[0])
    # What changed places and came round in the forward pass does so again, rather than being kept until now.
    query, key, value, change = lax.optimization_barrier((*operands, change))
    out = shape.into(saved[0], form.out, form.position)
    largest, total = (shape.into(a, form.rows, form.position) for a in saved[1:])
    change = shape.into(change, gradients.out, form.position)
    q, k, v, *rows = steps.placed_again((*shape.operands(query, key, value), out, largest + jnp.log(total), change))
    count = steps.count

    def turn(carry: Any, step: Any) -> tuple[Any, None]:
        moving, of_query, sums = carry
        arriving, arrived = steps.next(moving, -1), steps.next(sums, -1)
        more, *of_keys = steps.other_back(q, moving, rows, steps.here + step >= count)
        return (arriving, of_query + more, _added(arrived, of_keys)), None

    # Sums begin with the first keys that come, go along with them, a step behind, and are at home after the last.
    of_query, *own = steps.own_back(q, k, v, rows)
    moving = steps.next((k, v), -1)
    more, *of_keys = steps.other_back(q, moving, rows, steps.here + 1 >= count)
    of_query, sums = of_query + more, tuple(of_keys)
    if count > 2:
        moving = steps.next(moving, -1)
        carry = (moving, of_query, sums)
        if count > 3:
            carry, _ = lax.scan(turn, carry, jnp.arange(2, count - 1))
        moving, of_query, sums = carry
        arrived = steps.next(sums, -1)
        more, *of_keys = steps.other_back(q, moving, rows, steps.here + (count - 1) >= count)
        of_query, sums = of_query + more, _added(arrived, of_keys)
    of_key, of_value = _added(own, steps.next(sums, -1))
    made = steps.placed_back((of_query.astype(q.dtype), of_key.astype(k.dtype), of_value.astype(v.dtype)))
    return (
        shape.back(made[0], gradients.query, form.position),
        shape.back(made[1], gradients.key, KEY),
        shape.back(made[2], gradients.value, KEY),
    )


def _added(some: Any, others: Any) -> tuple[Any, ...]:
    return tuple(a + b for a, b in zip(some, others, strict=True))


def _joined(one: tuple[Any, Any], other: tuple[Any, Any]) -> tuple[Any, Any]:
    """(result, logarithm of the sum) of the keys of both; of the first each row has seen some."""
    log_sum = jnp.logaddexp(one[1], other[1])
    by = [jnp.exp(part[1] - log_sum)[..., None] for part in (one, other)]
    return one[0] * by[0] + other[0] * by[1], log_sum


def _steps(form: AttentionForm, kernel: Kernel, places: Places, query: Any) -> _Steps:
    count = places.size(form.position)
    mask = distance_mask(form, query.shape[form.query.index(form.position)] * count)
    assert mask is not None, "the kernel was chosen for its mask"
    return _Steps(
        kernel=kernel,
        scale=mask.scale,
        is_causal=mask.causal,
        axes=places.axes[form.position],
        count=count,
        here=places.index(form.position),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Steps:
    """The steps of a ring on one device: which kernel runs them, and where its parts come from."""

    kernel: Kernel
    scale: float
    is_causal: bool
    axes: tuple[str, ...]
    count: int
    here: Any

    def next(self, arrays: Any, step: int) -> Any:
        """What the device before had (a step of 1) or the one behind (-1)."""
        return ring.passed_on(arrays, self.axes, self.count, step)

    # Positions

    def placed(self, arrays: Any) -> list[Any]:
        """Of each array the two parts that a device takes under a causal mask, the earlier one first."""
        return [self._placed(a, 1) if self.is_causal else a for a in arrays]

    def placed_again(self, arrays: Any) -> list[Any]:
        """In the backward pass: pairs in another order, so that no compiler makes one permute of both passes'."""
        return [self._placed(a, -1) if self.is_causal else a for a in arrays]

    def placed_back(self, arrays: Any) -> list[Any]:
        return [self._placed_back(a) if self.is_causal else a for a in arrays]

    def _placed(self, array: Any, order: int) -> Any:
        halves = jnp.split(array, 2, axis=_POSITIONS)
        even, odd = (
            self._exchanged(half, pairs[::order]) for half, pairs in zip(halves, exchanges(self.count), strict=True)
        )
        is_even = self.here % 2 == 0
        return jnp.concatenate([jnp.where(is_even, even, odd), jnp.where(is_even, odd, even)], axis=_POSITIONS)

    def _placed_back(self, array: Any) -> Any:
        early, late = jnp.split(array, 2, axis=_POSITIONS)
        is_even = self.here % 2 == 0
        halves = jnp.where(is_even, early, late), jnp.where(is_even, late, early)
        back = [
            self._exchanged(half, [(target, source) for source, target in pairs])
            for half, pairs in zip(halves, exchanges(self.count), strict=True)
        ]
        return jnp.concatenate(back, axis=_POSITIONS)

    def _exchanged(self, half: Any, pairs: list[tuple[int, int]]) -> Any:
        return lax.ppermute(half, self.axes, pairs) if any(i != j for i, j in pairs) else half

    # Results: (that of the step, logarithm of the sum of each row), in 32 bits

    def own(self, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        """Of the device's own keys. Its two parts are in order, so that the mask is that of neighbouring positions."""
        return self._forward(q, k, v, self.is_causal)

    def other(self, q: Any, keys: tuple[Any, Any], is_earlier: Any) -> tuple[Any, Any]:
        """Of the keys of another device; under a causal mask those of a device before see all queries with the first
        half of their keys, those of one behind see the second half of the queries with all.
        """
        k, v = keys
        if not self.is_causal:
            return self._forward(q, k, v, False)

        def first_keys() -> tuple[Any, Any]:
            return self._forward(q, _first(k), _first(v), False)

        def last_queries() -> tuple[Any, Any]:
            out, log_sum = self._forward(_last(q), k, v, False)
            return _behind(out, 0.0), _behind(log_sum, -jnp.inf)

        return lax.cond(is_earlier, first_keys, last_queries)

    def _forward(self, q: Any, k: Any, v: Any, causal: bool) -> tuple[Any, Any]:
        if self.kernel is Kernel.BLOCKS:
            form = _grouped(self.scale, causal, exact_type(q))
            out, largest, total = ring.forward(form, HERE, _in_groups(q, k), k, v)
            out, largest, total = (a.reshape((*q.shape[:2], *a.shape[3:])) for a in (out, largest, total))
        else:
            run, _ = KERNEL_CALLS[self.kernel]
            out, largest, total = run(q, k, v, scale=self.scale, causal=causal)
        return out.astype(exact_type(q)), largest + jnp.log(total)

    # Gradients of queries, keys and values, in 32 bits. `rows`: result, logarithm of the sum, gradient of the result

    def own_back(self, q: Any, k: Any, v: Any, rows: Any) -> tuple[Any, Any, Any]:
        return self._backward(q, k, v, rows, self.is_causal)

    def other_back(self, q: Any, keys: tuple[Any, Any], rows: Any, is_earlier: Any) -> tuple[Any, Any, Any]:
        k, v = keys
        if not self.is_causal:
            return self._backward(q, k, v, rows, False)

        def first_keys() -> tuple[Any, Any, Any]:
            of_query, *of_keys = self._backward(q, _first(k), _first(v), rows, False)
            of_key, of_value = (_before(a, 0.0) for a in of_keys)
            return of_query, of_key, of_value

        def last_queries() -> tuple[Any, Any, Any]:
            of_query, of_key, of_value = self._backward(_last(q), k, v, [_last(a) for a in rows], False)
            return _behind(of_query, 0.0), of_key, of_value

        return lax.cond(is_earlier, first_keys, last_queries)

    def _backward(self, q: Any, k: Any, v: Any, rows: Any, causal: bool) -> tuple[Any, Any, Any]:
        out, log_sum, change = rows
        if self.kernel is Kernel.BLOCKS:
            form = _grouped(self.scale, causal, exact_type(q))
            grouped, out, log_sum, change = (_in_groups(a, k) for a in (q, out, log_sum, change))
            saved = (out, log_sum, jnp.ones_like(log_sum))
            made = ring.backward(form, _GRADIENTS, HERE, (grouped, k, v), saved, change, ())
            of_query, of_key, of_value = made[0].reshape(q.shape), made[1], made[2]
        else:
            _, run = KERNEL_CALLS[self.kernel]
            saved = (out, log_sum, jnp.ones_like(log_sum))
            of_query, of_key, of_value = run(q, k, v, saved, change, scale=self.scale, causal=causal)
        exact = exact_type(q)
        return of_query.astype(exact), of_key.astype(exact), of_value.astype(exact)


def exchanges(count: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(source, target) of the first half of each of so many devices' positions, and of the second.

    Of 2 p parts, device i has parts 2 i and 2 i + 1 and takes i and 2 p - 1 - i, of which one has an even number.
    """

    def taker(part: int) -> int:
        return min(part, 2 * count - 1 - part)

    return [(i, taker(2 * i)) for i in range(count)], [(i, taker(2 * i + 1)) for i in range(count)]


def _first(array: Any) -> Any:
    return jnp.split(array, 2, axis=_POSITIONS)[0]


def _last(array: Any) -> Any:
    return jnp.split(array, 2, axis=_POSITIONS)[1]


def _before(array: Any, number: float) -> Any:
    """An array in front of as many positions with one number."""
    return jnp.concatenate([array, jnp.full_like(array, number)], axis=_POSITIONS)


def _behind(array: Any, number: float) -> Any:
    return jnp.concatenate([jnp.full_like(array, number), array], axis=_POSITIONS)


def _in_groups(array: Any, key: Any) -> Any:
    """(examples, heads of keys, queries of each, ...) of an array of all heads of queries."""
    return array.reshape((*key.shape[:2], -1, *array.shape[2:]))


def _grouped(scale: float, causal: bool, exact: Any) -> AttentionForm:
    scaled = ("mul", (), ("score",), ("const", scale, str(jnp.dtype(exact))))
    seen = ("ge", (), ("iota", "q", "int32"), ("iota", "k", "int32"))
    hidden = ("const", _HIDDEN, str(jnp.dtype(exact)))
    return AttentionForm(score=("select_n", (), seen, hidden, scaled) if causal else scaled, **_GROUPED)
