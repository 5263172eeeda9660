"""What is tried where nothing fits: optimiser state and saved arrays in the hosts' memory.

A search that may choose does without: what lies in the memory of the hosts goes over their links in every step.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

from autopar.common.text import text_of_bytes
from autopar.errors import BatchMismatchError, InvalidArgumentError, MemoryLimitError, SolverError, UnsupportedError
from autopar.ir.binding import Binding
from autopar.ir.graph import Purpose
from autopar.ir.parallelisms import data_axis
from autopar.passes.smaller_step import num_examples
from autopar.passes.split_scan import divisors
from autopar.plan.context import PlanningContext
from autopar.plan.options import PlanRequest
from autopar.plan.plan import Plan
from autopar.search.inter_op.evaluate import PEAK_ERROR
from autopar.search.inter_op.pipeline_candidate import PipelineEstimate
from autopar.search.inter_op.requested import estimated_one_stage
from autopar.search.inter_op.search_space import Tried, next_numbers
from autopar.search.inter_op.truncated_model import ESTIMATE_ERROR

PlanOf = Callable[[PlanRequest], Plan]
OFFLOADED = "nothing was found that fits without keeping {} in the memory of the hosts"
# What one stage recomputes, in the order of what that costs.
_POLICIES = ("nothing", "matmuls", "input")


def last_resort(context: PlanningContext, plan_of: PlanOf) -> tuple[Plan | None, list[str]]:
    """(ZeRO-3 with the optimiser's state in the memory of the hosts, in the micro-batches and with the recomputation
    that make it fastest; where none fits, with what is saved for the backward pass there too; why none is found)

    Nothing is tried for a request that leaves no choice. `plan_of` makes the plan of another request for the step.
    """
    cluster, request = context.cluster, context.request
    if not request.leaves_layouts_free or request.names_pipeline or request.in_host:
        return None, []
    if all(v.purpose is not Purpose.OPTIMIZER for v in context.views.annotated.values):
        return None, []  # no optimiser's state is there to be moved
    try:
        examples = num_examples(context.traced)
    except BatchMismatchError:
        return None, []  # ZeRO is over examples
    if context.deadline.passed:
        return None, [f"nothing was offloaded: {context.deadline.text}"]
    if examples % cluster.num_devices:
        return None, [f"nothing was offloaded: {cluster.num_devices} devices do not divide {examples} examples"]
    if cluster.device.host_link_bytes_per_s is None:
        return None, [
            f"nothing was offloaded: the rate of the link between {cluster.device.name} and its host is unknown"
        ]
    text = "the optimiser's state"
    if (least := _least_beside_optimizer(context)) > context.limit_bytes:
        return None, [f"ZeRO-3 with {text} in the memory of the hosts needs more than {text_of_bytes(least)}"]
    optimizer = dataclasses.replace(Binding(axes=(data_axis(3),), sizes=(None,)), offloads_optimizer=True)
    both = dataclasses.replace(optimizer, offloads_activations=True)
    texts = []
    for binding, policies, moved in ((optimizer, _POLICIES, text), (both, ("nothing",), f"{text} and saved arrays")):
        best, least_bytes = _fitting(context, binding, policies, plan_of)
        if best is not None:
            return best.with_note(OFFLOADED.format(moved)), []
        if least_bytes is not None:
            texts.append(f"ZeRO-3 with {moved} in the memory of the hosts needs {text_of_bytes(least_bytes)}")
    return None, texts


def _least_beside_optimizer(context: PlanningContext) -> int:
    """The least bytes on a device of the arguments that are no optimiser's state, under any plan."""
    graph = context.views.annotated
    arguments = (graph.values[v] for v in graph.block.inputs)
    whole = sum(value.nbytes for value in arguments if value.purpose is not Purpose.OPTIMIZER)
    return -(-whole // context.cluster.num_devices)


def _fitting(
    context: PlanningContext, binding: Binding, policies: Sequence[str], plan_of: PlanOf
) -> tuple[Plan | None, int | None]:
    """(the fastest plan that fits; where none does, the least that one needs, None where the step cannot be had so)

    Long steps are estimated on fewer of their equal layers, and built in the order of their estimates until none may
    be faster.
    """
    numbers = divisors(num_examples(context.traced) // context.cluster.num_devices)

    def request(policy: str, m: int) -> PlanRequest:
        return dataclasses.replace(
            context.request,
            binding=binding,
            num_microbatches=m if m > 1 else None,
            num_stages=1 if policy != "nothing" or binding.offloads_activations else None,
            recompute=policy,
        )

    @functools.cache
    def built(policy: str, m: int) -> Plan | int | None:
        asked = request(policy, m)
        plan = _plan_or_peak(context, asked, plan_of)
        if isinstance(plan, int) and not asked.names_pipeline:  # in tasks, its update reads less from the hosts at once
            in_tasks = _plan_or_peak(context, dataclasses.replace(asked, num_stages=1), plan_of)
            return in_tasks if isinstance(in_tasks, Plan) else min(plan, in_tasks or plan)
        return plan

    @functools.cache
    def expected(policy: str, m: int) -> Tried | None:
        found = _estimated(context, request(policy, m))
        if found is None:
            plan = built(policy, m)
            if plan is None:
                return None
            time_s, peak_bytes = (
                (plan.predicted.step_time_s, max(plan.predicted.peak_bytes))
                if isinstance(plan, Plan)
                else (math.inf, plan)
            )
        else:
            peak_bytes = found.peak_bytes
            may_fit = peak_bytes <= (1 + PEAK_ERROR) * context.limit_bytes
            time_s = found.step_time_s if may_fit else math.inf
        return Tried(step_time_s=time_s, peak_bytes=peak_bytes, policies=(policy,))

    # One needs the least for its activations, the other nothing to run and add up micro-batches.
    leanest = [at for at in (expected(policies[-1], numbers[-1]), expected(policies[0], numbers[0])) if at is not None]
    fitting: dict[tuple[str, int], Tried] = {}
    for policy in policies if any(at.step_time_s < math.inf for at in leanest) else ():
        tried = _in_micro_batches(context, numbers, functools.partial(expected, policy))
        fitting |= {(policy, m): at for m, at in tried.items()}
        # What recomputes more is slower, but for larger micro-batches than fit with less.
        numbers = [m for m in numbers if m < min(tried, default=math.inf)]
        if not numbers:
            break
    best, too_large = _fastest(fitting, built)
    least = (*too_large, *(at.peak_bytes for at in leanest if at.peak_bytes is not None))
    return best, None if best is not None else min(least, default=None)


def _fastest(
    fitting: dict[tuple[str, int], Tried], built: Callable[[str, int], Plan | int | None]
) -> tuple[Plan | None, list[int]]:
    """(the fastest of the plans that fit, as built; what others need, that do not fit)"""
    best: Plan | None = None
    too_large: list[int] = []
    for way, at in sorted(fitting.items(), key=lambda found: found[1].step_time_s):
        if best is not None and best.predicted.step_time_s <= (1 - ESTIMATE_ERROR) * at.step_time_s:
            break
        plan = built(*way)
        if isinstance(plan, int):
            too_large.append(plan)
        elif plan is not None and (best is None or plan.predicted.step_time_s < best.predicted.step_time_s):
            best = plan
    return best, too_large


def _estimated(context: PlanningContext, request: PlanRequest) -> PipelineEstimate | None:
    """What a request comes to as one stage; None for a step without a shorter form."""
    request = dataclasses.replace(request, num_stages=1)
    try:
        return estimated_one_stage(dataclasses.replace(context, request=request))
    except (UnsupportedError, BatchMismatchError, InvalidArgumentError, SolverError):
        return None  # the same for what is built


def _in_micro_batches(
    context: PlanningContext, numbers: Sequence[int], expected: Callable[[int], Tried | None]
) -> dict[int, Tried]:
    """What fits by the number of micro-batches: of the most, of the fewest, and between them while that is faster."""
    tried: dict[int, Tried] = {}
    waiting = sorted({numbers[0], numbers[-1]})
    while waiting and not context.deadline.passed:
        for m in waiting:
            tried[m] = expected(m) or Tried(step_time_s=math.inf)
        if all(at.step_time_s == math.inf for at in tried.values()):
            break
        waiting = next_numbers(numbers, tried, context.limit_bytes, numbers[-1])
    return {m: at for m, at in tried.items() if at.step_time_s < math.inf}


def _plan_or_peak(context: PlanningContext, request: PlanRequest, plan_of: PlanOf) -> Plan | int | None:
    """The plan of a request, in the time that is left; what it needs, where that does not fit; None where the step
    cannot be had in that form.
    """
    if request.time_limit_s is not None:
        request = dataclasses.replace(request, time_limit_s=max(0.0, context.deadline.left_s))
    try:
        return plan_of(request)
    except MemoryLimitError as error:
        return error.needed_bytes
    except (UnsupportedError, BatchMismatchError, InvalidArgumentError):
        return None
