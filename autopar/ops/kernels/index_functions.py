"""Functions of one index, as tables of their values: what routing computes of experts' numbers and of places of rows.

An array of indices that is computed, element by element, of another one is known by the function's value for each index
that can occur. So its spelling does not matter: `order // 2` is five operations in a jaxpr, and `jnp.bincount` clips.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from autopar.ir.graph import Constant, Op


def _divided(a: Any, b: Any) -> Any:
    return a / b if np.asarray(a).dtype.kind == "f" else np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))


_ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "abs": np.abs, "add": np.add, "and": np.bitwise_and, "clamp": lambda low, x, high: np.clip(x, low, high),
    "copy": np.asarray, "div": _divided, "eq": np.equal, "ge": np.greater_equal, "gt": np.greater,
    "le": np.less_equal, "lt": np.less, "max": np.maximum, "min": np.minimum, "mul": np.multiply, "ne": np.not_equal,
    "name": np.asarray, "neg": np.negative, "not": np.bitwise_not, "or": np.bitwise_or, "rem": np.fmod,
    "select_n": lambda which, *of: np.where(which, of[1], of[0]), "sign": np.sign, "stop_gradient": np.asarray,
    "sub": np.subtract,
}  # fmt: skip
_SHAPES = frozenset({"reshape", "squeeze", "expand_dims", "broadcast_in_dim"})
_MOST_NUMBERS = 1 << 22  # masks of positions by positions are larger, and no index
_MOST_ROWS = 1 << 26  # along one dimension: the choices of all tokens


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Known:
    """What is known of an array of numbers.

    `source`: the array of indices of which it is computed, element by element in the order of its elements; None of a
    constant. `table`: its value for each index; with a `wide` dimension, for each index and each place along that
    dimension. Of a constant the array itself, in which repetition takes no memory. Along `spread` the array repeats
    itself.
    """

    source: Any
    table: np.ndarray
    wide: int | None = None
    spread: frozenset[int] = frozenset()

    def is_same(self, table: np.ndarray) -> bool:
        """Whether it is this function of one index, and has an element for each."""
        plain = self.source is not None and self.wide is None and not self.spread
        return plain and self.table.shape == table.shape and bool(np.array_equal(self.table, table))


def constant(atom: Constant) -> Known:
    return Known(source=None, table=np.asarray(atom.literal.val, atom.literal.aval.dtype))


def known_of(op: Op, reads: Sequence[Known | None], out: tuple[int, ...]) -> Known | None:
    """What is known of the result, of shape `out`, of an equation with one, from its operands; None: nothing."""
    if op.primitive == "iota":
        dim = op.eqn.params["dimension"]
        numbers = np.arange(out[dim]).astype(op.eqn.params["dtype"])
        return Known(source=None, table=np.broadcast_to(numbers.reshape(_along(dim, len(out))), out))
    known = [r for r in reads if r is not None]
    if not known or len(known) < len(reads):
        return None
    if op.primitive in _SHAPES:
        return _reshaped(op, known[0], out)
    if op.primitive == "tile":
        is_small = known[0].source is None and not _is_large(out)
        return Known(source=None, table=np.tile(known[0].table, op.eqn.params["reps"])) if is_small else None
    if op.primitive == "convert_element_type":
        dtype = op.eqn.params["new_dtype"]
        return _combined(lambda x: np.asarray(x).astype(dtype), known, out)
    if op.primitive not in _ELEMENTWISE or (op.primitive == "select_n" and len(reads) > 3):  # of more than two cases
        return None
    return _combined(
        _ELEMENTWISE[op.primitive], [_widened(k, v, out) for k, v in zip(known, op.eqn.invars, strict=True)], out
    )


def _widened(known: Known, var: Any, out: tuple[int, ...]) -> Known:
    """An operand that has size one where the result is larger: it repeats itself there."""
    if known.source is None:
        return known
    repeated = {d for d, n in enumerate(var.aval.shape) if n != out[d]}
    return dataclasses.replace(known, spread=known.spread | repeated)


def _along(dim: int, rank: int) -> tuple[int, ...]:
    return tuple(-1 if d == dim else 1 for d in range(rank))


def compressed(array: np.ndarray) -> np.ndarray:
    """The array with size one in the dimensions along which it repeats itself."""
    return array[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in array.strides)]


def _is_large(shape: Sequence[int]) -> bool:
    """Whether a table takes more memory than it may."""
    return math.prod(shape) > (_MOST_NUMBERS if sum(n > 1 for n in shape) > 1 else _MOST_ROWS)


def _combined(function: Callable[..., Any], known: Sequence[Known], out: tuple[int, ...]) -> Known | None:
    """Element by element: constants, or functions of one index and constants that vary along one `spread` dimension."""
    of_index = [k for k in known if k.source is not None]
    small = [compressed(k.table) if k.source is None else k.table for k in known]
    if not of_index:
        if _is_large(np.broadcast_shapes(*(a.shape for a in small))):
            return None
        return Known(source=None, table=np.broadcast_to(function(*small), out))
    varying = {d for k, a in zip(known, small, strict=True) if k.source is None for d, n in enumerate(a.shape) if n > 1}
    wide = varying | {k.wide for k in of_index if k.wide is not None}
    spread = frozenset.intersection(*(k.spread for k in of_index)) - wide
    if len({id(k.source) for k in of_index}) > 1 or len(wide) > 1:
        return None
    if any(k.spread - wide != spread or (k.wide is None and not wide <= k.spread) for k in of_index):
        return None
    if wide:
        parts = zip(known, small, strict=True)
        small = [a.reshape(1, -1) if k.source is None else a[:, None] if k.wide is None else a for k, a in parts]
        if _is_large(np.broadcast_shapes(*(a.shape for a in small))):
            return None
    else:
        small = [a.reshape(-1) if k.source is None else a for k, a in zip(known, small, strict=True)]
    table = np.asarray(function(*small))
    return Known(source=of_index[0].source, table=table, wide=next(iter(wide), None), spread=spread)


def _reshaped(op: Op, known: Known, out: tuple[int, ...]) -> Known | None:
    shape = tuple(op.eqn.invars[0].aval.shape)
    if op.primitive == "broadcast_in_dim":
        at = op.eqn.params["broadcast_dimensions"]
        if known.source is None:
            sizes = [1] * len(out)
            for d, n in zip(at, shape, strict=True):
                sizes[d] = n
            return Known(source=None, table=np.broadcast_to(known.table.reshape(sizes), out))
        same = {to for to, n in zip(at, shape, strict=True) if n == out[to]}
        place = dict(enumerate(at))
        added = {d for d, n in enumerate(out) if n > 1 and d not in same}
        spread = frozenset({place[d] for d in known.spread} | added)
        return dataclasses.replace(known, wide=None if known.wide is None else place[known.wide], spread=spread)
    if known.source is None:
        small = compressed(known.table)
        if small.size == 1:
            return Known(source=None, table=np.broadcast_to(small.reshape([1] * len(out)), out))
        if _is_large(shape if np.count_nonzero(np.greater(small.shape, 1)) > 1 else (math.prod(shape),)):
            return None
        return Known(source=None, table=known.table.reshape(out))
    if known.wide is None and not known.spread:
        return known
    # The order of elements stays; so do dimensions of other sizes than one, where no more than such come or go.
    large = [d for d, n in enumerate(shape) if n > 1]
    moved = [d for d, n in enumerate(out) if n > 1]
    if [shape[d] for d in large] == [out[d] for d in moved]:
        place = dict(zip(large, moved, strict=True))
        spread = frozenset(place[d] for d in known.spread)
        return dataclasses.replace(known, wide=None if known.wide is None else place[known.wide], spread=spread)
    at_end = known.wide == len(shape) - 1 and shape[-1:] == out[-1:] and not known.spread
    return dataclasses.replace(known, wide=len(out) - 1) if at_end else None
