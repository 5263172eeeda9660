"""The solvers behind MathOpt on real and synthetic instances: python -m benchmarks.solvers [FILE...] --seconds N
[--write]

FILE: a contest instance (.json, .json.gz) or a problem the planner saved (.npz, `Problem.save`). Each is reduced
first, then given whole to CP-SAT, HiGHS and SCIP: this compares the program's solvers, not `autopar.solver.solve`.
--write also puts the table in benchmarks/results/solvers.md.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from autopar.solver import Backend, Edge, Problem, Use, evaluate
from autopar.solver.ilp.exact import Settings, solve_lazily
from autopar.solver.ilp.flat_arrays import flatten
from autopar.solver.ilp.memory_rows import can_bind
from autopar.solver.presolve.presolve import reduce_all
from benchmarks.contest_format import read_contest

RESULTS = Path(__file__).parent / "results" / "solvers.md"


def transformer(layers: int, *, strategies: int, tight: float | None, seed: int = 0) -> Problem:
    """Layers of eight operations with two residual adds, resharding paid by how far strategies differ; like a
    planner's graph.

    tight: the limit as a multiple of the least peak; None = no limit.
    """
    rng = np.random.default_rng(seed)
    sizes = [strategies if k % 8 in (2, 5) else max(2, strategies // 2) for k in range(8 * layers)]
    kinds = [rng.integers(0, 4, (size, 2)) for size in sizes]
    pairs = [(k - 1, k) for k in range(1, len(sizes))]
    pairs += [(k - 4, k) for k in range(4, len(sizes), 4)]
    edges = tuple(
        Edge(
            source=a, target=b, cost=np.abs(kinds[a][:, None, :] - kinds[b][None, :, :]).sum(axis=2) * rng.uniform(1, 9)
        )
        for a, b in pairs
    )
    held = [(rng.uniform(1e6, 1e8) / (1 + kind.sum(axis=1))).astype(np.int64) for kind in kinds]
    costs = tuple(rng.uniform(1, 10) * (1 + 0.3 * kind.sum(axis=1)) + rng.uniform(0, 1, len(kind)) for kind in kinds)
    uses = tuple(
        Use(node=k, start=k, stop=2 * len(sizes) - k if k % 4 == 0 else k + 6, bytes=size)
        for k, size in enumerate(held)
    )
    limit = None
    if tight is not None:
        least = [sum(int(u.bytes.min()) for u in uses if u.start <= t < u.stop) for t in range(2 * len(sizes))]
        limit = int(tight * max(least))
    return Problem(node_cost=costs, edges=edges, uses=uses, limit_bytes=limit)


def instances(files: Sequence[Path]) -> Iterator[tuple[str, Problem]]:
    """The files named, or synthetic ones when none is."""
    for file in files:
        yield file.name.split(".")[0], Problem.load(file) if file.suffix == ".npz" else read_contest(file)
    if not files:
        yield "transformer 12 layers, no limit", transformer(12, strategies=24, tight=None)
        yield "transformer 12 layers, 2 x least peak", transformer(12, strategies=24, tight=2.0)
        yield "transformer 24 layers, 1.3 x least peak", transformer(24, strategies=24, tight=1.3)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, and write it when asked to."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.solvers", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--seconds", type=float, default=60.0, help="time for each solver on each instance")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name} as well")
    options = parser.parse_args(arguments)
    lines = [
        "| instance | nodes, pairs left by presolve | solver | cost | bound | gap | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    for name, problem in instances(options.files):
        reduced = reduce_all(problem)
        flat = flatten(reduced.problem)
        pairs = sum(edge.cost.size for edge in reduced.problem.edges)
        rows = len(can_bind(flat))
        for backend in Backend:
            begun = time.perf_counter()
            settings = Settings(backend=backend, deadline=begun + options.seconds, relative_gap=0.0, seed=0)
            answer = solve_lazily(reduced.problem, flat, settings)
            seconds = time.perf_counter() - begun
            cost = evaluate(problem, reduced.undo(answer.choice))[0] if answer.choice is not None else math.inf
            bound = answer.bound + reduced.offset
            gap = "proven" if answer.proven else f"{(cost - bound) / cost:.3%}" if cost < math.inf else "none found"
            size = f"{len(reduced.problem.node_cost):,}, {pairs:,}; {rows:,} rows can bind"
            cells = (name, size, backend.value, f"{cost:,.6g}", f"{bound:,.6g}", gap, f"{seconds:.1f}")
            lines.append(f"| {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    if options.write:
        RESULTS.parent.mkdir(exist_ok=True)
        machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
        head = f"# Solvers of the program, after presolve\n\n{options.seconds:g} s each on {machine}.\n\n"
        RESULTS.write_text(head + "\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
