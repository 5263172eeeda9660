"""Whether the cells of a Pallas grid dimension leave something to one another in scratch memory.

Cells run one after the other, the last dimension fastest, and scratch memory stays as it was. A device that has a part
of a dimension's cells begins with one that others precede in the whole grid. That is the same if what it reads of the
scratch memory was written before, in the cells since then: at the first cell of each step along the dimension, where
the dimensions inside of it begin anew, the body is followed with these numbers of cells, and writes all of a scratch
array before it reads any of it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from autopar.common import jax_compat

# The most first cells that are followed: of dimensions outside, whose numbers the body reads.
MOST_CELLS = 256
_UNKNOWN = object()
_CALLS = frozenset({"pjit", "jit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"})


class _Ref:
    """A scratch array of the kernel."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = tuple(shape)


class _ReadsWhatOthersLeft(Exception):
    pass


def begins_anew(body: Any, scratch: Sequence[Any], own: Sequence[int], grid: Sequence[int], g: int) -> bool:
    """Whether each step along grid dimension g begins with scratch arrays that nothing is read of before it is written.

    `scratch`: variables of the body; `own`: the grid dimensions that the body has numbers of, in its order. The body
    must not depend on the number of the cell along g itself.
    """
    if not scratch:
        return True
    read = {own[e.params["axis"]] for e in jax_compat.equations_in(body) if e.primitive.name == "program_id"}
    outside = [d for d in range(g) if d in read]
    if math.prod(grid[d] for d in outside) > MOST_CELLS:
        return False
    for cells in itertools.product(*(range(grid[d]) for d in outside)):
        numbers = dict.fromkeys(range(len(grid)), 0) | dict(zip(outside, cells, strict=True))
        refs = {v: _Ref(v.aval.shape) for v in scratch}
        try:
            _follow(body, dict(refs), set(), _Cell(own, grid, numbers))
        except _ReadsWhatOthersLeft:
            return False
    return True


class _Cell:
    def __init__(self, own: Sequence[int], grid: Sequence[int], numbers: Mapping[int, int]) -> None:
        self.own, self.grid, self.numbers = own, grid, numbers


def _follow(jaxpr: Any, env: dict[Any, Any], written: set[_Ref], cell: _Cell) -> list[Any]:
    """The results of a jaxpr in one cell, as far as they are known; adds what it writes whole to `written`."""

    def value(v: Any) -> Any:
        return v.val if isinstance(v, jax_compat.Literal) else env.get(v, _UNKNOWN)

    for e in jaxpr.eqns:
        name, args = e.primitive.name, [value(v) for v in e.invars]
        if name == "program_id":
            results = [np.int32(cell.numbers[cell.own[e.params["axis"]]])]
        elif name == "num_programs":
            results = [np.int32(cell.grid[cell.own[e.params["axis"]]])]
        elif name == "swap" and isinstance(args[0], _Ref):
            results = _swapped(e, args, written, _is_read(jaxpr, e.outvars[0]))
        elif name == "cond":
            results = _taken(e, args, written, cell)
        elif name in _CALLS and len(inner := list(jax_compat.jaxprs_in(e))) == 1:
            called = jax_compat.open_jaxpr(inner[0])
            results = _follow(called, dict(zip(called.invars, args, strict=True)), written, cell)
        else:
            if any(isinstance(a, _Ref) and a not in written for a in args):
                raise _ReadsWhatOthersLeft
            results = _computed(e, args)
        env.update(zip(e.outvars, results, strict=True))
    return [value(v) for v in jaxpr.outvars]


def _is_read(jaxpr: Any, v: Any) -> bool:
    return any(v is a for e in jaxpr.eqns for a in e.invars) or any(v is a for a in jaxpr.outvars)


def _swapped(eqn: Any, args: Sequence[Any], written: set[_Ref], reads: bool) -> list[Any]:
    """Of a write: the first must be of all of the array, and what was there before must be read by nothing."""
    ref, whole = args[0], math.prod(eqn.invars[1].aval.shape) == math.prod(args[0].shape)
    if ref not in written:
        if reads or not whole:
            raise _ReadsWhatOthersLeft
        written.add(ref)
    return [_UNKNOWN]


def _taken(eqn: Any, args: Sequence[Any], written: set[_Ref], cell: _Cell) -> list[Any]:
    """Of a branch: the one that is taken, or what holds of all."""
    branches = [jax_compat.open_jaxpr(branch) for branch in eqn.params["branches"]]
    if args[0] is not _UNKNOWN and not isinstance(args[0], _Ref):
        branches = [branches[min(max(int(args[0]), 0), len(branches) - 1)]]
    ends = []
    for branch in branches:
        its = set(written)
        ends.append((_follow(branch, dict(zip(branch.invars, args[1:], strict=True)), its, cell), its))
    written.update(set.intersection(*(its for _, its in ends)))
    return ends[0][0] if len(ends) == 1 else [_UNKNOWN] * len(eqn.outvars)


def _computed(eqn: Any, args: Sequence[Any]) -> list[Any]:
    """The results of an operation on numbers that are known."""
    unknown = [_UNKNOWN] * len(eqn.outvars)
    is_small = all(v.aval.shape == () for v in (*eqn.invars, *eqn.outvars))
    if not is_small or any(a is _UNKNOWN or isinstance(a, _Ref) for a in args) or list(jax_compat.jaxprs_in(eqn)):
        return unknown
    with jax.ensure_compile_time_eval():
        return [np.asarray(x) for x in jax_compat.bind(eqn, list(args))]
