"""Pallas calls: which dimensions of their grid may be split over devices, and the call on a part.

Each device runs its own cells of a split dimension: the same body on the same blocks. That the cells leave nothing to
one another is known of dimensions that `jax.vmap` put there, of examples and heads in jax's own attention kernels, and
of what an entry of the user's says (`known`); no other dimension is split. Each array's block index along one dimension
must be the cell's number, or the number of its run of cells (as heads that share a key head), and the body must not
read the cell's number but for its place in the run.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence, Set
from typing import Any

import jax
import numpy as np

from autopar.common import jax_compat, jax_local
from autopar.ir.graph import Factor, FactorKind, NamedDims, Rule

NAME = "pallas_call"
# A generator of random bits goes on from cell to cell.
_STATEFUL = frozenset({"prng_seed", "prng_random_bits"})
_DEPENDING_ON_SIZES = frozenset({"grid_mapping", "jaxpr", "out_avals", "cost_estimate"})
Place = int | None  # the grid dimension that a dimension of an array goes with
# Of jax's own attention kernels: the file's end, what the name begins with, and the grid dimensions of examples and
# heads. Heads come first in the grid of splash attention but for the gradients of keys and values, examples and heads
# in that of flash attention; the Triton kernels have no scratch memory.
_PUBLISHED = (
    ("jax/experimental/pallas/ops/tpu/splash_attention/splash_attention_kernel.py", r"splash_m[hq]a_(fwd|dq)_", (0,)),
    ("jax/experimental/pallas/ops/tpu/splash_attention/splash_attention_kernel.py", r"splash_m[hq]a_dkv_", (1,)),
    ("jax/experimental/pallas/ops/tpu/flash_attention.py", r"_flash_attention_(dkv_|dq_)?kernel", (0, 1)),
    ("jax/experimental/pallas/ops/gpu/attention.py", r"mha_(forward|preprocess_backward)", (1, 2)),
    ("jax/experimental/pallas/ops/gpu/attention.py", r"mha_backward", (0, 1)),
)


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


def kernel_name(eqn: Any) -> str:
    """What the user's kernel is called: the name of the call, or that of its body's function."""
    given = eqn.params.get("name")
    return str(given) if given else jax_local.function_of(eqn.params["jaxpr"])[0]


def grid_of(eqn: Any) -> Grid | None:
    """How a Pallas call without an entry may be split; None where nothing of it may be."""
    vmapped, own = eqn.params["grid_mapping"].vmapped_dims, _own_dimensions(eqn)
    name, file = kernel_name(eqn), jax_local.function_of(eqn.params["jaxpr"])[1]
    published = [dims for end, names, dims in _PUBLISHED if file.endswith(end) and re.match(names, name)]
    return grid_along(eqn, {*vmapped, *(own[n] for dims in published for n in dims)}, may_read_number=False)


def grid_along(eqn: Any, dimensions: Set[int], *, may_read_number: bool) -> Grid | None:
    """How a Pallas call may be split over grid dimensions whose cells leave nothing to one another; None where the
    blocks do not follow the cells, or the body reads the cell's number, and that is not said to be harmless.
    """
    mapping, body = eqn.params["grid_mapping"], jax_compat.open_jaxpr(eqn.params["jaxpr"])
    if not dimensions or eqn.params.get("mesh") is not None or mapping.grid_names is not None:
        return None
    # A result in the memory of an operand would have to lie as that does.
    if eqn.params.get("input_output_aliases"):
        return None
    if any(e.primitive.name in _STATEFUL for e in jax_compat.equations_in(body)):
        return None
    reader = _Reader(eqn, mapping, dimensions)
    if not may_read_number:
        reader.read_body(body)
    return reader.grid()


def _own_dimensions(eqn: Any) -> list[int]:
    """The grid dimensions that the kernel was written with; `jax.vmap` puts others before them."""
    mapping = eqn.params["grid_mapping"]
    return [g for g in range(len(mapping.grid)) if g not in mapping.vmapped_dims]


class _Reader:
    def __init__(self, eqn: Any, mapping: Any, dimensions: Set[int]) -> None:
        self.eqn, self.mapping = eqn, mapping
        # By how many cells a run of each grid dimension goes on; 0: it may not be split.
        self.run = [int(g in dimensions and isinstance(n, int) and n > 1) for g, n in enumerate(mapping.grid)]

    def grid(self) -> Grid | None:
        places = [self.places(block) for block in self.mapping.block_mappings]
        num_leading = len(self.eqn.invars) - self.mapping.num_inputs
        leading = [(None,) * len(v.aval.shape) for v in self.eqn.invars[:num_leading]]
        operands = [*leading, *places[: self.mapping.num_inputs]]
        results = places[self.mapping.num_inputs :]
        arrays = [*operands, *results]
        for g in range(len(self.run)):
            if any(dims.count(g) > 1 for dims in arrays):
                self.forbid(g)
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
        self.run[g] = run if run and self.mapping.grid[g] % run == 0 else 0

    # What the body reads

    def read_body(self, body: Any) -> None:
        """Grid dimensions whose cells read their number; of vmapped ones the body knows nothing."""
        own = _own_dimensions(self.eqn)
        for jaxpr in _jaxprs(body):
            for e in jaxpr.eqns:
                if e.primitive.name == "num_programs":
                    self.forbid(own[e.params["axis"]])
                elif e.primitive.name == "program_id":
                    for cells in _moduli(jaxpr, e):
                        self.longer_runs(own[e.params["axis"]], cells)

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

    def named(arrays: Sequence[Sequence[Place]], variables: Sequence[Any]) -> NamedDims:
        pairs = zip(arrays, variables, strict=True)
        return [([() if g is None else (g,) for g in places], v.aval.shape) for places, v in pairs]

    operands, results = named(grid.operands, eqn.invars), named(grid.results, eqn.outvars)
    return Rule.by_names(operands, results, lambda g, _: Factor(grid.runs[g], FactorKind.PASS))


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
