"""Pipeline stages: what can be chosen, and what a choice costs in time and memory.

The step-time model, the one that the search minimises, of stages s = 0..S-1 and m micro-batches:

    step = sum_s (fill_s + drain_s) + max_s steady_s + max_s (once_s - sum_{r<s} drain_r)

fill_s is what stage s adds before the next one can start, drain_s what it adds after the next one has ended, steady_s
what the slowest stage adds over its own fill and drain. The last term is the update that the drain does not hide:
stage 0 is the last to end its backward passes. With f, b, w the seconds of a micro-batch's forward, backward and
weight gradient (a part of b), c those of one send behind the stage (0 behind the last), v chunks a group,
and e = max(f + b, (f + b) / 2 + c); interleaved, s is a group, and f, b, c are those of all its chunks:

| schedule | fill | drain | steady | in flight in stage s | wants |
|---|---|---|---|---|---|
| 1f1b | f + c | b + c | (m - 1) (f + b + 2c) | min(m, S - s) | |
| eager-1f1b | f + c | b + c | (m - 1) e | min(m, 2 (S - s) - 1) | |
| gpipe | f + c | b + c | (m - 1) (max(f, c) + max(b, c)) | m | |
| zb-h1 | f + c | max(b - 2w, 0) + c | m (f + b + 2c) - fill - drain | S | m >= S |
| zb-h2 | max(f - w, 0) + c | max(b - 2w, 0) + c | f + b + 2c + (m - 1) e - fill - drain | 2S - 1 | m >= 2S - 1 |
| zb-1p | as zb-h1 | | | S | m >= S |
| zb-2p | f + c | 0 | f + b + 2c + (m - 1) e - fill | 2S | m >= 2S - 1 |
| interleaved | (f + c) / v | (b + c) / v | (m - 1 / v) (f + b + 2c), see below | see `stage_peak_bytes` | S divides m |
| inference | f + c | 0 | (m - 1) max(f, c) | 0 | |

Interleaved groups run as many passes of one chunk in a row as there are groups, all about the same ones: max_s steady_s
is a sum over the v rounds of chunks of the largest f + b + 2c in each.

Sources: 1F1B and its interleaving, Narayanan et al., "Efficient large-scale language model training on GPU clusters",
SC 2021, section 2.2; eager 1F1B, Zhuang et al., "On optimizing the communication of model parallelism", MLSys 2023,
section 4; zb-*, Qi et al., "Zero bubble pipeline parallelism", ICLR 2024, sections 2 and 3; the sum with its slowest
stage, Zheng et al., "Alpa", OSDI 2022, formula (2).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np


class Schedule(enum.StrEnum):
    """The order in which a stage runs its micro-batches."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    EAGER_ONE_F_ONE_B = "eager-1f1b"
    INTERLEAVED = "interleaved"
    ZB_H1 = "zb-h1"
    ZB_H2 = "zb-h2"
    ZB_1P = "zb-1p"
    ZB_2P = "zb-2p"
    INFERENCE = "inference"


PUTS_OFF_WEIGHT_GRADIENTS = (Schedule.ZB_H1, Schedule.ZB_H2, Schedule.ZB_1P, Schedule.ZB_2P)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StageOption:
    """One way to run any range of layers: a submesh size, a logical mesh on it, a recomputation policy.

    All arrays are (layers,). Seconds are float64, finite and not negative, but forward_s may be inf: the layer cannot
    be run this way. Bytes are whole numbers.

    forward_s, backward_s: of one micro-batch; recomputation counts as backward.
    weight_s: the part of backward_s that is the gradient of weights; None = half of it.
    once_s: once a step: gradient reduction and update.
    state_bytes: a device: parameters, optimiser state, gradient accumulators.
    saved_bytes: a device and micro-batch in flight: what forward keeps for backward.
    deferred_bytes: a device and micro-batch whose weight gradients are put off: what these read; None = saved_bytes.
    working_bytes: a device: temporaries of the layer while it runs.
    send_s: of one micro-batch, one way, from behind the layer to the next stage; the last entry is not used.
    """

    num_devices: int
    forward_s: np.ndarray
    backward_s: np.ndarray
    once_s: np.ndarray
    state_bytes: np.ndarray
    saved_bytes: np.ndarray
    working_bytes: np.ndarray
    send_s: np.ndarray
    weight_s: np.ndarray | None = None
    deferred_bytes: np.ndarray | None = None
    name: str = ""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StageProblem:
    """Cut the layers into stages and give each an option, so that a step takes the least time and every stage fits.

    The stages use all num_devices devices. A stage has a part of a host or whole hosts; sizes below a host divide it
    and one another, so that stages placed one after the other by falling size always cover the hosts (Alpa, OSDI
    2022, appendix A), whatever their order in the pipeline.

    num_microbatches: options are for a micro-batch of this problem's size.
    chunks: of a group of devices under the interleaved schedule, 2 or more; 1 under all others.
    fixed_num_stages: the number of stages (of groups, if interleaved); None = free.
    """

    options: tuple[StageOption, ...]
    num_devices: int
    num_layers: int
    num_microbatches: int
    schedule: Schedule
    limit_bytes: int
    host_devices: int
    chunks: int = 1
    fixed_num_stages: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """Layers [first, last) with options[option]."""

    first: int
    last: int
    option: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePlan:
    """The stages, front to back.

    Interleaved: stages are chunks, number j on group j mod (len(stages) / chunks), all of one option.
    bound_s: no other choice takes less; equal to step_time_s when that is proven the least.
    """

    stages: tuple[Stage, ...]
    step_time_s: float
    bound_s: float
    peak_bytes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class NoStages:
    """Why there is no plan. bound_s: inf = proven that none is possible; else none takes less than this."""

    reason: str
    bound_s: float = math.inf


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StageTerms:
    """The terms of the model, of a stage or, as arrays, of many."""

    fill_s: Any
    drain_s: Any
    steady_s: Any
    once_s: Any


def terms(
    problem: StageProblem, devices: Any, forward_s: Any, backward_s: Any, weight_s: Any, once_s: Any, send_s: Any
) -> StageTerms:
    """The model's terms of a stage from the sums over its layers; arrays give arrays. send_s: 0 of the last stage."""
    f, b, w, c, m, v = forward_s, backward_s, weight_s, send_s, problem.num_microbatches, problem.chunks
    alone = f + b
    overlapped = np.maximum(alone, alone / 2 + c)
    fill, drain = f + c, b + c
    match problem.schedule:
        case Schedule.ONE_F_ONE_B:
            steady = (m - 1) * (alone + 2 * c)
        case Schedule.EAGER_ONE_F_ONE_B:
            steady = (m - 1) * overlapped
        case Schedule.GPIPE:
            steady = (m - 1) * (np.maximum(f, c) + np.maximum(b, c))
        case Schedule.ZB_H1 | Schedule.ZB_1P:
            drain = np.maximum(b - 2 * w, 0) + c
            steady = m * (alone + 2 * c) - fill - drain
        case Schedule.ZB_H2:
            fill, drain = np.maximum(f - w, 0) + c, np.maximum(b - 2 * w, 0) + c
            steady = alone + 2 * c + (m - 1) * overlapped - fill - drain
        case Schedule.ZB_2P:  # weight gradients of all stages fill what is left of the way back
            drain = 0 * f
            steady = alone + 2 * c + (m - 1) * overlapped - fill
        case Schedule.INTERLEAVED:
            fill, drain = fill / v, drain / v
            steady = (m - 1 / v) * (alone + 2 * c)
        case Schedule.INFERENCE:
            drain = 0 * f
            steady = (m - 1) * np.maximum(f, c)
    return StageTerms(fill_s=fill, drain_s=drain, steady_s=steady, once_s=once_s)


def combine(stages: Sequence[StageTerms]) -> float:
    """The step time of stages, front to back, from their terms."""
    total, drained, exposed, steady = 0.0, 0.0, -math.inf, -math.inf
    for stage in stages:
        total += stage.fill_s + stage.drain_s
        exposed = max(exposed, stage.once_s - drained)
        drained += stage.drain_s
        steady = max(steady, stage.steady_s)
    return float(total + steady + exposed)


def step_time_s(problem: StageProblem, stages: Sequence[Stage]) -> float:
    """Seconds of a step by the model above; inf when a layer cannot be run as its option says."""
    if any(np.isinf(problem.options[stage.option].forward_s[stage.first : stage.last]).any() for stage in stages):
        return math.inf
    made = [group_terms(problem, group) for group in groups_of(problem, stages)]
    if problem.schedule is Schedule.INTERLEAVED:
        rounds_s = _rounds_s(problem, stages)
        made = [replace(each, steady_s=rounds_s) for each in made]
    return combine(made)


def _rounds_s(problem: StageProblem, stages: Sequence[Stage]) -> float:
    """What is added to filling and draining by interleaved groups, round after round of their chunks."""
    steady_s = [group_terms(problem, (stage,)).steady_s for stage in stages]
    groups = len(stages) // problem.chunks
    return sum(max(steady_s[begun : begun + groups]) for begun in range(0, len(stages), groups))


def groups_of(problem: StageProblem, stages: Sequence[Stage]) -> list[Sequence[Stage]]:
    """The stages of each group of devices: one, or interleaved its chunks."""
    num_groups = len(stages) // problem.chunks
    return [stages[group::num_groups] for group in range(num_groups)]


def group_terms(problem: StageProblem, group: Sequence[Stage]) -> StageTerms:
    """The model's terms of the stages of one group of devices, which have one option."""
    option = problem.options[group[0].option]
    weight_s = weight_seconds(option)

    def summed(seconds: np.ndarray) -> float:
        return sum(float(seconds[stage.first : stage.last].sum()) for stage in group)

    return terms(
        problem,
        option.num_devices,
        summed(option.forward_s),
        summed(option.backward_s),
        summed(weight_s),
        summed(option.once_s),
        sum(float(option.send_s[stage.last - 1]) for stage in group if stage.last < problem.num_layers),
    )


def weight_seconds(option: StageOption) -> np.ndarray:
    return option.backward_s / 2 if option.weight_s is None else option.weight_s


def deferred_bytes(option: StageOption) -> np.ndarray:
    return option.saved_bytes if option.deferred_bytes is None else option.deferred_bytes


def held_bytes(problem: StageProblem, saved: Any, deferred: Any) -> Any:
    """What a stage holds of a micro-batch in flight at its worst, from the sums over its layers; arrays give arrays.

    Where weight gradients are put off, a micro-batch holds first what its backward pass reads, then what they do: from
    one stage to the next one micro-batch less is held so and one more in the other way.
    """
    return np.maximum(saved, deferred) if problem.schedule in PUTS_OFF_WEIGHT_GRADIENTS else saved


def in_flight(problem: StageProblem, stage: int, num_stages: int) -> int:
    """Micro-batches of which a stage holds values at its worst; interleaved: passes of one chunk that a group holds.

    num_stages: of the plan; interleaved: its chunks.
    """
    m, left = problem.num_microbatches, num_stages - stage
    match problem.schedule:
        case Schedule.ONE_F_ONE_B:
            return min(m, left)
        case Schedule.EAGER_ONE_F_ONE_B:
            return min(m, 2 * left - 1)
        case Schedule.ZB_H1 | Schedule.ZB_1P:
            # Later stages have fewer micro-batches ahead, and as many more weight gradients waiting.
            return min(m, num_stages)
        case Schedule.ZB_H2:
            return min(m, 2 * num_stages - 1)
        case Schedule.ZB_2P:
            # One more than ZB_H2: the drain is filled by deferred weight gradients.
            return min(m, 2 * num_stages)
        case Schedule.GPIPE:
            return m
        case Schedule.INTERLEAVED:
            groups, v = num_stages // problem.chunks, problem.chunks
            return min(m * v, 2 * (groups - stage % groups - 1) + (v - 1) * groups + 1)
        case Schedule.INFERENCE:
            return 0


def stage_peak_bytes(problem: StageProblem, stages: Sequence[Stage]) -> tuple[int, ...]:
    """Bytes a device of each stage: state, what is held of micro-batches in flight, temporaries of the largest layer.
    Interleaved: of the stage's group.
    """
    if problem.schedule is Schedule.INTERLEAVED:
        peaks = [_group_bytes(problem, n, group) for n, group in enumerate(groups_of(problem, stages))]
        return tuple(peaks) * problem.chunks
    return tuple(
        int(option.state_bytes[layers].sum())
        + in_flight(problem, number, len(stages))
        * int(held_bytes(problem, option.saved_bytes[layers].sum(), deferred_bytes(option)[layers].sum()))
        + int(option.working_bytes[layers].max())
        for number, stage in enumerate(stages)
        for option, layers in ((problem.options[stage.option], slice(stage.first, stage.last)),)
    )


def _group_bytes(problem: StageProblem, number: int, group: Sequence[Stage]) -> int:
    """Bytes a device of a group of interleaved chunks. As many passes in a row as there are groups are of one chunk,
    then of the next: of those in flight, the rounds that hold most.
    """
    option, v = problem.options[group[0].option], len(group)
    num_groups = problem.num_devices // option.num_devices
    saved = [int(option.saved_bytes[stage.first : stage.last].sum()) for stage in group]
    rounds, rest = divmod(in_flight(problem, number, num_groups * v), num_groups)
    passes = [num_groups * (rounds // v + (turn < rounds % v)) + rest * (turn == rounds % v) for turn in range(v)]
    held = max(sum(passes[turn - begun] * saved[turn] for turn in range(v)) for begun in range(v))
    state = sum(int(option.state_bytes[stage.first : stage.last].sum()) for stage in group)
    return state + held + max(int(option.working_bytes[stage.first : stage.last].max()) for stage in group)


def most_stages(problem: StageProblem) -> int:
    """Stages that the schedule's formulas hold for; interleaved: groups."""
    match problem.schedule:
        case Schedule.ZB_H1 | Schedule.ZB_1P:
            return min(problem.num_layers, problem.num_microbatches)
        case Schedule.ZB_H2 | Schedule.ZB_2P:
            return min(problem.num_layers, (problem.num_microbatches + 1) // 2)
        case Schedule.INTERLEAVED:
            return problem.num_layers // problem.chunks
        case _:
            return problem.num_layers


def check(problem: StageProblem, stages: Sequence[Stage]) -> str | None:
    """Why these stages are not a choice of the problem; None when they are one that fits."""
    ends = [0, *(stage.last for stage in stages)]
    if [stage.first for stage in stages] != ends[:-1] or ends[-1] != problem.num_layers:
        return "the stages are not the layers cut into ranges"
    if any(stage.first >= stage.last for stage in stages):
        return "a stage is empty"
    groups, odd = divmod(len(stages), problem.chunks)
    if odd or groups > most_stages(problem):
        return f"{problem.schedule} does not run {len(stages)} stages with {problem.num_microbatches} micro-batches"
    if problem.fixed_num_stages not in (None, groups):
        return f"{groups} stages, expected {problem.fixed_num_stages}"
    if problem.schedule is Schedule.INTERLEAVED:
        if problem.num_microbatches % groups:
            return f"{groups} groups do not divide {problem.num_microbatches} micro-batches"
        if len({stage.option for stage in stages}) > 1:
            return "interleaved stages have different options"
    used = sum(problem.options[stage.option].num_devices for stage in stages) // problem.chunks
    if used != problem.num_devices:
        return f"{used} devices, expected {problem.num_devices}"
    if not math.isfinite(step_time_s(problem, stages)):
        return "a layer cannot be run as its option says"
    if (peak := max(stage_peak_bytes(problem, stages))) > problem.limit_bytes:
        return f"{peak} bytes, {problem.limit_bytes} fit"
    return None


def fullness(problem: StageProblem, stages: Sequence[Stage]) -> float:
    """Of the fullest stage, its bytes as a part of what a device has."""
    return max(stage_peak_bytes(problem, stages)) / problem.limit_bytes


# Whether a problem of stages is well formed.


def validate(problem: StageProblem) -> None:
    """Check a problem that a user made.

    Raises: ValueError naming the field, or the option and its field, at fault.
    """
    for name in ("num_devices", "num_layers", "num_microbatches", "host_devices"):
        if getattr(problem, name) < 1:
            raise ValueError(f"{name}: expected 1 or more, got {getattr(problem, name)}")
    if problem.fixed_num_stages is not None and problem.fixed_num_stages < 1:
        raise ValueError(f"fixed_num_stages: expected 1 or more, got {problem.fixed_num_stages}")
    if (problem.chunks >= 2) != (problem.schedule is Schedule.INTERLEAVED) or problem.chunks < 1:
        raise ValueError(
            f"chunks: expected 2 or more if interleaved, else 1, got {problem.chunks} ({problem.schedule})"
        )
    if not isinstance(problem.schedule, Schedule):
        raise ValueError(f"schedule: expected one of {[str(s) for s in Schedule]}, got {problem.schedule!r}")
    _check_sizes(problem)
    for number, option in enumerate(problem.options):
        _check_option(problem, number, option)


def _check_sizes(problem: StageProblem) -> None:
    host = problem.host_devices
    parts = sorted({option.num_devices for option in problem.options if option.num_devices < host})
    for small, large in zip(parts, [*parts[1:], host], strict=False):
        if small < 1 or large % small:
            raise ValueError(
                f"num_devices of options: {small} does not divide {large}, so that stages may not tile a host"
            )
    for number, option in enumerate(problem.options):
        where = f"option {number}" + (f" ({option.name})" if option.name else "")
        if option.num_devices > host and option.num_devices % host:
            raise ValueError(
                f"{where}: expected a part of a host of {host} devices or whole hosts, got {option.num_devices} devices"
            )


def _check_option(problem: StageProblem, number: int, option: StageOption) -> None:
    where = f"option {number}" + (f" ({option.name})" if option.name else "")
    for name in ("forward_s", "backward_s", "weight_s", "once_s", "send_s"):
        values = getattr(option, name)
        if values is None and name == "weight_s":
            continue
        _check_shape(f"{where}: {name}", values, problem.num_layers)
        free = values[np.isfinite(values)] if name == "forward_s" else values
        if not np.isfinite(free).all() or (values < 0).any() or np.isnan(values).any():
            raise ValueError(f"{where}: {name}: expected finite seconds, not negative, got {values}")
    for name in ("state_bytes", "saved_bytes", "deferred_bytes", "working_bytes"):
        values = getattr(option, name)
        if values is None and name == "deferred_bytes":
            continue
        _check_shape(f"{where}: {name}", values, problem.num_layers)
        if values.dtype.kind not in "iu" or (values < 0).any():
            raise ValueError(f"{where}: {name}: expected whole numbers, not negative, got {values.dtype}")


def _check_shape(where: str, values: np.ndarray, num_layers: int) -> None:
    if values.shape != (num_layers,):
        raise ValueError(f"{where}: expected shape {(num_layers,)}, got {values.shape}")
