"""How many rounds the solver needs for the integer programs of whole steps on one mesh.

    python -m benchmarks.solver_rounds --keep                  the table in results/solver_rounds.md
    python -m benchmarks.solver_rounds bert "gpt-8 zero 3"     some pairs of `benchmarks.plan_regression`

Each program is solved with so many rounds, and by the clock (20 s, the exact program included), and compared: proofs of
the optimum, the worst objective as a part of that by the clock, and processor seconds of all together.
"""

import argparse
import math
import sys
import time
from pathlib import Path
from typing import Any

from autopar import solver
from autopar.intra_op import ilp
from benchmarks.machine import description, markdown
from benchmarks.plan_regression import PAIRS, planned

RESULTS = Path(__file__).parent / "results" / "solver_rounds.md"
ROUNDS = (8, 16, 32, 64, 128)
CLOCK_S = 20.0
STEPS = (
    "mlp_ema", "dropout", "gpt_adafactor", "gpt_odd", "llama", "moe-small", "bert", "encoder_decoder", "clip", "resnet",
    "unet", "lstm", "gnn", "haiku_model", "nnx_model", "mlp-wide", "gpt-12", "gpt-8 zero 3",
)  # fmt: skip
COLUMNS = ("ended by", "programs", "proven optimal", "worst objective", "processor seconds")


def compare(names: list[str]) -> list[list[str]]:
    """A row for the clock and for each number of rounds, over the programs of these steps."""
    original, found = solver.solve, {rounds: [] for rounds in (None, *ROUNDS)}

    def solve(problem: solver.Problem, **options: Any) -> solver.Solution:
        for rounds, solutions in found.items():
            start_s = time.process_time()
            limit_s = CLOCK_S if rounds is None else math.inf
            solution = original(problem, **options | {"rounds": rounds, "time_limit_s": limit_s})
            solutions.append((solution, time.process_time() - start_s))
        return found[ilp.ROUNDS][-1][0]

    solver.solve = solve
    try:
        for name in names:
            planned(next(pair for pair in PAIRS if pair.name == name))
    finally:
        solver.solve = original
    rows = []
    for rounds, solutions in found.items():
        pairs = zip(solutions, found[None], strict=True)
        ratios = [own.objective / by_clock.objective for (own, _), (by_clock, _) in pairs if by_clock.objective]
        proven = sum(solution.status is solver.Status.OPTIMAL for solution, _ in solutions)
        seconds = sum(cpu_s for _, cpu_s in solutions)
        ended_by = f"{CLOCK_S:.0f} s" if rounds is None else f"{rounds} rounds"
        rows.append([ended_by, str(len(solutions)), str(proven), f"{max(ratios):.6f}", f"{seconds:.1f}"])
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", nargs="*", default=list(STEPS), help="names of benchmarks.plan_regression")
    parser.add_argument("--keep", action="store_true", help=f"keep the table in results/{RESULTS.name}")
    args = parser.parse_args()
    table = markdown(COLUMNS, compare(args.pairs))
    print(table)
    if args.keep:
        text = (
            f"`python -m benchmarks.solver_rounds`: the programs of {len(args.pairs)} steps ({', '.join(args.pairs)})."
        )
        RESULTS.write_text(f"# Rounds of the solver\n\n{text}\n\n{description()}\n\n{table}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
