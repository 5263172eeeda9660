"""Solve instances of the ASPLOS / EuroSys 2025 contest: python -m benchmarks.iopddl FILE... --seconds N --out DIR

FILE: .json or .json.gz in the contest's format (github.com/google/iopddl). Each is solved within N seconds, reading
included, and DIR/NAME.json (the list of strategy indices) is written.

Interval i, costs i and usages i belong to node i; edge costs are row by row, the first node's strategy choosing the
row. Costs of 10^18 and more mean "not allowed". Nodes of an empty interval hold no memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import json
import math
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from autopar.solver import Edge, Problem, Status
from benchmarks.iopddl.memory import Limited, Use
from benchmarks.iopddl.solving import Found, solve_limited

NOT_ALLOWED = 10**18
# Best cost submitted to the contest, by file name: for the score printed, the solver never sees them.
BEST_SUBMITTED = {
    "asplos-2025-iopddl-A": 6_548_641_531,
    "asplos-2025-iopddl-G": 217_039,
    "asplos-2025-iopddl-M": 49_928_460_991,
    "asplos-2025-iopddl-S": 1_534_613_444,
}
WRITING_S = 1.0  # kept back for undoing the reductions, checking the answer and writing it


def read_contest(path: str | Path) -> Limited:
    """The problem of a .json or .json.gz file; equal edge matrices become one array.

    Raises: ValueError when the file does not follow the contest's format.
    """
    path = Path(path)
    raw = path.read_bytes()
    try:
        stored = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)["problem"]
        intervals, costs, usages = (stored["nodes"][key] for key in ("intervals", "costs", "usages"))
        pairs, matrices = stored["edges"]["nodes"], stored["edges"]["costs"]
        limit = stored.get("usage_limit")
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path.name}: not a contest problem: {type(error).__name__} {error}") from error
    if not len(intervals) == len(costs) == len(usages) or len(pairs) != len(matrices):
        raise ValueError(f"{path.name}: intervals, costs and usages differ in number, or edges from their costs")
    node_cost = tuple(_costs(row) for row in costs)
    pool: dict[tuple[int, bytes], np.ndarray] = {}
    edges = []
    for number, ((source, target), values) in enumerate(zip(pairs, matrices, strict=True)):
        rows, columns = len(node_cost[source]), len(node_cost[target])
        if len(values) != rows * columns:
            raise ValueError(f"{path.name}: edge {number} has {len(values)} costs, expected {rows} x {columns}")
        flat = _costs(values)
        matrix = pool.setdefault((rows, flat.tobytes()), flat.reshape(rows, columns))
        edges.append(Edge(source=source, target=target, cost=matrix))
    uses = tuple(
        Use(node=node, start=start, stop=stop, bytes=np.array(size, dtype=np.int64))
        for node, ((start, stop), size) in enumerate(zip(intervals, usages, strict=True))
        if start < stop and any(size)
    )
    return Limited(problem=Problem(node_cost=node_cost, edges=tuple(edges)), uses=uses, limit_bytes=limit)


def write_choice(choice: Sequence[int], path: str | Path) -> None:
    """Write the list of strategy indices, as the contest wants it."""
    Path(path).write_text(json.dumps([int(strategy) for strategy in choice]))


def _costs(values: list[int]) -> np.ndarray:
    cost = np.array(values, dtype=np.float64)
    cost[cost >= NOT_ALLOWED] = np.inf
    return cost


def main(arguments: Sequence[str] | None = None) -> int:
    """Solve the files named on the command line; 0 when every answer fits."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.iopddl", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--seconds", type=float, required=True, help="time for each file, reading included")
    parser.add_argument("--out", type=Path, required=True, help="folder for the answers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbose", action="store_true", help="print the solver's progress")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    failures, total = 0, 0.0
    for number, file in enumerate(options.files):
        begun = time.perf_counter() - (_since_start() if number == 0 else 0.0)
        solution = _solve_file(file, options, begun)
        name = file.name.removesuffix(".gz").removesuffix(".json")
        best = BEST_SUBMITTED.get(name)
        score = best / solution.objective if best is not None and solution.choice else 0.0
        total += score
        failures += not solution.choice
        _print_summary(name, solution, score if best is not None else None, time.perf_counter() - begun)
        if solution.choice:
            write_choice(solution.choice, options.out / f"{name}.json")
    if len(options.files) > 1:
        print(f"total score {total:.6f}")
    return 1 if failures else 0


def _solve_file(file: Path, options: argparse.Namespace, begun: float) -> Found:
    problem = read_contest(file)
    reading_s = time.perf_counter() - begun
    left_s = options.seconds - reading_s - WRITING_S - 0.01 * options.seconds
    log = (lambda line: print(f"  {line}", flush=True)) if options.verbose else (lambda line: None)
    solution = solve_limited(problem, time_limit_s=max(left_s, 0.1), seed=options.seed, log=log)
    shifted = tuple((seconds + reading_s, cost) for seconds, cost in solution.incumbents)
    return dataclasses.replace(solution, wall_s=solution.wall_s + reading_s, incumbents=shifted)


def _since_start() -> float:
    """Seconds since this process began, so that importing counts as well."""
    stat = Path("/proc/self/stat")
    if not stat.exists():
        return time.process_time()
    ticks = float(stat.read_text().rsplit(")", 1)[1].split()[19])
    boot_s = float(Path("/proc/uptime").read_text().split()[0])
    return max(0.0, boot_s - ticks / 100.0)


def _print_summary(name: str, solution: Found, score: float | None, wall_s: float) -> None:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    print(f"{name}: {solution.status.value}")
    if solution.choice:
        first_s = solution.incumbents[0][0] if solution.incumbents else math.nan
        print(f"  cost {solution.objective:,.0f}   bound {solution.bound:,.0f}   gap {solution.gap:.6%}")
        print(
            f"  first choice that fits after {first_s:.1f} s, {len(solution.incumbents)} improvements, "
            f"all in {wall_s:.1f} s"
        )
        print(f"  {solution.peak_bytes:,} bytes used by the choice at its peak")
    elif solution.status is Status.INFEASIBLE and solution.infeasibility is not None:
        why = solution.infeasibility
        print(f"  {why.reason}: {why.bytes_over:,} bytes over at times {why.times[:10]}, nodes {why.nodes[:10]}")
    if score is not None:
        print(f"  score against the best submitted {score:.6f}")
    print(f"  peak memory of the solver so far {peak / 2**30:.2f} GiB", flush=True)


if __name__ == "__main__":
    sys.exit(main())
