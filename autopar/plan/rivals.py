"""What a plan says of other ways to run the step: those that were weighed beside it, and what could be changed.

All of it follows from the plan's record; of the changes, exactly or by a bound.
"""

from __future__ import annotations

import dataclasses
import math

from autopar.common.text import text_of_bytes, text_of_part, text_of_s
from autopar.hardware.cluster import Cluster
from autopar.plan import summary
from autopar.plan.modules import ALL_OF_STEP, module_costs, within
from autopar.plan.schema import CandidateRecord, PlanRecord

BASELINES = "baselines"  # the source of candidates whose names are those of recipes
DATA_PARALLEL = "data parallelism"
TENSOR_PARALLEL = "tensor parallelism"
# Devices of a tensor group in Megatron-LM's plans (Narayanan et al., 2021, section 5), those of a DGX.
MEGATRON_GROUP = 8

# Of the step: a module that takes less does not stand out. Of the memory: what is left free is no room for a batch.
MUCH_OF_STEP, MUCH_FREE = 0.3, 0.5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """A recipe that was weighed beside the plan. `step_time_s` is None where it has none, for the reason in `why`.

    `excess`: what it needs and what a device has, as text, where it does not fit.
    """

    name: str
    step_time_s: float | None
    why: str
    excess: str = ""

    @property
    def has_own_line(self) -> bool:
        """Whether it is compared by name, not among the others."""
        return self.name == DATA_PARALLEL or self.name.startswith(TENSOR_PARALLEL)


def rivals(record: PlanRecord) -> tuple[Rival, ...]:
    """The recipes that were weighed beside the plan, by name: data, tensor parallelism, stages of ZeRO."""
    limit_bytes = summary.fullest(record).limit_bytes
    found: dict[str, Rival] = {}
    for way in record.candidates:
        if not (name := _recipe_of(way)):
            continue
        rival = Rival(name=name, step_time_s=way.step_time_s, why=way.why, excess=_excess(way.peak_bytes, limit_bytes))
        # Of a recipe on several meshes, and in several numbers of micro-batches, the fastest that fits is meant.
        before = found.get(name)
        if before is None or _rank(rival) < _rank(before):
            found[name] = rival
    return tuple(found.values())


def _rank(rival: Rival) -> tuple[bool, float]:
    """Smaller is better: what fits first, then what is faster; what has no time comes last."""
    step_time_s = math.inf if rival.step_time_s is None else rival.step_time_s
    return bool(rival.excess) or rival.step_time_s is None, step_time_s


def _recipe_of(way: CandidateRecord) -> str:
    """The recipe of a candidate by its name, or by the words behind its mesh; a program that the search made without a
    recipe is data parallelism, where all axes of its mesh split the batch alone. Nothing where it has none.
    """
    last = way.text.rpartition(", ")[2]
    is_recipe = way.source == BASELINES or last == DATA_PARALLEL or last.startswith("ZeRO-")
    alone = DATA_PARALLEL if {*way.axis_roles} == {summary.DATA} else ""
    return way.name or (last if is_recipe else "") or alone


def _excess(peak_bytes: int | None, limit_bytes: int | None) -> str:
    if peak_bytes is None or limit_bytes is None or peak_bytes <= limit_bytes:
        return ""
    return f"{text_of_bytes(peak_bytes)} a device, of {text_of_bytes(limit_bytes)}"


def chosen_recipe(record: PlanRecord) -> str:
    """The name of the recipe that the search found to be the best plan, or nothing."""
    return next(filter(None, (*(c.name for c in record.own), *map(_recipe_of, record.own))), "")


def advantage(record: PlanRecord) -> str:
    """How much faster the plan is than data parallelism, and than the best recipe, as far as they were weighed."""
    weighed, own, step_s = rivals(record), chosen_recipe(record), record.predicted.step_time_s
    under = f"Planned under {record.recipe}. " if record.recipe else ""
    if summary.num_devices(record) == 1:  # nothing can be shared out
        return under.rstrip()
    others = [r for r in weighed if r.name != own]
    if not (weighed or own) or (record.recipe and not others):  # the plan itself may be a standard one
        none = "Neither data parallelism nor another recipe was weighed beside it: plan.why_not(recipe) does that."
        return f"{under}{none}"
    parts = [f"The fastest found is a standard plan: {own}"] if own and not record.recipe else []
    for rival in (r for r in others if r.name == DATA_PARALLEL):
        parts.append(_against(rival, step_s))
    timed = [(r.step_time_s, r) for r in others if r.step_time_s is not None and not r.has_own_line and not r.excess]
    if timed:
        best = min(timed, key=lambda item: item[0])[1]
        parts.append(f"{_against(best, step_s)}, the next best without tensor parallelism")
    elif others and not parts:
        parts += [f"{_against(others[0], step_s)}: plan.why_not(recipe) does that"]
    text = "; ".join(parts)
    return f"{under}{text[:1].upper()}{text[1:]}."


def _against(rival: Rival, step_s: float) -> str:
    if rival.excess:
        return f"{rival.name} does not fit ({rival.excess})"
    if rival.step_time_s is None:
        return f"not compared with {rival.name} ({rival.why})"
    if rival.step_time_s < step_s:
        return f"{rival.name} would take {text_of_s(rival.step_time_s)} ({rival.why})"
    return f"{rival.step_time_s / step_s:.2f}x as fast as {rival.name} ({text_of_s(rival.step_time_s)})"


def tensor_parallelism(record: PlanRecord) -> str:
    """What tensor parallelism costs: that the plan has it, the fastest way with it that was weighed, in time and memory
    beside the plan, or the call that plans one. Nothing on one device.
    """
    if summary.num_devices(record) == 1:
        return ""
    stages = range(summary.num_stages(record))
    own = [_ways(summary.stage_mesh(record, s).axis_sizes, summary.axis_roles(record, s)) for s in stages]
    if max(own) > 1:
        where = "" if min(own) > 1 else f", in {summary.stages_text([s for s in stages if own[s] > 1])}"
        return f"Tensor parallelism is part of the plan{where}{_waits_of_tensor(record)}."
    ways = [trial for trial in record.tried if trial.step_time_s is not None and _ways_of(trial) > 1]
    limit_bytes = summary.fullest(record).limit_bytes
    fitting = [trial for trial in ways if not _excess(trial.peak_bytes, limit_bytes)]
    best = min(fitting or ways, key=lambda trial: trial.step_time_s or 0.0, default=None)
    if best is None or best.step_time_s is None:
        call = f"plan.why_not(autopar.recipes.tensor_parallel(size={tensor_group(record.cluster)}))"
        return f"No way with tensor parallelism was weighed: {call} plans one."
    if excess := _excess(best.peak_bytes, limit_bytes):
        splits = summary.splits_text(best.axis_sizes, best.axis_roles)
        return f"With tensor parallelism, {splits}, the step does not fit ({excess})."
    step_s, peak_bytes = record.predicted.step_time_s, summary.fullest(record).peak_bytes
    peak = f", peak {text_of_bytes(best.peak_bytes)} ({text_of_bytes(peak_bytes)} here)" if best.peak_bytes else ""
    return (
        f"With tensor parallelism, {summary.splits_text(best.axis_sizes, best.axis_roles)}: "
        f"{text_of_s(best.step_time_s)} a step ({text_of_s(step_s)} here){peak}."
    )


def _waits_of_tensor(record: PlanRecord) -> str:
    """What the step waits for collectives over the axes that split matrices, the mean over the devices."""
    time_s, waited_s = 0.0, 0.0
    for row in record.modules:
        mesh, roles = summary.stage_mesh(record, row.stage), summary.axis_roles(record, row.stage)
        tensor = {name for name, role in zip(mesh.axis_names, roles, strict=True) if role == summary.TENSOR}
        share = summary.stage_share(record, row.stage)
        for c in row.collectives:
            if tensor.intersection(c.axes):
                time_s += share * c.time_s
                waited_s += share * c.exposed_s
    if not time_s:
        return ""
    step_s = record.predicted.step_time_s
    return f": its collectives take {text_of_s(time_s)}, and the step waits {text_of_s(waited_s)} for them" + (
        f" ({waited_s / step_s:.0%})" if step_s else ""
    )


def _ways_of(trial: CandidateRecord) -> int:
    return _ways(trial.axis_sizes, trial.axis_roles)


def _ways(sizes: tuple[int, ...], roles: tuple[str, ...]) -> int:
    """Into how many parts tensor parallelism splits the matrices; 1 where no role is known."""
    return math.prod(n for n, role in zip(sizes, roles, strict=False) if role == summary.TENSOR)


def tensor_group(cluster: Cluster) -> int:
    """Devices of a tensor group to ask for: as Megatron's eight, or their largest part that the fastest links join."""
    sizes = (math.gcd(cluster.domain_devices, MEGATRON_GROUP), math.gcd(cluster.num_devices, MEGATRON_GROUP))
    return next((size for size in sizes if size > 1), cluster.num_devices)


def advice(record: PlanRecord) -> tuple[str, ...]:
    """What could be changed, in short; nothing for a step without time."""
    return tuple(text for text in (_largest_module(record), _free_memory(record)) if text)


def advice_and_notes(record: PlanRecord) -> tuple[str, ...]:
    """The advice, and the notes of the plan, of which some say what could be changed as well."""
    return (*advice(record), *record.notes)


def _largest_module(record: PlanRecord) -> str:
    """The innermost module in which much of the time goes, with all inside of it; not one that has all of the step."""
    step_s, seconds = record.predicted.step_time_s, within(module_costs(record))
    much = [path for path, s in seconds.items() if MUCH_OF_STEP * step_s <= s < ALL_OF_STEP * step_s]
    if not much:
        return ""
    path = max(much, key=lambda path: (len(path), seconds[path]))
    return f"{text_of_part(seconds[path] / step_s)} of the step is in {'/'.join(path)}"


def _free_memory(record: PlanRecord) -> str:
    """How much memory is free. What batch it is enough for is not told: some values grow with its square."""
    full = summary.fullest(record)
    if full.limit_bytes is None or full.peak_bytes > (1 - MUCH_FREE) * full.limit_bytes:
        return ""
    free = f"{text_of_part(1 - full.peak_bytes / full.limit_bytes)} of the memory is free"
    has_batch = any(value.kind == "batch" for value in record.arguments)
    return f"{free} (autopar.fit: the largest batch that fits, and what it gains)" if has_batch else free
