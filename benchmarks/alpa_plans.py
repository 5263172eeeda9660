"""Our plans for Alpa's GPT models on p3.16xlarge hosts beside the plans that Alpa published, under one model of costs.

    python -m benchmarks.alpa_plans                   2.6B on 8, 6.7B on 16, 15B on 32 and 39B on 64 V100s
    python -m benchmarks.alpa_plans 2.6B --keep       also keeps the table in results/alpa_plans.md

Models: Alpa (Zheng et al., OSDI 2022), table 5, sequences of 1,024, batches of 1,024, half precision, float32 master
weights and AdamW. Alpa's plans are the stages it published: the logical mesh (data, operator) of each. What it did not
publish (where the layers are cut, micro-batches, recomputation, how much state is sharded) is chosen best for it under
our model: the cut of equal arithmetic, and the fastest of all the rest that fits. Both plans are then built out to the
last instruction and simulated.
"""

import argparse
import dataclasses
import sys
import time
from pathlib import Path

from autopar import solver
from autopar.common.progress import Progress
from autopar.frontend.tracing import trace
from autopar.hardware.cluster import Cluster
from autopar.ir.rules import RuleBook
from autopar.passes.assign_stages import balanced
from autopar.passes.split_scan import split_scans
from autopar.plan.context import Rejection
from autopar.plan.options import PlanRequest
from autopar.search.inter_op.build_stages import MicrobatchedStep, build, cut_layers
from autopar.search.inter_op.decide_stages import BuildLimits, StageChoice
from autopar.search.inter_op.evaluate import choice_of
from autopar.search.inter_op.search import pipeline_candidates
from autopar.search.inter_op.search_space import is_long, microbatch_numbers, submesh_sizes
from autopar.search.inter_op.stage_problems import DecidedOptions, tables
from autopar.search.inter_op.staged import StagedStep
from autopar.search.planner import planning_context
from autopar.solver import StageProblem
from autopar.solver.stage_problem import stage_peak_bytes
from benchmarks.auto_vs_manual.models import models
from benchmarks.machine import description, markdown

RESULTS = Path(__file__).parent / "results" / "alpa_plans.md"
TIME_LIMIT_S = 20.0
BUILT = 8  # of the settings for Alpa's stages so many are built out: more than the search builds of its own answers
COLUMNS = ("model", "V100s", "ours", "Alpa's", "Alpa's / ours", "our plan", "Alpa's plan", "planned in")


# The stages of the plans that Alpa published, as (data, operator) meshes, by the sizes of its table 5.
STAGES = {
    "2.6B": ((2, 1), (2, 1), (4, 1)),
    "6.7B": ((2, 4),) * 2,
    "15B": ((2, 4),) * 4,
    "39B": ((1, 4),) * 16,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    model: str
    devices: int
    ours_s: float
    ours: str
    alpas_s: float
    alpas: str
    fits: bool
    planning_s: float


def alpas_plan(
    published: tuple[tuple[int, int], ...], cluster: Cluster, cuts: dict[int, MicrobatchedStep]
) -> tuple[StagedStep, StageChoice, int]:
    """The published stages, with the rest chosen best for them: of the best few by the tables the fastest as built."""
    ranked: list[tuple[tuple[bool, float], StageChoice, int]] = []
    limit_bytes, decided = cluster.device.memory_bytes, DecidedOptions()
    limits = BuildLimits(limit_bytes=limit_bytes, time_limit_s=TIME_LIMIT_S)
    for m, cut in cuts.items():
        sizes = submesh_sizes(cluster, PlanRequest(), len(cut.layers))
        options = tables(cut, cluster, sizes, limits, decided, is_long=is_long(cut.step.traced))
        problem = StageProblem(
            options=tuple(o.option for o in options),
            num_devices=cluster.num_devices,
            num_layers=len(cut.layers),
            num_microbatches=m,
            schedule=solver.Schedule.ONE_F_ONE_B,
            limit_bytes=limit_bytes,
            host_devices=cluster.domain_devices,
        )
        firsts = balanced(cut.layers, len(published))
        lasts = [*firsts[1:], len(cut.layers)]
        shapes = [tuple(n for n in shape if n > 1) or (1,) for shape in published]
        ways = [[i for i, o in enumerate(options) if o.mesh.axis_sizes == shape] for shape in shapes]
        assert all(ways), "the published meshes are among those of the tables"
        # All stages decided and recomputed alike, and each stage its own fastest way that fits.
        several = [[of[min(n, len(of) - 1)] for of in ways] for n in range(max(map(len, ways)))]
        spans = list(zip(firsts, lasts, strict=True))
        for chosen in [*several, fastest_that_fit(problem, spans, ways)]:
            stages = stages_of(spans, chosen)
            peak = max(stage_peak_bytes(problem, stages))
            rank = (peak > limit_bytes, solver.step_time_s(problem, stages))
            plan = solver.StagePlan(stages=stages, step_time_s=rank[1], bound_s=rank[1], peak_bytes=(peak,))
            entry = rank, choice_of(problem, plan, options), m
            ranked += [entry] if entry not in ranked else []
    ranked.sort(key=lambda entry: entry[0])
    limits = BuildLimits(limit_bytes=limit_bytes, time_limit_s=TIME_LIMIT_S)
    built = [(build(cuts[m], choice, cluster, limits), choice, m) for _, choice, m in ranked[:BUILT]]
    return min(built, key=lambda b: (max(b[0].simulation.peak_bytes) > limit_bytes, b[0].simulation.step_time_s))


def stages_of(spans: list[tuple[int, int]], chosen: list[int]) -> tuple[solver.Stage, ...]:
    return tuple(solver.Stage(first=a, last=b, option=i) for (a, b), i in zip(spans, chosen, strict=True))


def fastest_that_fit(problem: StageProblem, spans: list[tuple[int, int]], ways: list[list[int]]) -> list[int]:
    """For each stage the fastest of its ways that fits where it stands, the smallest where none does."""
    found = [of[0] for of in ways]
    for q, (first, last) in enumerate(spans):

        def rank(i: int, q: int = q, first: int = first, last: int = last) -> tuple[int, float]:
            peak = stage_peak_bytes(problem, stages_of(spans, [*found[:q], i, *found[q + 1 :]]))[q]
            option = problem.options[i]
            seconds = float((option.forward_s + option.backward_s)[first:last].sum())
            return max(peak, problem.limit_bytes), seconds

        found[q] = min(ways[q], key=rank)
    return found


def compare(name: str) -> Row:
    model = models()[f"gpt-{name}"]
    cluster = Cluster.preset("p3.16xlarge", hosts=model.gpus // 8)
    case, rules = model.build(), RuleBook()
    traced = trace(case.step, case.shapes(), names=("state", "batch"), donate=(0,), batch=(1,))
    limit_bytes = cluster.device.memory_bytes
    begun = time.perf_counter()
    request = PlanRequest(memory_limit_bytes=limit_bytes)
    found, *_ = pipeline_candidates(planning_context(traced, cluster, request, rules, Progress("ours", show=False)))
    planning_s = time.perf_counter() - begun
    numbers = microbatch_numbers(traced, cluster, PlanRequest())
    cuts = {m: cut_layers(split_scans(traced, 1, rules), m, rules) for m in numbers}
    theirs, choice, m = alpas_plan(STAGES[name], cluster, cuts)
    if isinstance(found, Rejection):
        raise SystemExit(f"{name}: {found.why}")
    ours = found.staged
    return Row(
        model=name,
        devices=cluster.num_devices,
        ours_s=ours.simulation.step_time_s,
        ours=found.choice.text(ours.graph.num_microbatches),
        alpas_s=theirs.simulation.step_time_s,
        alpas=choice.text(m),
        fits=max(theirs.simulation.peak_bytes) <= limit_bytes,
        planning_s=planning_s,
    )


def cells(row: Row) -> tuple[str, ...]:
    fits = "" if row.fits else " (does not fit)"
    return (
        row.model,
        str(row.devices),
        f"{row.ours_s:.2f} s",
        f"{row.alpas_s:.2f} s{fits}",
        f"{row.alpas_s / row.ours_s:.3f}",
        row.ours,
        row.alpas,
        f"{row.planning_s:.0f} s",
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(STAGES), help=f"of {', '.join(STAGES)}")
    parser.add_argument("--keep", action="store_true", help=f"write {RESULTS.name}")
    arguments = parser.parse_args()
    rows = []
    for name in arguments.models:
        rows.append(compare(name))
        print(" | ".join(cells(rows[-1])), flush=True)
    if arguments.keep:
        title = "# Plans for Alpa's GPT models on p3.16xlarge"
        RESULTS.write_text(f"{title}\n\n{description()}\n\n{markdown(COLUMNS, [cells(row) for row in rows])}\n")
    return 0 if all(row.ours_s <= row.alpas_s for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
