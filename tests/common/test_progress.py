"""The seconds of passes while a plan is made, and the collector of cycles meanwhile and after."""

import gc
import sys
import time
import types

import jax
import pytest

import autopar
from autopar.common.progress import SELDOM, Deadline, Progress, rare_garbage_collection
from tests.small_steps import mlp_batch, mlp_state


def test_the_line_says_what_was_weighed_the_best_the_bound_and_what_is_left():
    progress = Progress("plan", show=False)
    with progress.pass_("mesh 2x4"):
        assert progress.text == "plan: mesh 2x4"
        progress.weighed(0.002, fits=False)
        assert progress.text == "plan: mesh 2x4; 1 weighed"
        progress.bounded(0.001, Deadline.after(60.5))
        progress.weighed(0.004, fits=True)
        progress.weighed(0.003, fits=True)
        assert progress.text == ("plan: mesh 2x4; 3 weighed; best 3 ms a step, none can take less than 1 ms; 60 s left")
        with progress.pass_("compile"):
            progress.at("compiled 1 of 2 programs")
            assert progress.text.startswith("plan: compiled 1 of 2 programs; ")
        assert progress.text.startswith("plan: mesh 2x4; ")


def test_a_part_says_within_what_it_is_and_counts_by_itself():
    progress = Progress("bench of step on dgx-h100x8", show=False)
    with progress.pass_("ZeRO-1 (3 of 9)"):
        progress.weighed(0.002, fits=True)
        part = progress.within("4 micro-batches")
        with part.pass_("mesh 8"):
            assert part.text == "bench of step on dgx-h100x8: ZeRO-1 (3 of 9), 4 micro-batches: mesh 8"


def test_without_a_terminal_a_part_tells_the_log_now_and_then(monkeypatch, caplog):
    clock = [0.0]
    monkeypatch.setattr("autopar.common.progress.time.perf_counter", lambda: clock[0])
    caplog.set_level("INFO", logger="autopar")
    progress = Progress("plan")
    with progress.pass_("search"):
        part = progress.within("4 micro-batches")
        for second in range(70):
            clock[0] = float(second)
            part.at(f"mesh {second}")
    assert caplog.messages == [f"plan: search, 4 micro-batches: mesh {second}" for second in (30, 60)]


def test_a_notebook_shows_one_line_that_changes_and_goes(monkeypatch):
    shown = []

    class Handle:
        def update(self, data, raw):
            shown.append(data["text/plain"])

    def display(data, raw, display_id):
        shown.append(data["text/plain"])
        return Handle()

    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(display=display))
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    with Progress("plan").pass_("trace"):
        pass
    assert shown == ["plan: trace", ""]


def test_a_pass_within_another_one_counts_once_in_the_total():
    progress = Progress("plan", show=False)
    with progress.pass_("search"), progress.pass_("build stages"):
        time.sleep(0.02)
    with progress.pass_("record"):
        time.sleep(0.01)
    spent_s = progress.spent_s
    assert list(spent_s) == ["build stages", "search", "record"]
    assert progress.total_s == spent_s["search"] + spent_s["record"]


@pytest.fixture(autouse=True)
def thresholds():
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


def test_thresholds_come_back_behind_the_last_of_several():
    first, second = rare_garbage_collection(), rare_garbage_collection()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert gc.get_threshold() == SELDOM
    second.__exit__(None, None, None)
    assert gc.get_threshold() == (700, 10, 10)


def test_a_collector_that_is_off_stays_off():
    gc.set_threshold(0, 10, 10)
    with rare_garbage_collection():
        assert gc.get_threshold()[0] == 0
    assert gc.get_threshold() == (0, 10, 10)


def test_planning_collects_seldom_and_leaves_nothing_behind_where_it_fails():
    seen = []

    def step(state, batch):
        seen.append(gc.get_threshold())
        raise ZeroDivisionError

    planned = autopar.parallelize(step, cluster=autopar.Cluster.flat(2), cache_dir=None)
    with pytest.raises(ZeroDivisionError):
        planned.plan(mlp_state(jax.random.key(0)), mlp_batch())
    assert seen[0] == SELDOM
    assert gc.get_threshold() == (700, 10, 10)
