"""Schedules: literal small lists, closed forms of the papers over ranges, and the published bubble rates."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import InvalidArgumentError, ScheduleError
from autopar.runtime.program import TaskKind
from autopar.runtime.schedule import V_SHAPED
from autopar.runtime.standard_schedules import (
    SCHEDULES,
    Slot,
    StageCosts,
    Times,
    make_schedule,
    peak_in_flight,
    place,
)
from autopar.runtime.verify import verify_schedule
from autopar.runtime.zero_bubble_schedules import most_held
from tests.runtime.published_schedules import (
    ZERO_BUBBLE_ROWS,
    Expected,
    expectations,
    rate_as_counted,
    zero_bubble_rate,
)

STAGE_COUNTS = range(2, 17)


def text(schedule):
    """`F0 F1 B0`; with several stages on a group `F0.1` is micro-batch 0 on its stage 1."""
    several = schedule.chunks > 1
    return [
        " ".join(f"{x.kind.value}{x.micro_batch}{f'.{x.stage}' if several else ''}" for x in todo)
        for todo in schedule.lists
    ]


@pytest.mark.parametrize(
    ("name", "p", "m", "v", "lists"),
    [
        ("gpipe", 2, 3, 1, ["F0 F1 F2 B2 B1 B0", "F0 F1 F2 B2 B1 B0"]),
        ("1f1b", 2, 3, 1, ["F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"]),
        ("eager-1f1b", 2, 4, 1, ["F0 F1 F2 B0 F3 B1 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]),
        (
            "interleaved",
            2,
            2,
            2,
            ["F0.0 F1.0 F0.2 F1.2 B0.2 B1.2 B0.0 B1.0", "F0.1 F1.1 F0.3 B0.3 F1.3 B1.3 B0.1 B1.1"],
        ),
        (
            "interleaved",
            2,
            3,
            2,
            [
                "F0.0 F1.0 F0.2 F1.2 F2.0 B0.2 B1.2 F2.2 B0.0 B1.0 B2.2 B2.0",
                "F0.1 F1.1 F0.3 B0.3 F1.3 B1.3 F2.1 B0.1 B1.1 F2.3 B2.3 B2.1",
            ],
        ),
        ("zb-h1", 2, 3, 1, ["F0 F1 B0 W0 F2 B1 W1 B2 W2", "F0 B0 F1 B1 W0 F2 B2 W1 W2"]),
        ("zb-h2", 2, 3, 1, ["F0 F1 F2 B0 W0 B1 W1 B2 W2", "F0 B0 F1 B1 F2 B2 W0 W1 W2"]),
        (
            "zb-v",
            2,
            4,
            2,
            [
                "F0.0 F1.0 F2.0 F0.3 B0.3 W0.3 F1.3 B1.3 W1.3 F3.0 B0.0 W0.0 F2.3 B2.3 W2.3 B1.0 W1.0 F3.3 B3.3 W3.3 "
                "B2.0 W2.0 B3.0 W3.0",
                "F0.1 F0.2 F1.1 F1.2 B0.2 W0.2 F2.1 B0.1 W0.1 F2.2 B1.2 W1.2 F3.1 B1.1 W1.1 F3.2 B2.2 W2.2 "
                "B2.1 B3.2 B3.1 W2.1 W3.2 W3.1",
            ],
        ),
        (
            "dualpipev",
            2,
            4,
            2,
            [
                "F0.0 F1.0 F2.0 F0.3 B0.3 W0.3 F1.3 F3.0 B1.3 W1.3 F2.3 B0.0 W0.0 B2.3 W2.3 F3.3 B1.0 W1.0 B3.3 W3.3 "
                "B2.0 W2.0 B3.0 W3.0",
                "F0.1 F0.2 F1.1 F1.2 F2.1 B0.2 W0.2 F2.2 B0.1 W0.1 F3.1 B1.2 W1.2 F3.2 B1.1 W1.1 B2.2 W2.2 "
                "B2.1 W2.1 B3.2 B3.1 W3.2 W3.1",
            ],
        ),
        ("inference", 2, 3, 1, ["F0 F1 F2", "F0 F1 F2"]),
        ("inference", 2, 3, 2, ["F0.0 F1.0 F0.2 F1.2 F2.0 F2.2", "F0.1 F1.1 F0.3 F1.3 F2.1 F2.3"]),
    ],
)
def test_small_lists(name, p, m, v, lists):
    schedule = make_schedule(name, p, m, v)
    assert text(schedule) == lists
    verify_schedule(schedule)


def check(expected: Expected, schedule, times):
    assert place(schedule, times).bubble_s == pytest.approx(expected.bubble_s, abs=1e-9)
    assert float(max(schedule.in_flight_microbatches)) == pytest.approx(expected.in_flight)
    assert peak_in_flight(schedule) == schedule.in_flight


@pytest.mark.cases(2)
@pytest.mark.parametrize("p", STAGE_COUNTS)
def test_bubbles_and_what_is_in_flight_follow_the_formulas(p):
    times = Times(forward_s=3.0, backward_s=4.0, weight_s=2.0)
    seen = set()
    for m in sorted({p, p + 1, 2 * p - 1, 2 * p, 3 * p, 64}):
        for expected in expectations(p, m):
            seen.add((expected.name, expected.chunks))
            schedule = make_schedule(expected.name, p, m, expected.chunks)
            verify_schedule(schedule)
            check(expected, schedule, Times())
            if expected.name not in ("zb-v", "dualpipev"):
                other = next(
                    x for x in expectations(p, m, times) if (x.name, x.chunks) == (expected.name, expected.chunks)
                )
                check(other, schedule, times)
    chunked = {("interleaved", v) for v in (2, 3, 4)} | {(name, 2) for name in V_SHAPED}
    assert seen == {(name, 1) for name in SCHEDULES if name not in V_SHAPED} | chunked


def test_each_stage_of_1f1b_holds_one_less():
    assert make_schedule("1f1b", 4, 8).in_flight == (4, 3, 2, 1)
    assert make_schedule("eager-1f1b", 4, 8).in_flight == (7, 5, 3, 1)
    assert make_schedule("zb-h1", 4, 8).in_flight == (4, 4, 4, 4)


@pytest.mark.parametrize("p", [2, 4, 8, 16])
def test_zb_h2_loses_one_task_for_each_micro_batch_less(p):
    bubbles = [place(make_schedule("zb-h2", p, m)).bubble_s for m in range(p, 2 * p)]
    assert bubbles == [2 * p - 1 - m for m in range(p, 2 * p)]


@pytest.mark.parametrize("times", [Times(forward_s=18.5, backward_s=18.0, weight_s=9.25, transfer_s=0.5)])
@pytest.mark.parametrize("p", STAGE_COUNTS)
def test_what_transfers_cost(p, times):
    f, b, w, c = dataclasses.astuple(times)
    assert place(make_schedule("zb-h1", p, 4 * p), times).bubble_s == pytest.approx((p - 1) * (f + b - w + 4 * c))
    assert place(make_schedule("zb-h2", p, 4 * p), times).bubble_s == pytest.approx((p - 1) * (f + b - 2 * w + 2 * c))
    assert place(make_schedule("gpipe", p, 4 * p), times).bubble_s == pytest.approx((p - 1) * (f + b + w + 2 * c))
    # Forward passes ahead hide the transfers that 1F1B waits for in every turn.
    eager = place(make_schedule("eager-1f1b", p, 4 * p), times).bubble_s
    assert eager == pytest.approx((p - 1) * (f + b + w + 2 * c))
    assert place(make_schedule("1f1b", p, 4 * p), times).bubble_s > eager + c


@pytest.mark.parametrize("row", [r for r in ZERO_BUBBLE_ROWS if r.p < 24 and r.m < 128], ids=str)
def test_published_bubble_rates(row):
    """To the digits that are printed; ZB-V by other rules than the authors', and their 1F1B-I counts p transfers
    less.
    """
    for name, published in row.rates.items():
        tolerance = 0.0016 if name == "ZB-V" else 0.00006
        assert rate_as_counted(name, row) == pytest.approx(published, abs=tolerance), name
    assert rate_as_counted("1F1B-I", row) < zero_bubble_rate("1F1B-I", row)


seconds = st.floats(0.1, 10.0)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(SCHEDULES)),
    st.integers(1, 6),
    st.integers(1, 14),
    st.integers(1, 3),
    st.builds(Times, forward_s=seconds, backward_s=seconds, weight_s=seconds, transfer_s=st.floats(0.0, 3.0)),
)
def test_every_schedule_keeps_its_promises(name, p, m, v, times):
    v = 2 if name in V_SHAPED else v if name in ("interleaved", "inference") else 1
    schedule = make_schedule(name, p, m, v)
    fitted = make_schedule(name, p, m, v, times)
    verify_schedule(schedule)
    verify_schedule(fitted)
    assert place(fitted, times).span_s <= place(schedule, times).span_s
    assert max(peak_in_flight(schedule)) <= max(schedule.in_flight) <= m * v


stage_seconds = st.lists(seconds, min_size=5, max_size=5).map(tuple)
sends = st.lists(st.floats(0.0, 3.0), min_size=4, max_size=4).map(tuple)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(["zb-1p", "zb-2p", "zb-h1", "zb-h2", "zb-v"]),
    st.integers(1, 5),
    st.integers(1, 14),
    st.builds(
        StageCosts,
        forward_s=stage_seconds,
        backward_s=stage_seconds,
        weight_s=stage_seconds,
        send_s=sends,
        send_back_s=sends,
        deferred=st.lists(st.floats(0.0, 1.0), min_size=5, max_size=5).map(tuple),
    ),
    st.booleans(),
)
def test_schedules_for_stages_that_differ(name, p, m, costs, whole_step):
    """Complete and in an order that can run, within their memory, never slower than the lists by hand."""
    chunks = 2 if name == "zb-v" else 1
    p = min(p, 5 // chunks)
    cut = {f.name: getattr(costs, f.name)[: p * chunks - f.name.startswith("send")] for f in dataclasses.fields(costs)}
    costs = StageCosts(**cut)
    schedule = make_schedule(name, p, m, chunks, costs, whole_step=whole_step)
    verify_schedule(schedule)
    for todo in schedule.lists:
        at = {slot: i for i, slot in enumerate(todo)}
        for kind, stage, i in todo:
            if kind is TaskKind.WEIGHT:
                assert at[TaskKind.FORWARD, stage, i] < at[TaskKind.BACKWARD, stage, i] < at[kind, stage, i]
    assert most_held(schedule, costs) <= {"zb-1p": p, "zb-h1": p, "zb-2p": 2 * p}.get(name, 2 * p * chunks)
    made, drawn = place(schedule, costs), place(make_schedule(name, p, m, chunks), costs)
    if whole_step:
        assert made.makespan_s <= drawn.makespan_s
    else:
        assert made.span_s <= drawn.span_s


def test_what_waits_for_its_weight_gradient_holds_less():
    """The last stage puts its weight gradients off as long as memory allows, and the first one waits less for it."""
    times = Times(forward_s=2.0, backward_s=2.0, weight_s=1.0)
    whole, little = (StageCosts.alike(times, 4, deferred) for deferred in (1.0, 0.25))
    held = [max(make_schedule("zb-2p", 4, 16, 1, costs).in_flight) for costs in (whole, little)]
    rates = [place(make_schedule("zb-2p", 4, 16, 1, costs), costs).bubble_rate for costs in (whole, little)]
    assert held == [8, 16]
    assert rates == pytest.approx([5 / 85, 0.0])


def test_times_change_where_weight_gradients_stand():
    times = Times(forward_s=2.0, backward_s=1.0, weight_s=3.0, transfer_s=0.3)
    plain, fitted = make_schedule("zb-v", 4, 8, 2), make_schedule("zb-v", 4, 8, 2, times)
    assert place(plain, times).bubble_s == pytest.approx(3.2)
    assert place(fitted, times).bubble_s == pytest.approx(1.8)


def test_a_last_group_that_waits_at_the_end_does_not_lengthen_the_span():
    """ZB-H2 is a parallelogram: stage s begins and ends s tasks later."""
    placement = place(make_schedule("zb-h2", 4, 12))
    assert (placement.span_s, placement.makespan_s, placement.bubble_rate) == (36.0, 39.0, 0.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1b1f", 2, 3), "expected one of gpipe, 1f1b"),
        (("1f1b", 0, 3), "num_groups of schedule 1f1b: expected 1 or more, got 0"),
        (("1f1b", 2, 0), "num_microbatches of schedule 1f1b: expected 1 or more, got 0"),
        (("1f1b", 2, 3, 2), "chunks of schedule 1f1b: expected 1 stage on each group, got 2"),
        (("zb-v", 2, 3), "chunks of schedule zb-v: expected 2 stages on each group, got 1"),
        (("interleaved", 2, 3, 0), "chunks of schedule interleaved: expected 1 or more, got 0"),
        (("zb-h1", 2, 3, 1, Times(weight_s=-1.0)), "times of schedule zb-h1: expected seconds, none below 0"),
        (
            ("zb-2p", 2, 3, 1, StageCosts.alike(Times(), 3)),
            "times of schedule zb-2p: expected those of 2 stages and of the transfers between them, got 3 stages",
        ),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(InvalidArgumentError, match=message):
        make_schedule(*arguments)


class TestVerifier:
    def test_a_missing_task(self):
        schedule = make_schedule("1f1b", 2, 3)
        cut = dataclasses.replace(schedule, lists=(schedule.lists[0], schedule.lists[1][:-1]))
        with pytest.raises(ScheduleError, match="group 1: expected all of 6, got 1 missing, first B of micro-batch 2"):
            verify_schedule(cut)

    def test_a_task_twice(self):
        schedule = make_schedule("1f1b", 2, 3)
        more = dataclasses.replace(schedule, lists=(schedule.lists[0], schedule.lists[1] + schedule.lists[1][-1:]))
        with pytest.raises(ScheduleError, match="B of micro-batch 2 on stage 1 2 times"):
            verify_schedule(more)

    def test_a_task_of_another_group(self):
        schedule = make_schedule("inference", 2, 1)
        with pytest.raises(ScheduleError, match="group 0: expected all of 1, got 1 missing"):
            verify_schedule(dataclasses.replace(schedule, lists=schedule.lists[::-1]))

    def test_groups_that_wait_for_each_other(self):
        schedule = make_schedule("gpipe", 2, 2)
        # Group 0 wants the first micro-batch back before it sends the second, group 1 both before it sends any.
        f, b = TaskKind.FORWARD, TaskKind.BACKWARD
        first = tuple(Slot(kind, 0, i) for i in (0, 1) for kind in (f, b))
        with pytest.raises(
            ScheduleError, match=r"a deadlock: group 0 at B of micro-batch 0 .* group 1 at F of micro-batch 1"
        ):
            verify_schedule(dataclasses.replace(schedule, lists=(first, schedule.lists[1])))

    def test_more_in_flight_than_promised(self):
        schedule = make_schedule("gpipe", 2, 4)
        with pytest.raises(ScheduleError, match="group 1: expected at most 3 in flight, got 4"):
            verify_schedule(dataclasses.replace(schedule, in_flight=(4, 3)))

    def test_promises_for_other_groups(self):
        schedule = make_schedule("gpipe", 2, 4)
        with pytest.raises(ScheduleError, match="2 and 1"):
            verify_schedule(dataclasses.replace(schedule, in_flight=(4,)))
