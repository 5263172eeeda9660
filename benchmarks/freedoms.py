"""What each freedom of the search is worth: predicted step times of the whole search, and with one freedom taken away.

    python -m benchmarks.freedoms                 five workloads (an hour on two cores)
    python -m benchmarks.freedoms gpt moe         some
    python -m benchmarks.freedoms --keep          also keeps the table in results/freedoms.md, cell by cell

All freedoms are those of one search, that over stages and micro-batches, with the time and the memory of one model (Zhu
et al., "Mist: efficient distributed training of large language models via memory-parallelism co-optimization", EuroSys
2025, takes the same ones together). It has one schedule, 1F1B, and no program without micro-batches, so that it is
short; devices have little memory. No device is needed. Without a freedom the search is the same, but

- micro-batches: only the smallest that it would try;
- recomputation by stage: one policy for all stages, the best of them;
- any recomputation: none;
- state by stage: the same price on bytes of state and of saved values in all stages, the best of them, so that no stage
  splits its state further than another one of the same mesh;
- overlap: strategies are chosen as if communication hid behind nothing; the simulation hides it as always;
- stages: one stage on all devices.

Offload is not chosen by the search: its column has the best of recipes that have it, of data parallelism with ZeRO, in
one to eight micro-batches, with all or nothing computed again.
"""

import argparse
import collections
import dataclasses
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import optax

import autopar
from autopar.cost import cost_model
from autopar.errors import MemoryLimitError, SolverError
from autopar.frontend.tracing import trace
from autopar.inter_op import evaluate, layer_decisions, search, stage_problems
from autopar.inter_op.decide_stages import StageDecider
from autopar.inter_op.evaluate import PipelineEvaluator
from autopar.inter_op.microbatch_counts import MicrobatchCounts
from autopar.inter_op.refine_one_stage import refine_one_stage
from autopar.inter_op.search_space import microbatch_numbers
from autopar.inter_op.stage_costs import PricedOption
from autopar.intra_op import spmd_search
from autopar.passes.remat import Recompute
from autopar.plan.options import PlanRequest
from autopar.solver import NoStages, StagePlan, StageProblem
from benchmarks.machine import description, kept_rows, markdown
from benchmarks.zoo import CASES

RESULTS = Path(__file__).parent / "results" / "freedoms.md"
ADAM = optax.adamw(1e-4)
SCHEDULE = "1f1b"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """A case of the zoo on a cluster; `memory`: of the smallest device."""

    case: str
    cluster: str
    memory: str
    sizes: dict[str, Any]


WORKLOADS = {
    "gpt": Workload(
        case="gpt", cluster="p3.16xlarge", memory="3GB",
        sizes=dict(layers=4, width=2048, heads=16, vocabulary=51_200, length=1024, batch=64, dtype=jnp.float16,
                   optimizer=ADAM),
    ),
    "long context": Workload(
        case="gpt", cluster="dgx-a100-40g", memory="8GB",
        sizes=dict(layers=4, width=1024, heads=16, vocabulary=32_000, length=8192, batch=16, dtype=jnp.float16,
                   optimizer=ADAM),
    ),
    "moe": Workload(
        case="moe", cluster="p3.16xlargex2", memory="3GB",
        sizes=dict(layers=4, width=1024, heads=16, experts=16, vocabulary=32_000, length=1024, batch=64,
                   optimizer=ADAM),
    ),
    "vit": Workload(
        case="vit", cluster="dgx-h100:4", memory="2.5GB",
        sizes=dict(layers=6, width=1024, heads=16, image=224, patch=16, batch=256),
    ),
    "two kinds": Workload(
        case="gpt", cluster="dgx-a100-80g:4+p3.16xlarge:4", memory="8GB",
        sizes=dict(layers=4, width=2048, heads=16, vocabulary=51_200, length=1024, batch=64, dtype=jnp.float16,
                   optimizer=ADAM),
    ),
}  # fmt: skip
FREEDOMS = ("micro-batches", "recomputation by stage", "any recomputation", "state by stage", "overlap", "stages")
COLUMNS = ("workload", "cluster", "memory", "plan", "step", *(f"without {name}" for name in FREEDOMS), "with offload")


@contextmanager
def options_known() -> Iterator[dict[int, PricedOption]]:
    """While it lasts, the priced option of each option of the search over stages, by its identity."""
    known: dict[int, PricedOption] = {}
    undominated = stage_problems.undominated

    def noted(options: Sequence[PricedOption]) -> tuple[PricedOption, ...]:
        found = undominated(options)
        known.update((id(o.option), o) for o in found)
        return found

    with mock.patch.object(stage_problems, "undominated", noted):
        yield known


@contextmanager
def alike(subsets: Callable[[Sequence[PricedOption]], Sequence[Sequence[int]]]) -> Iterator[None]:
    """While it lasts, all stages of a pipeline have options of one of these subsets, of whichever is best."""
    best_stages = evaluate.best_stages
    with options_known() as known:

        def within_subsets(
            problems: Sequence[StageProblem], within: float = 1.0, under_s: float = math.inf
        ) -> list[StagePlan | NoStages]:
            parts, of = [], []
            for number, problem in enumerate(problems):
                for subset in subsets([known[id(o)] for o in problem.options]):
                    options = tuple(problem.options[i] for i in subset)
                    placements = tuple(problem.placements[i] for i in subset) if problem.placements else ()
                    parts.append(dataclasses.replace(problem, options=options, placements=placements))
                    of.append((number, subset))
            answers: list[StagePlan | NoStages] = [NoStages(reason="no options")] * len(problems)
            for (number, subset), answer in zip(of, best_stages(parts, within, under_s), strict=True):
                before = answers[number]
                if isinstance(answer, StagePlan):
                    stages = tuple(dataclasses.replace(s, option=subset[s.option]) for s in answer.stages)
                    answer = dataclasses.replace(answer, stages=stages)
                    if isinstance(before, NoStages) or answer.step_time_s < before.step_time_s:
                        answers[number] = answer
                elif isinstance(before, NoStages):
                    answers[number] = answer
            return answers

        with (
            mock.patch.object(stage_problems, "best_stages", within_subsets),
            mock.patch.object(evaluate, "best_stages", within_subsets),
        ):
            yield


def by_policy(options: Sequence[PricedOption]) -> list[list[int]]:
    return [[i for i, o in enumerate(options) if o.policy == policy.value] for policy in Recompute]


def kept_whole(options: Sequence[PricedOption]) -> list[list[int]]:
    return [[i for i, o in enumerate(options) if o.policy == Recompute.NOTHING.value]]


def by_price(options: Sequence[PricedOption]) -> list[list[int]]:
    """The decisions under the lowest price of a byte on every mesh, those under the next one, and so on."""
    prices: dict[Any, set[tuple[float, int]]] = collections.defaultdict(set)
    for o in options:
        prices[o.mesh, o.part].add((o.terms.s_per_byte, o.terms.in_flight))
    ranked = {place: sorted(found) for place, found in prices.items()}
    levels = max(map(len, ranked.values()), default=0)

    def is_of(o: PricedOption, level: int) -> bool:
        found = ranked[o.mesh, o.part]
        return (o.terms.s_per_byte, o.terms.in_flight) == found[min(level, len(found) - 1)]

    return [[i for i, o in enumerate(options) if is_of(o, level)] for level in range(levels)]


@contextmanager
def one_price() -> Iterator[None]:
    """While it lasts, all stages are decided under the highest price of a byte that one of them has."""
    decide = StageDecider.decide

    def together(self: StageDecider, terms: Sequence[Any]) -> Any:
        dearest = max(terms, key=lambda t: (t.s_per_byte, t.in_flight))
        return decide(self, [dearest] * len(terms))

    with alike(by_price), mock.patch.object(StageDecider, "decide", together):
        yield


@contextmanager
def nothing_hides() -> Iterator[None]:
    """While it lasts, all communication is charged where strategies are chosen."""

    def as_it_is(evaluated: PipelineEvaluator, others: MicrobatchCounts, counts: Sequence[float]) -> None:
        refine_one_stage(evaluated, others, ())

    with (
        mock.patch.object(cost_model, "EXPOSED_FRACTION", 1.0),
        mock.patch.object(search, "LEAST_EXPOSED_FRACTION", 1.0),
        mock.patch.object(layer_decisions, "LEAST_EXPOSED_FRACTION", 1.0),
        mock.patch.object(spmd_search, "EXPOSED_FRACTIONS", (1.0, 1.0)),
        mock.patch.object(search, "refine_one_stage", as_it_is),
    ):
        yield


@contextmanager
def one_stage() -> Iterator[None]:
    """While it lasts, pipelines have one stage."""
    best_stages = evaluate.best_stages

    def whole(problems: Sequence[StageProblem], within: float = 1.0, under_s: float = math.inf) -> Any:
        return best_stages([dataclasses.replace(p, fixed_num_stages=1) for p in problems], within, under_s)

    with (
        mock.patch.object(stage_problems, "best_stages", whole),
        mock.patch.object(evaluate, "best_stages", whole),
    ):
        yield


class Bench:
    """The step of a workload, and its plans."""

    def __init__(self, workload: Workload) -> None:
        self.cluster = autopar.Cluster.parse(workload.cluster)
        case = CASES[workload.case](**workload.sizes)
        state = jax.eval_shape(case.init, jax.random.key(0))
        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), case.batch(0))
        self.step, self.arguments = case.step, (state, batch)
        self.options = {
            "cluster": self.cluster, "cache_dir": None, "show_progress": False,
            "memory_limit_bytes": workload.memory,
        }  # fmt: skip

    def planned(self, **options: Any) -> autopar.Plan | None:
        """None where nothing fits."""
        try:
            return autopar.plan(self.step, *self.arguments, **options, **self.options)
        except (MemoryLimitError, SolverError):
            return None

    def searched(self, **options: Any) -> autopar.Plan | None:
        return self.planned(schedule=SCHEDULE, **options)

    def smallest_microbatches(self) -> int:
        traced = trace(self.step, self.arguments, names=("state", "batch"), donate=(0,), batch=(1,))
        return microbatch_numbers(traced, self.cluster, PlanRequest())[0]

    def without(self, freedom: str) -> autopar.Plan | None:
        taken: dict[str, Callable[[], Any]] = {
            "recomputation by stage": lambda: alike(by_policy),
            "any recomputation": lambda: alike(kept_whole),
            "state by stage": one_price,
            "overlap": nothing_hides,
            "stages": one_stage,
        }
        options = {"num_microbatches": self.smallest_microbatches()} if freedom == "micro-batches" else {}
        with taken.get(freedom, nullcontext)():
            return self.searched(**options)

    def offloaded_s(self) -> float:
        """The fastest of the recipes with offload."""
        best_s, places = math.inf, ("optimizer", "activations", "optimizer and activations")
        for place, zero, m, again in itertools.product(places, (1, 3), (1, 2, 4, 8), ("nothing", "input")):
            if m == 1 and again != "nothing":
                continue
            several = {} if m == 1 else {"num_microbatches": m, "recompute": again}
            recipe = autopar.recipes.combine(dp=self.cluster.num_devices, zero=zero, offload=place, **several)
            plan = self.planned(plan=recipe)
            if plan is not None:
                best_s = min(best_s, plan.predicted.step_time_s)
        return best_s


def compared(name: str) -> Iterator[list[str]]:
    """The row of a workload, each time with one more cell: how many times as long a step takes without a freedom."""
    workload, bench = WORKLOADS[name], Bench(WORKLOADS[name])
    whole = bench.searched()
    if whole is None:
        raise SystemExit(f"{name}: no plan fits into {workload.memory}")
    whole_s, pipeline = whole.predicted.step_time_s, whole.record.pipeline
    text = (
        "one program"
        if pipeline is None
        else f"{len(pipeline.stages)} stages, {pipeline.num_microbatches} micro-batches, recompute "
        f"{' and '.join(dict.fromkeys(pipeline.recomputed))}"
    )
    row = [name, workload.cluster, workload.memory, text, f"{whole_s:.4g} s"]
    for freedom in FREEDOMS:
        plan = bench.without(freedom)
        row.append(_ratio(plan.predicted.step_time_s if plan is not None else math.inf, whole_s))
        yield row
    row.append(_ratio(bench.offloaded_s(), whole_s))
    yield row


def _ratio(seconds: float, whole_s: float) -> str:
    return f"{seconds / whole_s:.3f}" if math.isfinite(seconds) else "none fits"


def keep(rows: list[list[str]]) -> None:
    """Rows kept before stay, but for those made again."""
    found = {row[0]: row for row in kept_rows(RESULTS) + rows}
    ordered = [found[name] for name in WORKLOADS if name in found]
    RESULTS.write_text(
        "# What each freedom of the search is worth\n\nPredicted step time of the whole search, and of the search "
        "without one freedom as a multiple of it (empty: not made yet).\n\n"
        f"The last row: {description()}\n\n{markdown(COLUMNS, ordered)}\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument("--keep", action="store_true", help=f"write {RESULTS.name}")
    arguments = parser.parse_args()
    rows: dict[str, list[str]] = {}
    for name in arguments.workloads or WORKLOADS:
        for row in compared(name):
            rows[name] = list(row)
            print(" | ".join(row), flush=True)
            if arguments.keep:
                keep([rows[name]])
    print(markdown(COLUMNS, list(rows.values())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
