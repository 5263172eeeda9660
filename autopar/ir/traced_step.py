"""A traced step: the jaxpr of a user's function, its trees, and which leaves are state, batch and constants."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """A removed placement: its name in the user's code, and its line."""

    name: str
    line: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """A function traced to a jaxpr. Leaves are numbered over all dynamic arguments in order.

    `constants` are arrays the function closes over; `tied[i]` is the output leaf that becomes input leaf i in the next
    step, found for each donated argument; `fingerprint` identifies the jaxpr between processes; `retrace` traces the
    function once more, on the leaves' shapes or on others. `blockwise_attention`: its graphs have attention as one
    operation a pass (`autopar.attention.ring`). `changed_in_place` are the paths of leaves that the function replaced
    in the containers it was given.
    """

    name: str
    jaxpr: Any
    constants: tuple[Any, ...]
    in_tree: Any
    out_tree: Any
    in_avals: tuple[jax.ShapeDtypeStruct, ...]
    out_avals: tuple[jax.ShapeDtypeStruct, ...]
    in_paths: tuple[str, ...]
    out_paths: tuple[str, ...]
    argument_of: tuple[int, ...]
    donated: frozenset[int]
    batch: frozenset[int]
    tied: dict[int, int]
    fingerprint: str
    retrace: Callable[[Sequence[jax.ShapeDtypeStruct]], Any]
    blockwise_attention: bool = False
    placements: tuple[Placement, ...] = ()
    changed_in_place: tuple[str, ...] = ()


def is_same_step(first: TracedStep, second: TracedStep) -> bool:
    """Whether two traces have the same computation and the same trees, so that a plan of one holds for the other."""
    parts = ("fingerprint", "in_tree", "out_tree", "tied", "donated", "batch")
    return all(getattr(first, part) == getattr(second, part) for part in parts)
