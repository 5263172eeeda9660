"""Ring attention: attention as one operation over sharded positions, in which no device holds all scores.

Keys and values come in blocks. Of each row of scores a running maximum and a running sum are kept, with which the parts
of the weighed sum are brought to one scale (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018).
Where positions are split, each device holds the queries of its positions, and the keys and values of all of them come
round in p-1 permutes; in the backward pass the sums of their gradients go with them and arrive where they belong
(Li et al., "Sequence Parallelism", 2021; Liu et al., "Ring Attention with Blockwise Transformers", 2023). The queries
of a device are taken block by block, so that it holds scores of one block only; one device is a ring of one.

Where a kernel of a library runs attention, and under masks that hide whole blocks, rings run as
`autopar.ops.attention.execute` says. What it does not do: dropout.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autopar.common import jax_compat, jax_local
from autopar.ir.graph import Factor, FactorKind, NamedDims, Rule
from autopar.ir.primitives import ATTENTION_PASSES
from autopar.ops.attention.form import (
    KEY,
    NONE,
    AttentionForm,
    Expression,
    Gradients,
    computed,
    exact_type,
    goes_round,
    has_score,
    letters,
    sizes_of,
)
from autopar.ops.attention.ring_order import Positions

# Queries of a block: enough that products are large, few enough that the scores of a block are a small part of all.
QUERY_BLOCK = 512


def query_block(positions: int) -> int:
    """Queries of a block: as many as divide the positions, at most `QUERY_BLOCK`; all where that leaves small ones."""
    most = next(n for n in range(min(positions, QUERY_BLOCK), 0, -1) if positions % n == 0)
    return most if 4 * most >= min(positions, QUERY_BLOCK) else positions


@dataclasses.dataclass(frozen=True, slots=True)
class QueryBlocks:
    """The queries of a device, taken block by block."""

    position: str
    positions: int

    def joined(
        self, function: Callable[..., tuple[Any, ...]], operands: Sequence[tuple[Any, str]], results: Sequence[str]
    ) -> tuple[Any, ...]:
        """`function(operands of a block...)` for each block: results with the queries' positions stand
        side by side, others are added up. Operands and results with the names of their dimensions.
        """
        size = query_block(self.positions)
        if size == self.positions:
            return function(*(array for array, _ in operands))
        parts = [self._cut(array, names.index(self.position), size) for array, names in operands]
        shapes = jax.eval_shape(function, *(part[0] for part in parts))
        is_row = [self.position in names for names in results]
        sums = [jnp.zeros(s.shape, s.dtype) for s, row in zip(shapes, is_row, strict=True) if not row]

        def body(sums: list[Any], of_block: list[Any]) -> tuple[list[Any], list[Any]]:
            made = function(*of_block)
            own = [a for a, row in zip(made, is_row, strict=True) if not row]
            return [a + b for a, b in zip(sums, own, strict=True)], [
                a for a, row in zip(made, is_row, strict=True) if row
            ]

        added, stacked = (iter(arrays) for arrays in lax.scan(body, sums, parts))
        return tuple(
            self._side_by_side(next(stacked), names.index(self.position)) if row else next(added)
            for names, row in zip(results, is_row, strict=True)
        )

    def _cut(self, array: Any, dim: int, size: int) -> Any:
        shape = (*array.shape[:dim], self.positions // size, size, *array.shape[dim + 1 :])
        return jnp.moveaxis(array.reshape(shape), dim, 0)

    def _side_by_side(self, stacked: Any, dim: int) -> Any:
        array = jnp.moveaxis(stacked, 0, dim)
        return array.reshape((*array.shape[:dim], self.positions, *array.shape[dim + 2 :]))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Which axes of a `shard_map` split which letter, and how many devices they are."""

    axes: Mapping[str, tuple[str, ...]]
    sizes: Mapping[str, int]

    def size(self, letter: str) -> int:
        n = 1
        for axis in self.axes.get(letter, ()):
            n *= self.sizes[axis]
        return n

    def index(self, letter: str) -> Any:
        """The number of this device's part."""
        axes = self.axes.get(letter, ())
        return lax.axis_index(axes) if axes else 0


HERE = Places(axes={}, sizes={})


# The passes on one device's part


def forward(
    form: AttentionForm, places: Places, query: Any, key: Any, value: Any, *arrays: Any
) -> tuple[Any, Any, Any]:
    """(result, largest score of each row, sum of each row's exponentials over that of the largest)."""
    here, count = places.index(form.position), places.size(form.position)
    queries, keys_of = _positions(form, query, key, here)

    def block(key: Any, value: Any, source: Any) -> tuple[Any, Any, Any]:
        at = At(queries, keys_of(source), tuple(arrays))
        return block_forward(form, places, at, query, key, value)

    def turn(carry: Any, step: Any) -> tuple[Any, None]:
        moving, done = carry
        moving = _next(moving, places, form.position, 1)
        return (moving, joined(form, done, block(moving[0], moving[1], (here - step) % count))), None

    done = block(key, value, here)
    if count > 1:
        (_, done), _ = lax.scan(turn, ((key, value), done), jnp.arange(1, count))
    return weighed_result(form, done, value.dtype), done[1], done[2]


def backward(
    form: AttentionForm,
    gradients: Gradients,
    places: Places,
    operands: tuple[Any, Any, Any],
    saved: tuple[Any, Any, Any],
    change: Any,
    arrays: Sequence[Any],
) -> tuple[Any, Any, Any]:
    """The gradients of query, key and value (`operands`), from that of the result (`change`).

    `saved` of the forward pass are the result, the largest score of each row, and the sum of its exponentials.
    """
    (query, key, value), (out, largest, total) = operands, saved
    here, count = places.index(form.position), places.size(form.position)
    queries, keys_of = _positions(form, query, key, here)
    # What came round in the forward pass comes round again, the other way, rather than being kept until now.
    key, value, change = lax.optimization_barrier((key, value, change))
    rows = (change, largest, total, change_along(form, gradients, out, change))

    def block(key: Any, value: Any, source: Any) -> tuple[Any, Any, Any]:
        at = At(queries, keys_of(source), tuple(arrays))
        return block_backward(form, gradients, places, at, (query, key, value), rows)

    def turn(carry: Any, step: Any) -> tuple[Any, None]:
        moving, of_query, sums = carry
        moving = _next(moving, places, form.position, -1)
        more_query, more_key, more_value = block(moving[0], moving[1], (here + step) % count)
        # What has come here belongs to the keys that are here, and moves on with them; the last move brings it home.
        sums = _next((sums[0] + more_key, sums[1] + more_value), places, form.position, -1)
        return (moving, of_query + more_query, sums), None

    of_query, own_key, own_value = block(key, value, here)
    if count > 1:
        nothing = (jnp.zeros_like(own_key), jnp.zeros_like(own_value))
        carry = ((key, value), of_query, nothing)
        (_, of_query, sums), _ = lax.scan(turn, carry, jnp.arange(1, count))
        own_key, own_value = own_key + sums[0], own_value + sums[1]
    return of_query.astype(query.dtype), own_key.astype(key.dtype), own_value.astype(value.dtype)


def _positions(form: AttentionForm, query: Any, key: Any, here: Any) -> tuple[Positions, Callable[[Any], Positions]]:
    """The positions of a device's queries, and those of the keys of each device."""
    of_queries, of_keys = query.shape[form.query.index(form.position)], key.shape[form.key.index(KEY)]
    return Positions((here * of_queries,), of_queries), lambda source: Positions((source * of_keys,), of_keys)


# One block of scores: of some queries, with the keys of one device


@dataclasses.dataclass(frozen=True, slots=True)
class At:
    """Where a block of scores lies: the positions of its queries and of its keys, and the arrays that its scores read:
    with positions of queries of these queries, with positions of keys of all keys.
    """

    queries: Positions
    keys: Positions
    arrays: tuple[Any, ...]


def block_forward(form: AttentionForm, places: Places, at: At, query: Any, key: Any, value: Any) -> tuple[Any, ...]:
    """(sums of values, largest score, sum of exponentials over that of the largest) of each row."""
    exact = exact_type(query)

    def of_queries(query: Any, numbers: Any, *arrays: Any) -> tuple[Any, Any, Any]:
        scores = _score(form, places, numbers, at.keys, _product(form, query, key), arrays)
        largest = jnp.max(scores, axis=-1)
        weights = jnp.exp(scores - _finite(largest)[..., None])
        spec = f"{form.rows}{KEY},{form.value}->{weighed(form)}"
        return _einsum(spec, weights.astype(value.dtype), value, exact), largest, jnp.sum(weights, axis=-1)

    return _in_query_blocks(form, at, of_queries, ((query, form.query),), (weighed(form), form.rows, form.rows))


def block_backward(
    form: AttentionForm, gradients: Gradients, places: Places, at: At, operands: tuple[Any, Any, Any], rows: Any
) -> tuple[Any, ...]:
    """Gradients of queries, keys and values. `rows`: gradient of the result, largest score, sum of exponentials, and
    the result times its gradient.
    """
    query, key, value = operands
    exact, scored = exact_type(query), form.rows + KEY

    def of_queries(query: Any, *parts: Any) -> tuple[Any, Any, Any]:
        change, largest, total, along, numbers, *arrays = parts
        scores, pull = jax.vjp(lambda s: _score(form, places, numbers, at.keys, s, arrays), _product(form, query, key))
        weights = jnp.exp(scores - _finite(largest)[..., None]) / total[..., None]
        spec = f"{scored},{gradients.out}->{gradients.value}"
        of_value = _einsum(spec, weights.astype(change.dtype), change, exact)
        of_weights = _einsum(f"{gradients.out},{form.value}->{scored}", change, value, exact)
        (of_product,) = pull(weights * (of_weights - along[..., None]))
        of_product = of_product.astype(key.dtype)
        of_query = _einsum(f"{scored},{form.key}->{gradients.query}", of_product, key, exact)
        of_key = _einsum(f"{scored},{form.query}->{gradients.key}", of_product, query, exact)
        return of_query, of_key, of_value

    names = (form.query, gradients.out, form.rows, form.rows, form.rows)
    given = tuple(zip((query, *rows), names, strict=True))
    return _in_query_blocks(form, at, of_queries, given, (gradients.query, gradients.key, gradients.value))


def _in_query_blocks(
    form: AttentionForm, at: At, function: Any, operands: tuple[tuple[Any, str], ...], results: Sequence[str]
) -> tuple[Any, ...]:
    """`function` of operands, positions of queries, and the arrays of scores, of a block of queries at a time."""
    numbers = at.queries.numbers()
    cut = [i for i, names in enumerate(form.arrays) if form.position in names]
    given = (*operands, (numbers, form.position), *((at.arrays[i], form.arrays[i]) for i in cut))

    def of_queries(*parts: Any) -> tuple[Any, ...]:
        first, own = parts[: len(operands) + 1], dict(zip(cut, parts[len(operands) + 1 :], strict=True))
        return function(*first, *(own.get(i, array) for i, array in enumerate(at.arrays)))

    return QueryBlocks(form.position, numbers.size).joined(of_queries, given, results)


def change_along(form: AttentionForm, gradients: Gradients, out: Any, change: Any) -> Any:
    """Of each row its result times the gradient of that."""
    exact = jnp.promote_types(out.dtype, jnp.float32)
    return _einsum(f"{form.out},{gradients.out}->{form.rows}", out.astype(exact), change.astype(exact), exact)


def weighed_result(form: AttentionForm, done: tuple[Any, Any, Any], dtype: Any) -> Any:
    """What attention makes, of the sums of all blocks."""
    summed, _, total = done
    out = summed / _along(total, form.rows, weighed(form))
    return jnp.einsum(f"{weighed(form)}->{form.out}", out).astype(dtype)


def _einsum(spec: str, one: Any, other: Any, exact: Any) -> Any:
    """A product of two arrays, summed in `exact`."""

    def mixed(one: Any, other: Any) -> Any:
        return jnp.einsum(spec, one, other, preferred_element_type=exact)

    if one.dtype == exact and other.dtype == exact:
        return mixed(one, other)
    # XLA's CPU compiler has no products of 16-bit numbers with 32-bit results but for some layouts.
    return lax.platform_dependent(one, other, cpu=lambda a, b: mixed(a.astype(exact), b.astype(exact)), default=mixed)


def _product(form: AttentionForm, query: Any, key: Any) -> Any:
    return _einsum(f"{form.query},{form.key}->{form.rows}{KEY}", query, key, exact_type(query))


def _score(
    form: AttentionForm, places: Places, numbers: Any, keys: Positions, product: Any, arrays: Sequence[Any]
) -> Any:
    """The expression of products of queries at some positions (`numbers`) with keys."""
    dims = form.rows + KEY
    size = dict(zip(dims, product.shape, strict=True))

    def shaped(array: Any, letters: str) -> Any:
        """An array with the dimensions of the product, of size one where it has none of them."""
        if KEY in letters:
            array = keys.taken(array, letters.index(KEY))
        array = array.reshape([n for n, letter in zip(array.shape, letters, strict=True) if letter != NONE])
        has = letters.replace(NONE, "")
        if not has:
            return array.reshape([1 for _ in dims])
        array = jnp.einsum(f"{has}->{''.join(d for d in dims if d in has)}", array)
        return array.reshape([size[d] if d in has else 1 for d in dims])

    def counting(letter: str) -> Any:
        if letter == KEY:
            return keys.numbers()
        return numbers if letter == form.position else places.index(letter) * size[letter] + jnp.arange(size[letter])

    @functools.cache
    def value(node: Expression) -> Any:
        match node:
            case ("score",):
                return product
            case ("iota", letter, dtype):
                at = [size[d] if d == letter else 1 for d in dims]
                return counting(letter).reshape(at).astype(dtype)
            case ("array", int(number)):
                return shaped(arrays[number], form.arrays[number])
            case ("const", number, dtype):
                return jnp.asarray(number, dtype)
            case ("convert_element_type", (dtype,), operand):
                inner = value(operand)
                # Scores stay as exact as they are.
                return inner if has_score(operand) else inner.astype(dtype)
            case ("integer_pow", (power,), operand):
                return value(operand) ** power
            case (primitive, (), *operands):
                return computed(primitive, [value(o) for o in operands], jnp)
        raise AssertionError(f"no expression: {node}")

    return jnp.broadcast_to(value(form.score), product.shape)


def _finite(largest: Any) -> Any:
    """Of a row in which everything is masked by minus infinity, zero: its exponentials are zeros then."""
    return jnp.where(jnp.isneginf(largest), jnp.zeros_like(largest), largest)


def weighed(form: AttentionForm) -> str:
    """The dimensions of a weighed sum of values as they are kept while blocks come: rows first."""
    return form.rows + "".join(letter for letter in form.out if letter not in form.rows)


def _along(rows: Any, dims: str, others: str) -> Any:
    return rows.reshape((*rows.shape, *(1 for _ in others[len(dims) :])))


def joined(form: AttentionForm, one: tuple[Any, Any, Any], other: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
    """Two parts of a row's sums at the scale of the larger of their maxima."""
    largest = jnp.maximum(one[1], other[1])
    by = [jnp.exp(part[1] - _finite(largest)) for part in (one, other)]
    summed = [part[0] * _along(scale, form.rows, weighed(form)) for part, scale in zip((one, other), by, strict=True)]
    return summed[0] + summed[1], largest, one[2] * by[0] + other[2] * by[1]


def _next(arrays: Any, places: Places, letter: str, step: int) -> Any:
    return passed_on(arrays, places.axes[letter], places.size(letter), step)


def passed_on(arrays: Any, axes: tuple[str, ...], count: int, step: int, order: int | None = None) -> Any:
    """What the device `step` places before had, or behind where it is negative.

    Pairs stand in the order of the way, or of `order` (1 or -1): a compiler makes equal permutes of both passes once,
    and keeps what came.
    """
    pairs = [(i, (i + step) % count) for i in range(count)]
    return lax.ppermute(arrays, axes, pairs[:: order or (1 if step > 0 else -1)])


# The operations


def _here(*args: Any, form: AttentionForm, gradients: Gradients | None) -> tuple[Any, ...]:
    return run(form, gradients, HERE, args)


def run(form: AttentionForm, gradients: Gradients | None, places: Places, args: Sequence[Any]) -> tuple[Any, ...]:
    """One pass on one device's part: forward, or with gradients backward."""
    if gradients is None:
        return forward(form, places, *args)
    query, key, value, out, largest, total, change, *arrays = args
    return backward(form, gradients, places, (query, key, value), (out, largest, total), change, arrays)


FORWARD, BACKWARD = (jax_local.primitive(name, _here) for name in ATTENTION_PASSES)
PRIMITIVES = frozenset(ATTENTION_PASSES)


@functools.cache
def equation(form: AttentionForm, gradients: Gradients | None, avals: tuple[jax.ShapeDtypeStruct, ...]) -> Any:
    """The equation of a pass on operands of these shapes."""
    primitive = FORWARD if gradients is None else BACKWARD
    closed = jax.make_jaxpr(lambda *args: primitive.bind(*args, form=form, gradients=gradients))(*avals)
    (eqn,) = jax_compat.open_jaxpr(closed).eqns
    return eqn


def rule_of(eqn: Any) -> Rule:
    """Positions of queries and keys are one factor that goes round a ring, where there are as many of them; else they
    are whole on every device. What keeps everything apart is split freely.

    A mask's positions of keys are whole on every device.
    """
    form, sizes, is_ring = eqn.params["form"], sizes_of(eqn), goes_round(eqn)
    apart = set(form.query) & set(form.key) & set(form.value) & set(form.out)
    operands, results = letters(form, eqn.params["gradients"])
    first_mask = len(operands) - len(form.arrays)

    def factor_of(letter: str, size: int) -> Factor:
        if is_ring and letter == form.position:
            return Factor(size, FactorKind.RING)
        return Factor(size, FactorKind.PASS if letter in apart else FactorKind.FIXED)

    def named(arrays: Sequence[str], first_mask: int) -> NamedDims:
        for i, array in enumerate(arrays):
            names = [form.position if is_ring and x == KEY and i < first_mask else x for x in array]
            yield [(x,) if x != NONE else () for x in names], [1 if x == NONE else sizes[x] for x in array]

    return Rule.by_names(named(operands, first_mask), named(results, len(results)), factor_of)
