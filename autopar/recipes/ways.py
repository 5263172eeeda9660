"""Manual ways to run a step, by name, and the best plan of each: its settings by bounds, estimates and few plans.

A new way is a function that goes through the settings that it leaves open, and a line of `WAYS`.

Estimates are made on fewer of a step's equal layers, by the rules of `search.inter_op.truncated_model` and
`search.inter_op.evaluate`: one may be off by `ESTIMATE_ERROR` and `PEAK_ERROR`, so what may be the best by it is
planned, and the rest is not.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from msgspec.structs import replace

from autopar import recipes
from autopar.common.progress import Progress
from autopar.cost.cost_model import least_time_s
from autopar.errors import AutoparError, MemoryLimitError
from autopar.ir.binding import bytes_on_each_device
from autopar.passes.remat import policies_of
from autopar.plan.context import PlanningContext
from autopar.plan.options import PlanRequest
from autopar.plan.plan import Plan
from autopar.plan.summary import fullest
from autopar.recipes.parse import ALIASES
from autopar.recipes.walks import (
    LINE_ERROR,
    Attempt,
    Outcome,
    Problem,
    Walk,
    first_points,
    frontier,
    least_bubbles,
    walk,
)
from autopar.search.inter_op.build_stages import recomputed
from autopar.search.inter_op.evaluate import PEAK_ERROR
from autopar.search.inter_op.requested import estimated_one_stage, requested_step
from autopar.search.inter_op.truncated_model import ESTIMATE_ERROR
from autopar.search.planner import make_plan, planning_context

MOST_STAGES = 16
# Beside 1F1B: the zero-bubble schedule that needs no more memory, and several stages on each group of devices.
SCHEDULES = ("zb-h1", "interleaved")


def cut(m: int, pp: int = 1) -> int | None:
    """The number of micro-batches to ask for: none where nothing is cut."""
    return m if m > 1 or pp > 1 else None


def powers(most: int) -> list[int]:
    """Powers of two up to a number."""
    return [2**i for i in range(most.bit_length()) if 2**i <= most]


def inside_host(problem: Problem) -> int:
    """The devices that the fastest links join."""
    return min(problem.cluster.domain_devices, problem.cluster.num_devices)


def groups(problem: Problem) -> Iterator[int]:
    """The sizes of groups of devices inside of a host, the largest first."""
    inside, n = inside_host(problem), problem.cluster.num_devices
    return (size for size in range(inside, 1, -1) if inside % size == 0 and n % size == 0)


def data_parallel(problem: Problem, zero: int = 0, offload: str = "nothing", zero_size: int = 0) -> Walk:
    return frontier(
        problem,
        lambda p, m: recipes.combine(
            zero=zero, zero_size=zero_size or None, num_microbatches=cut(m), recompute=p.recompute, offload=offload
        ),
        zero=zero,
        zero_size=zero_size,
    )


def hybrid_sharded(problem: Problem) -> Walk:
    """The devices of a host share the whole state (ZeRO-3), hosts are copies. On one host that is ZeRO-3 itself."""
    return data_parallel(problem, 3, zero_size=problem.cluster.domain_devices)


def tensor_groups(problem: Problem, tp: int, zero: int = 0) -> Walk:
    """So many devices of a host share each matrix; all such groups are copies, which share the state as ZeRO says."""
    return frontier(
        problem,
        lambda p, m: recipes.combine(tp=p.tp, zero=p.zero, num_microbatches=cut(m), recompute=p.recompute),
        tp=tp,
        zero=zero,
    )


def tensor_parallel(problem: Problem, zero: int = 0) -> Walk:
    """Groups of each size inside of a host, the largest first; where the state is shared, there are several of them."""
    for tp in groups(problem):
        if not zero or tp < problem.cluster.num_devices:
            yield from tensor_groups(problem, tp, zero)


def megatron(
    problem: Problem,
    most_tp: int | None = None,
    least_tp: int = 1,
    least_pp: int = 1,
    schedules: Sequence[str] = (),
) -> Walk:
    """Every product of tensor (inside of a host), pipeline and data parallelism; the optimiser's state in parts.

    Those with most tensor parallelism come first: they are the likeliest to fit, where a walk is ended early.
    """
    n, inside = problem.cluster.num_devices, problem.cluster.domain_devices
    starts = [
        point
        for tp in reversed(powers(most_tp or inside))
        for pp in powers(MOST_STAGES)
        if n % (tp * pp) == 0 and inside % tp == 0 and tp >= least_tp and pp >= least_pp
        for point in first_points(problem, tp=tp, pp=pp, zero=1 if tp * pp < n else 0)
    ]
    return walk(
        problem,
        starts,
        lambda p, m: recipes.combine(
            tp=p.tp,
            pp=p.pp,
            zero=p.zero,
            schedule=p.schedule or None,
            num_microbatches=cut(m, p.pp),
            recompute=p.recompute,
        ),
        schedules,
    )


def expert_and_data(problem: Problem) -> Walk:
    """Experts in parts over as many devices as divide them, examples over all; ZeRO-2 for what is not of experts.

    Source: Rajbhandari et al., "DeepSpeed-MoE", 2022, section 5; Lepikhin et al., "GShard", 2020, section 3.
    """
    n = problem.cluster.num_devices
    ep = max(d for d in range(1, n + 1) if n % d == 0 and problem.experts % d == 0)

    for zero in (2, 0, 3):
        yield from frontier(
            problem,
            lambda p, m: recipes.combine(ep=ep, zero=p.zero, num_microbatches=cut(m), recompute=p.recompute),
            zero=zero,
        )


def sequence(problem: Problem, kind: str, zero: int = 0) -> Walk:
    """Groups of each size inside of a host share a sequence, the largest first; the groups are copies, and all devices
    share the state as ZeRO says.
    """
    for sp in groups(problem):
        yield from frontier(
            problem,
            lambda p, m: recipes.combine(
                sp=p.sp, sequence=kind, zero=zero, num_microbatches=cut(m), recompute=p.recompute
            ),
            sp=sp,
            zero=zero,
        )


# In the order in which they are planned.
WAYS: dict[str, Callable[[Problem], Walk]] = {
    "data parallel": data_parallel,
    "ZeRO-1": functools.partial(data_parallel, zero=1),
    "ZeRO-2": functools.partial(data_parallel, zero=2),
    "ZeRO-3 (FSDP)": functools.partial(data_parallel, zero=3),
    "hybrid sharded": hybrid_sharded,
    "tensor parallel": tensor_parallel,
    "tensor and FSDP": functools.partial(tensor_parallel, zero=3),
    "pipeline": functools.partial(megatron, most_tp=1, least_pp=2, schedules=SCHEDULES),
    "pipeline and tensor": functools.partial(megatron, least_tp=2, least_pp=2, schedules=SCHEDULES),
    "sequence": functools.partial(sequence, kind="ulysses", zero=3),
    "expert": expert_and_data,
}


# The way that leaves open what a call of a recipe leaves to its defaults.
_OF_RECIPE: dict[tuple[str, tuple[Any, ...]], str] = {
    ("data_parallel", ()): "data parallel",
    ("zero", (1,)): "ZeRO-1",
    ("zero", (2,)): "ZeRO-2",
    ("zero", (3,)): "ZeRO-3 (FSDP)",
    ("tensor_parallel", ()): "tensor parallel",
    ("pipeline", ()): "pipeline",
    ("sequence_parallel", ()): "sequence",
    ("expert_parallel", ()): "expert",
}
# Hybrid sharding has a name in PyTorch, and no recipe of its own without the devices of a host.
SHORT = {alias: _OF_RECIPE[call] for alias, call in ALIASES.items()} | {"hsdp": "hybrid sharded"}
QUICK = ("data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3 (FSDP)", "hybrid sharded")  # one mesh, one number of parts each
NOT_BY_DEFAULT = "ZeRO-2"  # lies between its neighbours


def way_called(name: str) -> str | None:
    """The way of a name or a short name, in whatever case; None where there is none."""
    known = {way.lower(): way for way in WAYS} | SHORT
    return known.get(name.lower().replace("_", " "))


def applicable(problem: Problem) -> list[str]:
    """The names of the ways that are ways of their own for a step on a cluster."""
    n, inside = problem.cluster.num_devices, inside_host(problem)
    if n == 1:
        return ["data parallel"]  # what is left is how much is recomputed, and in how many micro-batches
    missing = {NOT_BY_DEFAULT: True, "hybrid sharded": inside in (1, n), "expert": problem.experts == 1}
    missing |= dict.fromkeys(("tensor parallel", "tensor and FSDP", "pipeline and tensor"), inside == 1)
    missing["sequence"] = inside == 1 or not problem.attends
    return [name for name in WAYS if not missing.get(name, False)]


# How far above the limit an estimate may be of what fits as a plan: for devices that share matrices, decisions that
# need less memory are found for all layers that are not found for a few.
LEANER_ERROR = 0.25


def best_case(outcome: Outcome) -> tuple[int, float]:
    """The rank of what an estimate may come to at best, to be compared with that of a plan."""
    time_s, peak_bytes = (1 - ESTIMATE_ERROR) * outcome.step_time_s, int(outcome.peak_bytes / (1 + PEAK_ERROR))
    return dataclasses.replace(outcome, step_time_s=time_s, peak_bytes=peak_bytes).rank()


class Estimates:
    """Of the settings of a step on a cluster."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.rules, self.graphs = problem, problem.rules, problem.graphs

    def outcome(self, attempt: Attempt, best: Outcome | None) -> Outcome | None:
        """What an attempt comes to; None where only a plan tells: where there is no estimate, or the attempt may be the
        best and an estimate may be wrong in whether it fits.
        """
        if not attempt.frontier:
            return self.slow_stages(attempt.options, best)
        one_program = attempt.options.admits_one_program
        request = dataclasses.replace(attempt.options, num_stages=1)
        try:
            context = self.context(request)
            found = self.state_exceeds(context) or self.too_slow(context, best)
            if found is not None or (one_program and self.problem.whole_fits):
                return found  # an estimate of one program only tells what is far from fitting
            found = self.estimated(context)
        except AutoparError:  # the plan is refused too, and says why
            return None
        if found is None:
            return None
        if one_program:  # not in one stage, though nearly that: what is far from fitting is told alone
            return found if found.peak_bytes > (1 + LINE_ERROR) * found.limit_bytes else None
        near = 1 / (1 + PEAK_ERROR) < found.peak_bytes / found.limit_bytes < 1 + LEANER_ERROR
        may_be_best = best is None or best_case(found) < best.rank()
        return None if near and may_be_best else found

    def context(self, request: PlanRequest) -> PlanningContext:
        cluster, progress = self.problem.cluster, Progress("", show=False)
        return planning_context(self.problem.traced, cluster, request, self.rules, progress, graphs=self.graphs)

    def state_exceeds(self, context: PlanningContext) -> Outcome | None:
        """A request under which the arguments alone exceed the memory, each split along every axis that may split it:
        without a recipe, over all devices.
        """
        request, graph = context.request, context.views.annotated
        first, n = len(graph.constants), context.cluster.num_devices
        bound = request.binding.on(n) if request.binding is not None else None
        in_host = {graph.block.inputs[first + i] for i in request.in_host}
        in_host |= bound[1].in_host(graph) if bound is not None else set()
        state = [graph.values[v] for v in (graph.block.inputs[at] for at in graph.donated) if v not in in_host]
        needed_bytes = bytes_on_each_device(state, *bound) if bound is not None else sum(v.nbytes for v in state) / n
        if needed_bytes <= context.limit_bytes:
            return None
        return Outcome(
            step_time_s=math.inf, peak_bytes=int(needed_bytes), limit_bytes=context.limit_bytes, of_state=True
        )

    def state_alone(self, request: PlanRequest) -> Outcome | None:
        """What is known of a request that was refused for its memory, if it names no stages, from its state alone."""
        if request.num_stages not in (None, 1):
            return None
        try:
            return self.state_exceeds(self.context(request))
        except AutoparError:  # the refusal of the plan says why
            return None

    def too_slow(self, context: PlanningContext, best: Outcome | None) -> Outcome | None:
        """A setting whose arithmetic alone takes longer than the best so far, shared by all devices without waiting, in
        whatever number of micro-batches: in one of them no operation takes longer for each example.
        """
        if best is None or not best.fits or context.request.recompute == "nothing":
            return None
        least_s = sum(self.least_s(context))
        if least_s < best.step_time_s:
            return None
        return Outcome(step_time_s=least_s, peak_bytes=0, limit_bytes=context.limit_bytes, too_slow=True)

    def slow_stages(self, request: PlanRequest, best: Outcome | None) -> Outcome | None:
        """Stages that take longer than the best so far by arithmetic alone, shared by all devices, and by the bubbles
        that they have in their micro-batches however unequal they are.
        """
        stages, m = request.num_stages or 1, request.num_microbatches or 1
        if best is None or not best.fits:
            return None
        try:
            context = self.context(dataclasses.replace(request, num_stages=1))
            passes_s, once_s = self.least_s(context)
        except AutoparError:  # the plan is refused too, and says why
            return None
        least_s = passes_s + once_s
        if request.schedule in (None, "1f1b") and (request.chunks or 1) == 1:
            least_s = max(least_s, least_bubbles(stages, m) * passes_s)
        if least_s < best.step_time_s:
            return None
        return Outcome(step_time_s=least_s, peak_bytes=0, limit_bytes=context.limit_bytes, too_slow=True)

    def least_s(self, context: PlanningContext) -> tuple[float, float]:
        """The least seconds of (the passes, what runs once a step) under the recomputation of a request, shared by all
        devices, in whatever number of micro-batches.
        """
        request, traced, cluster = context.request, context.traced, context.cluster

        def least() -> tuple[float, float]:
            whole = dataclasses.replace(context, request=dataclasses.replace(request, num_microbatches=1))
            microbatched = requested_step(whole, True).microbatched
            graph = recomputed(microbatched, policies_of(request.recompute, len(microbatched.layers))).graph
            passes = tuple(op for op in graph.block.ops if op.section.repeats)
            passes_only = dataclasses.replace(graph, block=replace(graph.block, ops=passes))
            passes_s = least_time_s(passes_only, cluster)
            return passes_s, max(0.0, least_time_s(graph, cluster) - passes_s)

        return self.graphs.of(traced, ("least time", cluster, request.recompute), least)

    def estimated(self, context: PlanningContext) -> Outcome | None:
        """What a requested step in one stage comes to, as `requested_pipelines` takes it."""
        binding = context.request.binding
        if binding is not None and binding.offloads_activations:
            return None
        found = estimated_one_stage(context, keeps=True)
        if found is None:
            return None
        return Outcome(step_time_s=found.step_time_s, peak_bytes=found.peak_bytes, limit_bytes=context.limit_bytes)


MOST_ATTEMPTS = 40


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What a way came to. `plan` is the best that fits, or else one that was built though it does not fit; `error` is
    why there is none; `text` is the setting of either.

    `attempts`: how many settings were seen, by a plan, an estimate or a bound, of which `fitting` are known to fit;
    `cut_short`: why not all of them were. `planned_s`: seconds of this machine.
    """

    text: str = ""
    plan: Plan | None = None
    outcome: Outcome | None = None
    error: AutoparError | None = None
    attempts: int = 0
    fitting: int = 0
    cut_short: str = ""
    planned_s: float = 0.0

    @property
    def excess_bytes(self) -> int:
        """Bytes of a device by which the setting that is the nearest to fitting exceeds the limit."""
        return 0 if self.outcome is None else max(0, self.outcome.peak_bytes - self.outcome.limit_bytes)


def made_of(
    problem: Problem,
    settings: Walk,
    most_attempts: int = MOST_ATTEMPTS,
    report: Callable[[Made], None] = lambda made: None,
    progress: Progress | None = None,
) -> Made:
    """The best of the settings of a way; `report` is told after each of them what it came to so far, `progress` shows
    which is planned.
    """
    making = _Making(problem, report, progress or Progress("", show=False))
    outcome = None
    while True:
        try:
            attempt = settings.send(outcome)
        except StopIteration:
            break
        if making.made.attempts == most_attempts:
            making.made = dataclasses.replace(making.made, cut_short=f"ended after {most_attempts} attempts")
            break
        outcome = making.seen(attempt)
    making.settle()
    return making.made


def outcome_of(plan: Plan) -> Outcome:
    """What a plan comes to, on the device that comes nearest to its limit."""
    full = fullest(plan.record)
    assert full.limit_bytes is not None, "make_plan always has a limit"
    predicted = plan.predicted
    return Outcome(
        step_time_s=predicted.step_time_s,
        peak_bytes=full.peak_bytes,
        limit_bytes=full.limit_bytes,
        work_s=(1 - predicted.bubble_fraction) * predicted.step_time_s if plan.record.pipeline is not None else 0.0,
    )


def _state_error(problem: Problem, outcome: Outcome) -> MemoryLimitError:
    return MemoryLimitError(
        where=f"the state of {problem.traced.name} under the recipe",
        limit_bytes=outcome.limit_bytes,
        needed_bytes=outcome.peak_bytes,
        largest=[],
        hint="choose a recipe under which more devices share the state",
    )


class _Making:
    """What a way has come to, while its attempts are gone through."""

    def __init__(self, problem: Problem, report: Callable[[Made], None], progress: Progress) -> None:
        self.problem, self.report, self.progress, self.made = problem, report, progress, Made()
        self.begun = time.perf_counter()
        self.estimates = Estimates(problem)
        self.waiting: list[tuple[Attempt, Outcome]] = []  # estimates of which no plan was made

    def seen(self, attempt: Attempt) -> Outcome | None:
        """What an attempt comes to, by an estimate or a plan; None where it is refused, but not for its memory."""
        known = [outcome for _, outcome in self.waiting]
        known += [self.made.outcome] if self.made.outcome is not None and self.made.plan is not None else []
        outcome = self.estimates.outcome(attempt, min(known, key=Outcome.rank, default=None))
        self.made = dataclasses.replace(self.made, attempts=self.made.attempts + 1)
        if outcome is None:
            return self.planned(attempt)
        if outcome.of_state:
            self.kept(attempt, outcome, None, _state_error(self.problem, outcome))
        elif not outcome.too_slow:
            self.waiting.append((attempt, outcome))
            self.made = dataclasses.replace(self.made, fitting=self.made.fitting + outcome.fits)
        return outcome

    def planned(self, attempt: Attempt, *, is_counted: bool = False) -> Outcome | None:
        """What the plan of an attempt comes to, which is kept where it is the best. `is_counted`: among `fitting`."""
        problem, plan, outcome = self.problem, None, None
        error: AutoparError | None = None
        progress = self.progress.within(attempt.text)
        try:
            plan = make_plan(
                problem.traced, problem.trees, problem.cluster, attempt.options, problem.rules, progress, problem.graphs
            )
            outcome = outcome_of(plan)
        except MemoryLimitError as refusal:
            refused = Outcome(step_time_s=math.inf, peak_bytes=refusal.needed_bytes, limit_bytes=refusal.limit_bytes)
            outcome = self.estimates.state_alone(attempt.options) or refused
            error = refusal
        except AutoparError as refusal:
            error = refusal
        fitting = self.made.fitting + (plan is not None and outcome is not None and outcome.fits) - is_counted
        self.made = dataclasses.replace(self.made, fitting=fitting, planned_s=time.perf_counter() - self.begun)
        self.kept(attempt, outcome, plan, error)
        self.report(self.made)
        return outcome

    def kept(self, attempt: Attempt, outcome: Outcome | None, plan: Plan | None, error: AutoparError | None) -> None:
        """Keeps what an attempt came to, where it is the best so far."""
        best = self.made.outcome
        if best is None or (outcome is not None and outcome.rank() < best.rank()):
            self.made = dataclasses.replace(self.made, text=attempt.text, plan=plan, outcome=outcome, error=error)

    def settle(self) -> None:
        """Plans what is estimated, the best first, until nothing else may be better than what was planned."""
        while self.waiting:
            best = self.made.outcome
            better = [pair for pair in self.waiting if best is None or best_case(pair[1]) < best.rank()]
            if not better:
                break
            attempt, outcome = min(better, key=lambda pair: pair[1].rank())
            self.waiting.remove((attempt, outcome))
            self.planned(attempt, is_counted=outcome.fits)
        self.made = dataclasses.replace(self.made, planned_s=time.perf_counter() - self.begun)
