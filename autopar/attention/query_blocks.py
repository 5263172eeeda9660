"""The queries of a device taken block by block, so that it holds scores of one block only."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

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
