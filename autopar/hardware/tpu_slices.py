"""The shapes of TPU slices on offer.

Source: Google Cloud's pages on TPU v5e, v6e and v5p, and on TPU types and topologies (v4). Of two axes they list all;
of three, parts of a cube of 4x4x4 and whole cubes, AxBxC with A <= B <= C, the largest of them 16x16x24 (v5p, 6144
chips).
"""

from __future__ import annotations

import itertools
import math

_OF_TWO_AXES = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_PARTS_OF_A_CUBE = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
_MOST_CHIPS, _LONGEST = 6144, 24
NEAREST_SHOWN = 3


def is_offered(shape: tuple[int, ...]) -> bool:
    """Whether there are slices of this shape."""
    return shape in _offered(len(shape))


def nearest(shape: tuple[int, ...]) -> list[str]:
    """The slices of about as many chips, and then of axes most like these."""

    def distance(other: tuple[int, ...]) -> tuple[float, float]:
        chips = abs(math.log2(math.prod(shape) / math.prod(other)))
        return chips, sum(abs(math.log2(a / b)) for a, b in zip(sorted(shape), sorted(other), strict=True))

    return ["x".join(map(str, other)) for other in sorted(_offered(len(shape)), key=distance)[:NEAREST_SHOWN]]


def _offered(rank: int) -> tuple[tuple[int, ...], ...]:
    if rank == 2:
        return _OF_TWO_AXES
    cubes = itertools.combinations_with_replacement(range(4, _LONGEST + 1, 4), 3)
    return (*_PARTS_OF_A_CUBE, *(shape for shape in cubes if math.prod(shape) <= _MOST_CHIPS))
