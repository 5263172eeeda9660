"""Solve instances of the ASPLOS / EuroSys 2025 contest: python -m benchmarks.iopddl FILE... --seconds N --out DIR

FILE: .json or .json.gz in the contest's format. Each is solved within N seconds, reading included, and DIR/NAME.json
(the list of strategy indices) and DIR/NAME.svg (cost over time) are written.

    python -m benchmarks.iopddl --export gpt-192 unet-3d --out DIR     writes instances of `benchmarks.own_instances`
"""

from __future__ import annotations

import argparse
import math
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from autopar.solver import Solution, Status, solve
from benchmarks.contest_format import read_contest, write_choice, write_contest
from benchmarks.own_instances import INSTANCES, made

# Best cost submitted to the contest, by file name: for the score printed, the solver never sees them.
BEST_SUBMITTED = {
    "asplos-2025-iopddl-A": 6_548_641_531,
    "asplos-2025-iopddl-G": 217_039,
    "asplos-2025-iopddl-M": 49_928_460_991,
    "asplos-2025-iopddl-S": 1_534_613_444,
}
WRITING_S = 1.0  # kept back for undoing the reductions, checking the answer and writing it


def main(arguments: Sequence[str] | None = None) -> int:
    """Solve the files named on the command line; 0 when every answer fits."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.iopddl", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--seconds", type=float, help="time for each file, reading included")
    parser.add_argument("--export", nargs="+", choices=sorted(INSTANCES), help="write these instances instead")
    parser.add_argument("--out", type=Path, required=True, help="folder for the answers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbose", action="store_true", help="print the solver's progress")
    options = parser.parse_args(arguments)
    if bool(options.export) == bool(options.files) or bool(options.files) != (options.seconds is not None):
        parser.error("give FILE... and --seconds, or --export")
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.export or ():
        write_contest(made(INSTANCES[name]), options.out / f"{name}.json", name=name)
        print(options.out / f"{name}.json", flush=True)
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
        (options.out / f"{name}.svg").write_text(plot(name, solution, options.seconds))
    if len(options.files) > 1:
        print(f"total score {total:.6f}")
    return 1 if failures else 0


def _solve_file(file: Path, options: argparse.Namespace, begun: float) -> Solution:
    problem = read_contest(file)
    reading_s = time.perf_counter() - begun
    left_s = options.seconds - reading_s - WRITING_S - 0.01 * options.seconds
    log = (
        (lambda line: print(f"  {time.perf_counter() - begun:7.1f} s  {line}", flush=True)) if options.verbose else None
    )
    solution = solve(problem, time_limit_s=max(left_s, 0.1), seed=options.seed, log=log)
    shifted = tuple((seconds + reading_s, cost) for seconds, cost in solution.incumbents)
    return Solution(
        choice=solution.choice,
        status=solution.status,
        objective=solution.objective,
        bound=solution.bound,
        gap=solution.gap,
        wall_s=solution.wall_s + reading_s,
        peak_bytes=solution.peak_bytes,
        incumbents=shifted,
        infeasibility=solution.infeasibility,
    )


def _since_start() -> float:
    """Seconds since this process began, so that importing counts as well."""
    stat = Path("/proc/self/stat")
    if not stat.exists():
        return time.process_time()
    ticks = float(stat.read_text().rsplit(")", 1)[1].split()[19])
    boot_s = float(Path("/proc/uptime").read_text().split()[0])
    return max(0.0, boot_s - ticks / 100.0)


def _print_summary(name: str, solution: Solution, score: float | None, wall_s: float) -> None:
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


def plot(name: str, solution: Solution, seconds: float) -> str:
    """Cost over time as an SVG picture: steps of the cost on a logarithmic scale of its distance to the bound."""
    width, height, edge = 720, 360, 56
    points = [(s, c) for s, c in solution.incumbents if math.isfinite(c)]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="12">'
        f'<rect width="100%" height="100%" fill="white"/><text x="{edge}" y="20">{name}: cost above the bound</text>'
    )
    if not points or not math.isfinite(solution.bound):
        return head + f'<text x="{edge}" y="60">no choice found</text></svg>'
    floor = 1e-7
    parts = [max((c - solution.bound) / max(abs(solution.bound), 1e-300), floor) for _, c in points]
    top, bottom = math.ceil(math.log10(max(parts))), math.floor(math.log10(min(parts)))
    top = max(top, bottom + 1)

    def x(s: float) -> float:
        return edge + (width - 2 * edge) * min(s / seconds, 1.0)

    def y(part: float) -> float:
        return edge + (height - 2 * edge) * (top - math.log10(part)) / (top - bottom)

    lines = [f"M {x(points[0][0]):.1f} {y(parts[0]):.1f}"]
    for (s, _), part in zip(points[1:], parts[1:], strict=True):
        lines.append(f"H {x(s):.1f} V {y(part):.1f}")
    lines.append(f"H {x(seconds):.1f}")
    marks = "".join(
        f'<line x1="{edge}" x2="{width - edge}" y1="{y(10.0**k):.1f}" y2="{y(10.0**k):.1f}" stroke="#ddd"/>'
        f'<text x="4" y="{y(10.0**k) + 4:.1f}">{10.0 ** (k + 2):g}%</text>'
        for k in range(bottom, top + 1)
    )
    clock = "".join(
        f'<text x="{x(seconds * k / 4):.1f}" y="{height - 30}" text-anchor="middle">{seconds * k / 4:g} s</text>'
        for k in range(5)
    )
    path = f'<path d="{" ".join(lines)}" fill="none" stroke="#1f6feb" stroke-width="2"/>'
    return f"{head}{marks}{clock}{path}</svg>\n"


if __name__ == "__main__":
    sys.exit(main())
