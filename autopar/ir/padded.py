"""Arrays of the state that are stored padded, so that they divide among devices that their shape does not."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PaddedLeaf:
    """A leaf of the arguments that is stored in another shape than the step's code has it.

    `shape` is that of the code. `stored_shape` has the same dimensions, one of them larger, or, for an array of several
    dimensions, one dimension: its elements in rows, one behind the other. What is added stands at the end, or behind
    each part (`rows`, as of `PaddedForm`); its content has no meaning. `leaf` is its number among the leaves of the
    dynamic arguments.
    """

    leaf: int
    shape: tuple[int, ...]
    stored_shape: tuple[int, ...]
    rows: tuple[int, ...] = ()

    @property
    def form(self) -> PaddedForm:
        return PaddedForm(self.shape, self.stored_shape, self.rows)


@dataclasses.dataclass(frozen=True, slots=True)
class PaddedForm:
    """A shape, and the one in which such an array is stored.

    `rows`: dimension 0 is stored in so many parts of one size, the first rows of each of which are these; without, all
    rows are the first ones.
    """

    shape: tuple[int, ...]
    stored_shape: tuple[int, ...]
    rows: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        same_rank = len(self.shape) == len(self.stored_shape)
        assert same_rank or len(self.stored_shape) == 1, f"{self.shape} cannot be stored as {self.stored_shape}"
        assert all(s >= n for n, s in zip(self.flat_shape, self.stored_shape, strict=True)), "padding adds"
        assert not self.rows or (not self.is_flat and sum(self.rows) == self.shape[0]), "parts make up dimension 0"
        assert not self.rows or max(self.rows) <= self.rows_of_part, "a part has room for its rows"

    @property
    def is_flat(self) -> bool:
        """Whether the elements are stored in one dimension although the array has several."""
        return len(self.shape) != len(self.stored_shape)

    @property
    def rows_of_part(self) -> int:
        """The rows with which each part of dimension 0 is stored."""
        return self.stored_shape[0] // max(len(self.rows), 1)

    @property
    def flat_shape(self) -> tuple[int, ...]:
        """The shape before padding, with the dimensions of what is stored."""
        return (math.prod(self.shape),) if self.is_flat else self.shape
