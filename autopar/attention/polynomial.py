"""Polynomials over atoms, the form in which attention is recognised: sums of numbers times powers of atoms.

An atom is any tuple; its first entry is its kind.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

# Atoms with their powers, in order; a sum of such terms, each with a number.
Term = tuple[tuple[Any, int], ...]
Sum = dict[Term, float]
ONE: Term = ()
# Numbers are equal that differ by the rounding of the constants in a program.
RELATIVE_ERROR = 1e-5


def term_of(atoms: Sequence[tuple[Any, int]]) -> Term:
    """Atoms as a term: powers added up; what was chosen once is chosen."""
    powers: dict[Any, int] = {}
    for atom, n in atoms:
        powers[atom] = 1 if atom[0] == "chosen" else powers.get(atom, 0) + n
    return tuple(sorted(((a, n) for a, n in powers.items() if n), key=repr))


def add(one: Sum, other: Sum) -> Sum:
    out = dict(one)
    for term, number in other.items():
        total = out.get(term, 0.0) + number
        if abs(total) <= RELATIVE_ERROR * max(abs(number), abs(out.get(term, 0.0))):
            out.pop(term, None)
        else:
            out[term] = total
    return out


def scale(one: Sum, by: float) -> Sum:
    return {term: number * by for term, number in one.items()}


def multiply(one: Sum, other: Sum) -> Sum:
    out: Sum = {}
    for (a, x), (b, y) in itertools.product(one.items(), other.items()):
        out = add(out, {term_of((*a, *b)): x * y})
    return out


def power(one: Sum, n: int) -> Sum | None:
    """A power of a single term."""
    if len(one) != 1 or any(atom[0] == "chosen" for term in one for atom, _ in term):
        return None
    ((term, number),) = one.items()
    return {tuple((atom, power * n) for atom, power in term): number**n}


def equal(one: Sum, other: Sum) -> bool:
    return one.keys() == other.keys() and all(
        math.isclose(number, other[term], rel_tol=RELATIVE_ERROR) for term, number in one.items()
    )
