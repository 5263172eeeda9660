"""Pallas calls without a rule: which dimensions of their grid only say which block a cell works on.

A cell of a grid dimension is independent of the others if each array's block index along one dimension is the cell's
number (or the number of its run of cells, as heads that share a key head), every result has a block of its own for each
cell or run, the body does not read the cell's number but for its place in the run, and no cell finds in scratch memory
what others left. Such a dimension may be split: each device runs its own cells, the same body on the same blocks. This
is read from the index maps of the call, for any kernel; nothing is known of kernels by name here.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from autopar.common import jax_compat, jax_local
from autopar.ir.graph import Factor, FactorKind, Rule

# Whether the cells of a Pallas grid dimension leave something to one another in scratch memory.
#
# Cells run one after the other, the last dimension fastest, and scratch memory stays as it was. A device that has a
# part of a dimension's cells begins with one that others precede in the whole grid. That is the same if what it reads
# of the scratch memory was written before, in the cells since then: at the first cell of each step along the dimension,
# where the dimensions inside of it begin anew, the body is followed with these numbers of cells, and writes all of a
# scratch array before it reads any of it.


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


NAME = "pallas_call"
# A generator of random bits goes on from cell to cell.
_STATEFUL = frozenset({"prng_seed", "prng_random_bits"})
_DEPENDING_ON_SIZES = frozenset({"grid_mapping", "jaxpr", "out_avals", "cost_estimate"})
Place = int | None  # the grid dimension that a dimension of an array goes with


@dataclasses.dataclass(frozen=True, slots=True)
class Grid:
    """How a call may be split. `runs[g]`: into how many runs of cells grid dimension g may be cut, 1 where it may not.

    `operands[i][d]`, `results[i][d]`: the grid dimension whose runs a dimension of an array goes with, major part.
    `single`: the grid dimensions of which a run has one row of each array, so that no cell sees two of them.
    """

    runs: tuple[int, ...]
    operands: tuple[tuple[Place, ...], ...]
    results: tuple[tuple[Place, ...], ...]
    single: frozenset[int]


def is_pallas_call(eqn: Any) -> bool:
    return eqn is not None and eqn.primitive.name == NAME


def with_unread_marked(eqn: Any, jaxpr: Any) -> Any:
    """The equation of a call in a jaxpr; results that nothing reads, or only what nothing reads (`jax.vmap` over one
    example puts a dimension back), are marked: they are scratch memory.
    """
    read = {v for v in jaxpr.outvars if not isinstance(v, jax_compat.Literal)}
    for e in reversed(jaxpr.eqns):
        if e is eqn:
            break
        if e.effects or read.intersection(e.outvars):
            read.update(v for v in e.invars if not isinstance(v, jax_compat.Literal))
    unread = [i for i, v in enumerate(eqn.outvars) if v not in read]
    return jax_local.without_results(eqn, unread) if unread else eqn


def kernel_name(eqn: Any) -> str:
    """What the user's kernel is called: the name of the call, or that of its body's function."""
    given = eqn.params.get("name")
    return str(given) if given else jax_local.function_of(eqn.params["jaxpr"])[0]


def grid_of(eqn: Any, trusted: frozenset[int] = frozenset()) -> Grid | None:
    """How a Pallas call may be split; None where its grid cannot be read, or nothing of it may be split.

    In a `trusted` grid dimension the body may read the cell's number, and its results may lack it.
    """
    mapping, body = eqn.params["grid_mapping"], jax_compat.open_jaxpr(eqn.params["jaxpr"])
    if eqn.params.get("mesh") is not None or mapping.grid_names is not None:
        return None
    if any(e.primitive.name in _STATEFUL for e in jax_compat.equations_in(body)):
        return None
    reader = _Reader(eqn, mapping, body, trusted)
    return reader.grid()


class _Reader:
    def __init__(self, eqn: Any, mapping: Any, body: Any, trusted: frozenset[int]) -> None:
        self.eqn, self.mapping, self.body, self.trusted = eqn, mapping, body, trusted
        # By how many cells a run of each grid dimension goes on; 0: it may not be split.
        self.run = [int(isinstance(n, int) and n > 1) for n in mapping.grid]

    def grid(self) -> Grid | None:
        self.read_body()
        self.read_aliases()
        places = [self.places(block) for block in self.mapping.block_mappings]
        num_leading = len(self.eqn.invars) - self.mapping.num_inputs
        leading = [(None,) * len(v.aval.shape) for v in self.eqn.invars[:num_leading]]
        operands = [*leading, *places[: self.mapping.num_inputs]]
        results = places[self.mapping.num_inputs :]
        for dims, v in zip(results, self.eqn.outvars, strict=True):
            for g in range(len(self.run)):
                if g not in dims and not jax_local.is_unread(v) and g not in self.trusted:
                    self.forbid(g)
        arrays = [*operands, *results]
        for g in range(len(self.run)):
            if any(dims.count(g) > 1 for dims in arrays):
                self.forbid(g)
        self.read_scratch(results)
        runs = tuple(n // r if r else 1 for n, r in zip(self.mapping.grid, self.run, strict=True))
        if max(runs, default=1) == 1:
            return None
        split = [[tuple(g if g is not None and runs[g] > 1 else None for g in dims) for dims in side]
                 for side in (operands, results)]  # fmt: skip
        return Grid(runs, tuple(split[0]), tuple(split[1]), self.single(runs, split))

    def single(self, runs: Sequence[int], split: Sequence[Sequence[tuple[Place, ...]]]) -> frozenset[int]:
        variables = [*self.eqn.invars, *self.eqn.outvars]
        sizes = [
            (g, v.aval.shape[d])
            for dims, v in zip([*split[0], *split[1]], variables, strict=True)
            for d, g in enumerate(dims)
            if g is not None
        ]
        return frozenset(
            g for g, n in enumerate(runs) if n > 1 and all(size == n for other, size in sizes if other == g)
        )

    def forbid(self, g: int) -> None:
        self.run[g] = 0

    def longer_runs(self, g: int, cells: int) -> None:
        if not self.run[g]:
            return
        run = math.lcm(self.run[g], cells)
        self.run[g] = run if self.mapping.grid[g] % run == 0 else 0

    # What the body reads

    def read_body(self) -> None:
        """Grid dimensions whose cells read their number; of vmapped ones the body knows nothing."""
        own = [g for g in range(len(self.mapping.grid)) if g not in self.mapping.vmapped_dims]
        for jaxpr in _jaxprs(self.body):
            for e in jaxpr.eqns:
                if e.primitive.name not in ("program_id", "num_programs"):
                    continue
                g = own[e.params["axis"]]
                if g in self.trusted:
                    continue
                for cells in _moduli(jaxpr, e) if e.primitive.name == "program_id" else (0,):
                    self.longer_runs(g, cells) if cells else self.forbid(g)

    def read_scratch(self, results: Sequence[Sequence[Place]]) -> None:
        """Grid dimensions whose cells find what others left: in scratch memory, or in results that nothing reads."""
        own = [g for g in range(len(self.mapping.grid)) if g not in self.mapping.vmapped_dims]
        declared = jax_local.parallel_dimensions(self.eqn)
        first = len(self.body.invars) - len(self.mapping.scratch_avals)
        refs = self.body.invars[first - len(results) : first]
        for n, g in enumerate(own):
            if not self.run[g] or n in declared or g in self.trusted:
                continue
            unread = [
                ref
                for ref, dims, v in zip(refs, results, self.eqn.outvars, strict=True)
                if g not in dims and jax_local.is_unread(v)
            ]
            if not begins_anew(self.body, [*unread, *self.body.invars[first:]], own, self.mapping.grid, g):
                self.forbid(g)

    def read_aliases(self) -> None:
        """A result in the memory of an operand: both would have to lie alike."""
        if self.eqn.params.get("input_output_aliases"):
            for g in range(len(self.run)):
                self.forbid(g)

    # What index maps read

    def places(self, block: Any) -> tuple[Place, ...]:
        """The grid dimension that each dimension of an array goes with."""
        jaxpr = jax_compat.open_jaxpr(block.index_map_jaxpr)
        num_grid = len(self.mapping.grid)
        found: list[Place] = []
        if len(jaxpr.outvars) != len(block.block_shape):  # slices of other sizes
            for g in range(num_grid):
                self.forbid(g)
            return (None,) * len(block.block_shape)
        for result, size, n in zip(jaxpr.outvars, block.block_shape, block.array_aval.shape, strict=True):
            read = _read_by(jaxpr, result)
            cells = [g for g in range(num_grid) if jaxpr.invars[g] in read]
            others = any(v in read for v in jaxpr.invars[num_grid:])
            place = cells[0] if len(cells) == 1 and not others else None
            step = self.step(jaxpr, result, place) if place is not None and self.run[place] else None
            rows = jax_local.block_rows(size)
            if place is None or step is None or rows is None or self.mapping.grid[place] * rows != n * step:
                for other in cells:
                    self.forbid(other)
                found.append(None)
            else:
                self.longer_runs(place, step)
                found.append(place)
        return tuple(found)

    def step(self, jaxpr: Any, result: Any, g: int) -> int | None:
        """The number of neighbouring cells that have one block, where blocks follow one another with the cells."""
        cells = np.arange(self.mapping.grid[g], dtype=np.int32)
        numbers = _evaluate(jaxpr, result, g, cells)
        if numbers is None:
            return None
        step = int(np.argmax(numbers >= 1)) if numbers.max(initial=0) >= 1 else 0
        return step if step and np.array_equal(numbers, cells // step) else None


def _jaxprs(jaxpr: Any) -> Iterator[Any]:
    yield jaxpr
    for e in jaxpr.eqns:
        for inner in jax_compat.jaxprs_in(e):
            yield from _jaxprs(jax_compat.open_jaxpr(inner))


def _moduli(jaxpr: Any, eqn: Any) -> Iterator[int]:
    """For each use of a cell's number the size of the run within which it is read; 0 where all of it is."""
    (number,) = eqn.outvars
    if any(v is number for v in jaxpr.outvars):
        yield 0
    for e in jaxpr.eqns:
        if any(v is number for v in e.invars):
            by = e.invars[1] if e.primitive.name == "rem" and e.invars[0] is number else None
            yield int(by.val) if isinstance(by, jax_compat.Literal) else 0


def _read_by(jaxpr: Any, result: Any) -> set[Any]:
    """The variables that a result of a jaxpr is computed of."""
    wanted = set() if isinstance(result, jax_compat.Literal) else {result}
    for e in reversed(jaxpr.eqns):
        if wanted.intersection(e.outvars):
            wanted.update(v for v in e.invars if not isinstance(v, jax_compat.Literal))
    return wanted


def _evaluate(jaxpr: Any, result: Any, g: int, cells: np.ndarray) -> np.ndarray | None:
    """The numbers of a result that reads the g-th input alone, for several of its values; None where that fails."""
    wanted = _read_by(jaxpr, result)

    def of_one(cell: Any) -> Any:
        env = {jaxpr.invars[g]: cell}
        for e in jaxpr.eqns:
            if wanted.intersection(e.outvars):
                args = [v.val if isinstance(v, jax_compat.Literal) else env[v] for v in e.invars]
                env.update(zip(e.outvars, jax_compat.bind(e, args), strict=True))
        return result.val if isinstance(result, jax_compat.Literal) else env[result]

    try:
        with jax.ensure_compile_time_eval():
            return np.asarray(jax.vmap(of_one)(cells))
    except (KeyError, NotImplementedError, TypeError):  # reads something that is not a number
        return None


def is_same_kernel(eqn: Any, other: Any) -> bool:
    """Whether two calls run the same body on the same blocks, in grids of maybe other sizes."""
    first, second = (e.params["grid_mapping"] for e in (eqn, other))
    same_parameters = all(
        value == other.params.get(name) for name, value in eqn.params.items() if name not in _DEPENDING_ON_SIZES
    )
    same_blocks = len(first.block_mappings) == len(second.block_mappings) and all(
        a.block_shape == b.block_shape and str(a.index_map_jaxpr) == str(b.index_map_jaxpr)
        for a, b in zip(first.block_mappings, second.block_mappings, strict=True)
    )
    same_grid = len(first.grid) == len(second.grid) and first.vmapped_dims == second.vmapped_dims
    return same_parameters and same_blocks and same_grid and str(eqn.params["jaxpr"]) == str(other.params["jaxpr"])


# The rule, and the call on a part


def grid_rule(grid: Grid, eqn: Any) -> Rule:
    """One factor for each grid dimension that may be split, the major part of the dimensions that go with it."""
    number: dict[int, int] = {}
    factors: list[Factor] = []

    def dims(places: Sequence[Place], shape: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        out = []
        for g, n in zip(places, shape, strict=True):
            row: tuple[int, ...] = ()
            if g is not None and grid.runs[g] > 1:
                if g not in number:
                    number[g] = len(factors)
                    factors.append(Factor(grid.runs[g], FactorKind.PASS))
                row, n = (number[g],), n // grid.runs[g]
            if n > 1:
                row = (*row, len(factors))
                factors.append(Factor(n, FactorKind.FIXED))
            out.append(row)
        return tuple(out)

    read = tuple(dims(places, v.aval.shape) for places, v in zip(grid.operands, eqn.invars, strict=True))
    made = tuple(dims(places, v.aval.shape) for places, v in zip(grid.results, eqn.outvars, strict=True))
    return Rule(tuple(factors), read, made)


def call_on_part(grid: Grid | None, eqn: Any, shapes: Sequence[Sequence[int]], parts: Sequence[Any]) -> list[Any]:
    """The call on one device's part of its operands. `shapes`: those of the results there."""
    variables = [*eqn.invars, *eqn.outvars]
    here = [*(a.shape for a in parts), *shapes]
    if grid is None or all(tuple(v.aval.shape) == tuple(s) for v, s in zip(variables, here, strict=True)):
        return jax_compat.bind(eqn, parts)
    times: dict[int, int] = {}
    for dims, v, shape in zip((*grid.operands, *grid.results), variables, here, strict=True):
        for g, whole, n in zip(dims, v.aval.shape, shape, strict=True):
            if g is not None:
                times[g] = whole // n
    return jax_compat.bind(jax_local.smaller_call(eqn, times, here), parts)
