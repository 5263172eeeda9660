"""Pipeline stages: literal cases, the search against every choice, the model against a run on a virtual clock."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.runtime.standard_schedules import StageCosts, make_schedule, place
from autopar.solver import (
    NoStages,
    Schedule,
    Stage,
    StageOption,
    StagePlan,
    StageProblem,
    best_stages,
    stage_loops,
    step_time_s,
)
from autopar.solver.stage_problem import check, in_flight, stage_peak_bytes
from tests.solver.brute_force import brute_force_stages


def solve_stages(asked: StageProblem) -> StagePlan | NoStages:
    return best_stages((asked,))[0]


CLOSE = 1e-8


def option(
    num_devices: int, forward: list[float], *, once: float = 0.0, state: int = 0, saved: int = 0, send: float = 0.0
) -> StageOption:
    """Backward takes twice as long as forward."""
    layers = len(forward)
    return StageOption(
        num_devices=num_devices,
        forward_s=np.array(forward, dtype=np.float64),
        backward_s=2 * np.array(forward, dtype=np.float64),
        once_s=np.full(layers, once),
        state_bytes=np.full(layers, state),
        saved_bytes=np.full(layers, saved),
        working_bytes=np.zeros(layers, dtype=np.int64),
        send_s=np.full(layers, send),
    )


def problem(options: list[StageOption], devices: int, microbatches: int, **changed: object) -> StageProblem:
    made = StageProblem(
        options=tuple(options),
        num_devices=devices,
        num_layers=len(options[0].forward_s),
        num_microbatches=microbatches,
        schedule=Schedule.ONE_F_ONE_B,
        limit_bytes=100,
        host_devices=8,
    )
    return replace(made, **changed)


def cut(plan: StagePlan | NoStages) -> list[tuple[int, int, int]]:
    assert isinstance(plan, StagePlan), plan
    return [(stage.first, stage.last, stage.option) for stage in plan.stages]


def random_problem(seed: int, most_layers: int = 5) -> StageProblem:
    """Every schedule in turn; whole seconds at odd seeds, so that plans tie; memory tight, loose, or only states."""
    rng = np.random.default_rng(seed)
    schedule = list(Schedule)[seed % len(Schedule)]
    layers, devices = int(rng.integers(1, most_layers + 1)), int(rng.choice([1, 2, 3, 4, 6, 8]))

    def seconds(most: int) -> np.ndarray:
        return rng.integers(0, most, layers).astype(np.float64) if seed % 2 else rng.random(layers) * most

    options = []
    for _ in range(int(rng.integers(1, 5))):
        size = int(rng.choice([n for n in (1, 2, 4, 8) if n <= devices]))
        forward, backward = seconds(10) / size**0.7, seconds(20) / size**0.7
        options.append(
            StageOption(
                num_devices=size,
                forward_s=np.where(rng.random(layers) < 0.05, np.inf, forward),
                backward_s=backward,
                once_s=seconds(60),
                state_bytes=rng.integers(0, 20, layers),
                saved_bytes=rng.integers(0, 6, layers) * (seed % 3 > 0),
                working_bytes=rng.integers(0, 10, layers),
                send_s=seconds(8),
                weight_s=None if rng.random() < 0.5 else backward * rng.random(),
                deferred_bytes=None if rng.random() < 0.5 else rng.integers(0, 6, layers),
            )
        )
    return StageProblem(
        options=tuple(options),
        num_devices=devices,
        num_layers=layers,
        num_microbatches=int(rng.choice([1, 2, 3, 4, 8, 16])),
        schedule=schedule,
        limit_bytes=int(rng.integers(20, 120)),
        host_devices=int(rng.choice([4, 8])),
        chunks=2 if schedule is Schedule.INTERLEAVED else 1,
        fixed_num_stages=int(rng.integers(1, 4)) if rng.random() < 0.15 else None,
    )


def makespan_s(
    tasks: list[list[tuple[str, int]]], forward: list[float], backward: list[float], send: list[float]
) -> float:
    """When the last task ends, each stage running its tasks in order, sends taking time but no one's."""
    end: dict[tuple[int, str, int], float] = {}
    clock, place, last = [0.0] * len(tasks), [0] * len(tasks), len(tasks) - 1
    while any(place[s] < len(tasks[s]) for s in range(len(tasks))):
        for s in range(len(tasks)):
            if place[s] == len(tasks[s]):
                continue
            kind, number = tasks[s][place[s]]
            wants: tuple[int, str, int] | None = (s - 1, "f", number) if kind == "f" else (s + 1, "b", number)
            if kind == "b" and s == last:
                wants = (s, "f", number)
            if kind == "f" and s == 0:
                wants = None
            if wants is not None and wants not in end:
                continue
            delay = send[min(wants[0], s)] if wants is not None and wants[0] != s else 0.0
            start = max(clock[s], end[wants] + delay if wants is not None else 0.0)
            clock[s] = end[s, kind, number] = start + (forward if kind == "f" else backward)[s]
            place[s] += 1
    return max(clock)


def order(schedule: Schedule, stage: int, stages: int, microbatches: int) -> list[tuple[str, int]]:
    """Warm-up forwards, then one forward after each backward; gpipe: all forwards first."""
    left = stages - stage
    ahead = {Schedule.GPIPE: microbatches, Schedule.ONE_F_ONE_B: left}.get(schedule, 2 * left - 1)
    ahead = min(ahead, microbatches)
    tasks = [("f", i) for i in range(ahead)]
    for i in range(microbatches):
        tasks.append(("b", i))
        if ahead + i < microbatches:
            tasks.append(("f", ahead + i))
    return tasks


# What is chosen


def test_two_layers_on_two_devices_are_two_stages_when_there_are_many_microbatches():
    options = [option(1, [1.0, 1.0], send=0.01), option(2, [0.6, 0.6])]
    plan = solve_stages(problem(options, 2, 16))
    assert cut(plan) == [(0, 1, 0), (1, 2, 0)]
    assert plan.step_time_s == pytest.approx(3.02 + 3.0 + 15 * 3.02)
    assert plan.bound_s == pytest.approx(plan.step_time_s)


def test_one_microbatch_is_one_stage():
    options = [option(1, [1.0, 1.0], send=0.01), option(2, [0.6, 0.6])]
    assert cut(solve_stages(problem(options, 2, 1))) == [(0, 2, 1)]


def test_dear_sends_keep_layers_together():
    options = [option(1, [1.0, 1.0], send=1.0), option(2, [0.6, 0.6])]
    assert cut(solve_stages(problem(options, 2, 16))) == [(0, 2, 1)]


def test_an_update_that_shows_every_step_is_weighed_against_the_bubble():
    options = [option(1, [1.0, 1.0]), option(2, [0.52, 0.52], once=5.0)]
    assert cut(solve_stages(problem(options, 2, 2))) == [(0, 1, 0), (1, 2, 0)]
    assert cut(solve_stages(problem([options[0], replace(options[1], once_s=np.zeros(2))], 2, 2))) == [(0, 2, 1)]


def test_memory_forces_more_stages():
    options = [option(1, [1.0] * 4, state=30), option(4, [0.26] * 4, state=30)]
    loose = problem(options, 4, 1, limit_bytes=120)
    assert cut(solve_stages(loose)) == [(0, 4, 1)]
    assert cut(solve_stages(replace(loose, limit_bytes=100))) == [(k, k + 1, 0) for k in range(4)]


def test_memory_in_flight_forces_recomputation_at_the_front_only():
    fast = option(1, [1.0] * 3, saved=40)
    lean = replace(fast, backward_s=fast.backward_s * 1.5, saved_bytes=np.full(3, 5))
    plan = solve_stages(problem([fast, lean], 3, 8))
    assert cut(plan) == [(0, 1, 1), (1, 2, 0), (2, 3, 0)]
    assert plan.peak_bytes == (15, 80, 40)


def test_weight_gradients_that_wait_hold_what_they_read():
    waiting = replace(option(1, [1.0] * 3, saved=10), deferred_bytes=np.full(3, 30))
    asked = problem([waiting], 3, 8, schedule=Schedule.ZB_H1)
    assert solve_stages(asked).peak_bytes == (90, 90, 90)
    assert isinstance(solve_stages(replace(asked, limit_bytes=89)), NoStages)
    assert solve_stages(replace(asked, schedule=Schedule.ONE_F_ONE_B)).peak_bytes == (30, 20, 10)


def test_uneven_layers_are_cut_where_the_slowest_stage_is_fastest():
    plan = solve_stages(problem([option(1, [1.0, 1.0, 1.0, 3.0])], 2, 16))
    assert cut(plan) == [(0, 3, 0), (3, 4, 0)]


def test_unequal_submeshes_for_unequal_layers():
    small, large = option(1, [1.0, 2.0]), option(2, [0.5, 1.0])
    assert cut(solve_stages(problem([small, large], 3, 64))) == [(0, 1, 0), (1, 2, 1)]


def test_a_forced_number_of_stages():
    plan = solve_stages(problem([option(1, [1.0] * 4), option(2, [0.5] * 4)], 4, 1, fixed_num_stages=4))
    assert len(cut(plan)) == 4


def test_interleaving_divides_the_bubble():
    one = problem([option(1, [1.0] * 8)], 2, 4)
    two = replace(one, schedule=Schedule.INTERLEAVED, chunks=2)
    assert solve_stages(one).step_time_s == pytest.approx((4 + 1) * 12)
    assert solve_stages(two).step_time_s == pytest.approx((4 + 1 / 2) * 12)
    assert cut(solve_stages(two)) == [(0, 2, 0), (2, 4, 0), (4, 6, 0), (6, 8, 0)]


def rounds_s(ends, seconds, groups):
    """The sum over rounds of the largest chunk."""
    starts = [0, *ends[:-1]]
    sizes = [sum(seconds[a:b]) for a, b in zip(starts, ends, strict=True)]
    return sum(max(sizes[begun : begun + groups]) for begun in range(0, len(sizes), groups))


def test_a_long_head_makes_one_round_longer():
    """A head of three layers' time behind 15 layers, on four groups of three chunks: rounds of one, one and three."""
    costs = [1.0] * 15 + [3.0]
    asked = problem([option(1, costs)], 4, 8)
    found = solve_stages(replace(asked, schedule=Schedule.INTERLEAVED, chunks=3))
    assert rounds_s([last for _, last, _ in cut(found)], costs, 4) == 5.0
    assert found.bound_s <= found.step_time_s


def test_interleaved_chunks_are_cut_by_bytes_where_the_fastest_cut_does_not_fit():
    """Layers 0-2 and 12-14 are twice as large: the cut of equal time has six of them on one group of four."""
    state = [20 if layer % 12 < 3 else 10 for layer in range(24)]
    made = replace(option(1, [1.0] * 24), state_bytes=np.array(state))
    asked = replace(problem([made], 4, 8, limit_bytes=100), schedule=Schedule.INTERLEAVED, chunks=2)
    found = solve_stages(asked)
    assert isinstance(found, StagePlan)
    assert check(asked, found.stages) is None
    none = solve_stages(replace(asked, limit_bytes=70))
    assert isinstance(none, NoStages)
    assert "fits into the memory" in none.reason


@given(st.lists(st.floats(0.1, 3.0), min_size=6, max_size=10), st.sampled_from([(2, 2), (2, 3), (3, 2)]))
@settings(deadline=None, max_examples=60)
def test_the_least_rounds_are_those_of_all_cuts(seconds, shape):
    groups, rounds = shape
    between = itertools.combinations(range(1, len(seconds)), groups * rounds - 1)
    least = min(rounds_s([*ends, len(seconds)], seconds, groups) for ends in between)
    found = stage_loops.least_rounds(np.array(seconds), groups, rounds).tolist()
    assert found == sorted(set(found))
    assert found[-1] == len(seconds)
    assert rounds_s(found, seconds, groups) == pytest.approx(least, rel=1e-5)


@pytest.mark.parametrize(("schedule", "bubble"), [(Schedule.ONE_F_ONE_B, 3), (Schedule.ZB_H1, 1), (Schedule.ZB_H2, 0)])
def test_bubbles_of_the_zero_bubble_paper(schedule, bubble):
    """Qi et al. 2024, table 1, forward, backward and weight gradient of one second each, four stages."""
    plan = solve_stages(problem([option(1, [1.0] * 4)], 4, 8, schedule=schedule))
    assert plan.step_time_s == pytest.approx(8 * 3 + 3 * bubble)


# What is said when nothing fits


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"limit_bytes": 20}, "layer 0 alone is 10 bytes over"),
        ({"num_devices": 3}, "no sizes of submeshes add up to 3"),
        (
            {"limit_bytes": 50},
            "no stages of all layers and devices do: spread evenly, their state alone takes 60 of 50 bytes",
        ),
        ({"fixed_num_stages": 5}, "runs at most 4 of 4 layers"),
    ],
)
def test_the_reason_why_there_is_no_plan(changed, reason):
    asked = problem([option(2, [1.0] * 4, state=30)], 4, 4, **changed)
    answer = solve_stages(asked)
    assert isinstance(answer, NoStages)
    assert reason in answer.reason
    assert answer.bound_s == math.inf
    assert isinstance(brute_force_stages(asked), NoStages)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"chunks": 2}, "chunks"),
        ({"host_devices": 5}, "2 does not divide 5"),
        ({"num_layers": 3}, r"option 0: forward_s: expected shape \(3,\)"),
        ({"num_microbatches": 0}, "num_microbatches"),
    ],
)
def test_problems_that_are_not_well_formed(changed, message):
    with pytest.raises(ValueError, match=message):
        solve_stages(problem([option(2, [1.0] * 4)], 4, 4, **changed))


# Against every choice


@pytest.mark.cases(5)
@pytest.mark.parametrize("schedule", list(Schedule))
def test_as_good_as_the_best_of_all_choices(schedule):
    start = list(Schedule).index(schedule)
    for seed in range(start, 900, len(Schedule)):
        asked = random_problem(seed)
        assert asked.schedule is schedule
        found, best = solve_stages(asked), brute_force_stages(asked)
        assert type(found) is type(best), seed
        if isinstance(found, StagePlan) and isinstance(best, StagePlan):
            assert found.step_time_s == pytest.approx(best.step_time_s, rel=CLOSE, abs=CLOSE), seed
            assert found.bound_s == pytest.approx(best.step_time_s, rel=CLOSE, abs=CLOSE), seed
            assert found.step_time_s == step_time_s(asked, found.stages)
            assert found.peak_bytes == stage_peak_bytes(asked, found.stages)
            assert check(asked, found.stages) is None


def test_the_best_of_several_problems():
    for seed in range(60):
        asked = [random_problem(number) for number in range(5 * seed, 5 * seed + 5)]
        apart = [brute_force_stages(one) for one in asked]
        together = best_stages(asked)
        times = [a.step_time_s if isinstance(a, StagePlan) else math.inf for a in apart]
        found = [a.step_time_s if isinstance(a, StagePlan) else math.inf for a in together]
        assert min(found) == pytest.approx(min(times), rel=CLOSE, abs=CLOSE)
        for answer, time_s in zip(together, times, strict=True):
            assert answer.bound_s <= time_s * (1 + CLOSE) + CLOSE


def test_all_that_are_near_the_best_are_found():
    near = 0
    for seed in range(70):
        asked = [random_problem(number) for number in range(5 * seed, 5 * seed + 5)]
        apart = [brute_force_stages(one) for one in asked]
        times = [a.step_time_s if isinstance(a, StagePlan) else math.inf for a in apart]
        for answer, time_s in zip(best_stages(asked, 1.5), times, strict=True):
            assert answer.bound_s <= time_s * (1 + CLOSE) + CLOSE
            if time_s <= 1.5 * min(times) * (1 - CLOSE) and time_s < math.inf:
                assert isinstance(answer, StagePlan)
                assert answer.step_time_s == pytest.approx(time_s, rel=CLOSE, abs=CLOSE)
                near += 1
    assert near > 80


def test_only_what_takes_less_than_a_known_plan_is_found():
    found_some = 0
    for seed in range(60):
        asked = [random_problem(number) for number in range(5 * seed, 5 * seed + 5)]
        times = [a.step_time_s if isinstance(a, StagePlan) else math.inf for a in map(brute_force_stages, asked)]
        under_s = float(np.random.default_rng(seed).uniform(0.5, 2.0)) * min(min(times), 1e9)
        answers = best_stages(asked, 1.0, under_s)
        found = [a.step_time_s if isinstance(a, StagePlan) else math.inf for a in answers]
        if min(times) < under_s * (1 - CLOSE):
            assert min(found) == pytest.approx(min(times), rel=CLOSE, abs=CLOSE)
            found_some += 1
        elif min(times) > under_s * (1 + CLOSE):
            assert min(found) == math.inf
        for answer, time_s in zip(answers, times, strict=True):
            assert answer.bound_s <= time_s * (1 + CLOSE) + CLOSE
    assert 20 < found_some < 60


# What must hold whatever the costs


@pytest.mark.parametrize("seed", range(40))
def test_more_memory_and_cheaper_parts_never_cost_time(seed):
    asked = random_problem(seed)

    def time_s(changed: StageProblem) -> float:
        answer = solve_stages(changed)
        return answer.step_time_s if isinstance(answer, StagePlan) else math.inf

    base = time_s(asked)
    most = base * (1 + CLOSE)
    assert time_s(replace(asked, limit_bytes=2 * asked.limit_bytes)) <= most
    for name in ("once_s", "send_s"):
        cheaper = tuple(replace(o, **{name: getattr(o, name) / 2}) for o in asked.options)
        assert time_s(replace(asked, options=cheaper)) <= most
    assert time_s(replace(asked, options=asked.options + asked.options[:1])) == pytest.approx(base)
    if asked.fixed_num_stages is not None:
        assert time_s(replace(asked, fixed_num_stages=None)) <= most


# The model


def test_in_flight():
    for schedule, expected in (
        (Schedule.ONE_F_ONE_B, [4, 3, 2, 1]),
        (Schedule.EAGER_ONE_F_ONE_B, [6, 5, 3, 1]),
        (Schedule.GPIPE, [6, 6, 6, 6]),
        (Schedule.ZB_H1, [4, 4, 4, 4]),
        (Schedule.ZB_H2, [6, 6, 6, 6]),
        (Schedule.ZB_1P, [4, 4, 4, 4]),
        (Schedule.ZB_2P, [6, 6, 6, 6]),
        (Schedule.INFERENCE, [0, 0, 0, 0]),
    ):
        asked = problem([option(1, [1.0] * 4)], 4, 6, schedule=schedule)
        assert [in_flight(asked, stage, 4) for stage in range(4)] == expected


@pytest.mark.parametrize("schedule", [Schedule.GPIPE, Schedule.ONE_F_ONE_B, Schedule.EAGER_ONE_F_ONE_B])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 8, 32])
@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_the_model_against_the_schedule_run_on_a_clock(schedule, microbatches, stages):
    """Equal stages: exact. Uneven ones: never too fast, and too slow by the forwards run ahead at most."""
    rng = np.random.default_rng(stages)
    for forward, send in (
        ([3.0] * stages, 0.0),
        (rng.integers(1, 10, stages).astype(np.float64).tolist(), 0.0),
        (rng.integers(1, 10, stages).astype(np.float64).tolist(), 0.5),
    ):
        asked = problem([option(1, forward, send=send)], stages, microbatches, schedule=schedule)
        tasks = [order(schedule, s, stages, microbatches) for s in range(stages)]
        run_s = makespan_s(tasks, forward, [2 * f for f in forward], [send] * stages)
        model_s = step_time_s(asked, [Stage(first=s, last=s + 1, option=0) for s in range(stages)])
        even = schedule is Schedule.GPIPE or len(set(forward)) == 1
        ahead_s = 0.0 if even else (in_flight(asked, 0, stages) - 1) * max(forward)
        waiting_s = (microbatches - 1) * 2 * send if schedule is Schedule.ONE_F_ONE_B else 0.0
        assert run_s <= model_s + CLOSE
        assert model_s <= run_s + ahead_s + waiting_s + CLOSE


@pytest.mark.parametrize(("schedule", "name"), [(Schedule.ZB_1P, "zb-1p"), (Schedule.ZB_2P, "zb-2p")])
@pytest.mark.parametrize(("forward", "send"), [([3.0] * 4, 0.0), ([3.0] * 4, 0.25), ([2.0, 3.0, 5.0, 3.0], 0.0)])
def test_the_model_of_searched_schedules_against_their_lists(schedule, name, forward, send):
    """The lists are made for the same times; the model may be above them by the transfers that they hide."""
    stages, microbatches = len(forward), 12
    asked = problem([option(1, forward, send=send)], stages, microbatches, schedule=schedule)
    model_s = step_time_s(asked, [Stage(first=s, last=s + 1, option=0) for s in range(stages)])
    costs = StageCosts(
        forward_s=tuple(forward),
        backward_s=tuple(forward),  # `option` has backward passes of twice the time, half of it for the weights
        weight_s=tuple(forward),
        send_s=(send,) * (stages - 1),
        send_back_s=(send,) * (stages - 1),
        deferred=(1.0,) * stages,
    )
    made_s = place(make_schedule(name, stages, microbatches, 1, costs, whole_step=True), costs).makespan_s
    assert made_s <= model_s + CLOSE
    assert model_s <= made_s + 2 * microbatches * send + max(forward) + CLOSE


def test_the_update_of_a_later_stage_hides_behind_the_drain():
    first, second = option(1, [1.0, 1.0], once=1.0), option(1, [1.0, 1.0], once=2.5)
    asked = problem([first, second], 2, 4)
    plan = [Stage(first=0, last=1, option=0), Stage(first=1, last=2, option=1)]
    assert step_time_s(asked, plan) == pytest.approx(5 * 3 + 1.0)
    assert step_time_s(asked, [*plan[:1], Stage(first=1, last=2, option=0)]) == pytest.approx(5 * 3 + 1.0)
    assert step_time_s(asked, [Stage(first=0, last=1, option=1), plan[1]]) == pytest.approx(5 * 3 + 2.5)
