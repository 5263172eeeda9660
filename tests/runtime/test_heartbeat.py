"""The watch of process 0, and which process is alive but stuck, from what each shows of itself; no processes are
needed.
"""

import atexit
import sys
import threading
import time

import msgspec
import pytest

from autopar.common import jax_distributed
from autopar.runtime import heartbeat
from autopar.runtime.heartbeat import (
    BEAT_S,
    Sign,
    Steps,
    Stillness,
    Watch,
    behind,
    differing,
    is_mismatch,
    place_of,
    stuck,
)


class Store:
    """Texts by key; `in_vain`: keys that were waited for and not there."""

    def __init__(self):
        self.texts, self.in_vain, self.waits = {}, [], 0

    def set(self, key, value):
        self.texts[key] = value

    def wait_for(self, key, timeout_s):
        self.waits += 1
        if key not in self.texts:
            self.in_vain.append(key)
        return self.texts.get(key)

    def below(self, prefix):
        return {key.removeprefix(prefix): text for key, text in self.texts.items() if key.startswith(prefix)}


def test_the_watch_waits_for_nothing_that_is_not_there(monkeypatch):
    """Each wait in vain takes memory for good: a verdict is there from the start, and empty."""
    store = Store()
    monkeypatch.setattr(jax_distributed, "shared_store", lambda: store)
    watch = Watch(store, 0)
    try:
        time.sleep(2 * BEAT_S)
        assert store.waits > 1
        assert store.in_vain == []
        assert watch.lost is None
    finally:
        atexit.unregister(watch._end)
        watch._stop.set()


def test_process_0_may_go_before_this_one_has_come_out_of_the_shutdown_that_all_wait_in(monkeypatch):
    """The service of process 0 goes as soon as it has left jax's barrier; the shutdown is the user's own."""

    class Client:
        def shutdown(self):
            thread.start()
            time.sleep(0.1)

    store, state = Store(), jax_distributed.distributed.State()
    state.client = Client()
    store.set("autopar/lost", "")
    monkeypatch.setattr(heartbeat, "GRACE_S", 0.5)
    monkeypatch.setattr(heartbeat, "when_service_goes", lambda address, call: None)
    monkeypatch.setattr(jax_distributed, "shared_store", lambda: state.client and store)
    watch = Watch(store, 1)
    thread = threading.Thread(target=watch._service_went, args=["takes no connections any more"])
    try:
        state.shutdown()
        thread.join()
        assert watch.lost is None
        state.client, watch._is_told = Client(), True
        begun = time.monotonic()
        watch._service_went("takes no connections any more")
        assert "process 0 takes no connections any more" in str(watch.lost)
        assert time.monotonic() < begun + heartbeat.GRACE_S
    finally:
        atexit.unregister(watch._end)
        watch._stop.set()


LIMIT_S = 40.0
WAITS = Sign(steps=5, joint=5, ended=4, last_ended_s=41.0, longest_s=1.0, still_s=41.0, where="train.py:9 in main")
DONE = Sign(steps=4, joint=4, ended=4, last_ended_s=41.0, longest_s=1.0, still_s=41.0, where="data.py:3 in load")


def changed(sign: Sign, **fields: object) -> Sign:
    return msgspec.structs.replace(sign, **fields)


def test_a_sign_is_read_as_it_was_written():
    sign = Sign(
        beats=3, steps=2, joint=4, met=1, ended=1, recent=((1, 17), (2, 4294967295)), name="step", where="a b:1"
    )
    assert Sign.read(sign.text()) == sign
    assert Sign.read(Sign().text()) == Sign()


def test_who_stands_still_behind_the_others_is_stuck():
    found = stuck({0: WAITS, 1: DONE}, LIMIT_S)
    assert found == (1, "is alive but has stood still for 41 s after step 4, at data.py:3 in load")


@pytest.mark.parametrize(
    ("case", "sign"),
    [
        ("not for long", changed(DONE, still_s=39.0)),
        ("it moves: it loads, compiles or writes", changed(DONE, still_s=0.5)),
        ("its devices have a step to end", changed(DONE, ended=3, last_ended_s=10.0)),
        ("it has begun as much", changed(DONE, met=1)),
        ("it ends", changed(DONE, state="ended")),
    ],
)
def test_who_is_behind_may_have_a_reason(case, sign):
    assert stuck({0: changed(WAITS, still_s=30.0), 1: sign}, LIMIT_S) is None, case


def test_a_process_that_has_not_come_to_a_meeting_is_stuck():
    """Before the first step: the others wait for a plan."""
    found = stuck({0: Sign(met=1, still_s=0.5), 1: Sign(still_s=41.0)}, LIMIT_S)
    assert found is not None
    assert found[0] == 1


def test_all_wait_for_their_devices_for_much_longer_than_steps_take():
    found = stuck({0: WAITS, 1: WAITS}, LIMIT_S)
    assert found is not None
    assert found[1].startswith("is alive but has not ended step 5 in 41 s, nor has any other process, at train.py:9")
    found = stuck({0: changed(WAITS, ended=5, steps=6), 1: WAITS}, LIMIT_S)
    assert found is not None
    assert (found[0], "and the others wait for it" in found[1]) == (1, True)


@pytest.mark.parametrize(
    ("case", "fields"),
    [
        ("its steps are long", {"longest_s": 10.0}),
        ("the first steps may compile elsewhere", {"ended": 2, "steps": 3}),
        ("a step has just ended", {"last_ended_s": 5.0}),
        ("its host is busy: devices of a CPU", {"still_s": 5.0}),
        ("it has to begin yet what the others wait for", {"ended": 4, "steps": 4, "joint": 4, "still_s": 0.0}),
    ],
)
def test_a_long_step_is_no_error(case, fields):
    assert stuck({0: WAITS, 1: changed(WAITS, **fields)}, LIMIT_S) is None, case


def test_devices_of_one_that_end_nothing_while_the_others_are_ahead():
    """The others wait in a meeting, where they move."""
    ahead = changed(WAITS, steps=9, joint=9, ended=9, met=1, still_s=0.5)
    found = stuck({0: ahead, 1: WAITS}, LIMIT_S)
    assert found is not None
    assert (found[0], "and the others wait for it" in found[1]) == (1, True)
    assert stuck({0: changed(ahead, last_ended_s=5.0), 1: WAITS}, LIMIT_S) is None


def test_first_steps_are_stuck_after_ten_minutes():
    first = changed(WAITS, ended=0, steps=1, joint=1, last_ended_s=601.0, still_s=601.0)
    assert stuck({0: first, 1: changed(first, still_s=599.0)}, LIMIT_S) is None
    assert stuck({0: first, 1: first}, LIMIT_S) is not None


def test_it_can_be_switched_off():
    assert stuck({0: WAITS, 1: DONE}, 0.0) is None


def test_who_is_behind_is_named_whether_it_moves_or_not():
    assert behind({0: WAITS, 1: changed(DONE, still_s=0.0)}) == (
        1,
        "is alive but has begun nothing after step 4, at data.py:3 in load",
    )
    assert behind({0: WAITS, 1: WAITS}) is None


def test_another_step_is_named():
    first = Sign(recent=((3, 7), (4, 8)), name="train")
    assert differing({0: first, 1: Sign(recent=((2, 1), (3, 7)), name="train")}) is None
    found = differing({0: first, 1: Sign(recent=((3, 7), (4, 9)), name="evaluate")})
    assert found is not None
    assert found == (
        1,
        "has begun another step than process 0, evaluate where that of process 0 is train",
    )
    assert is_mismatch(found[1])


def test_digests_are_of_all_steps_up_to_one():
    def recent(*fingerprints: str) -> dict[int, int]:
        steps = Steps()
        for fingerprint in fingerprints:
            steps.begin("a step", fingerprint)
        return dict(steps.recent)

    assert recent("a", "b", "a") == recent("a", "b", "a")
    assert recent("a", "b")[2] != recent("b", "b")[2]
    assert list(recent(*"abcdefghij")) == list(range(3, 11))


def test_agreements_have_their_place_among_steps():
    one, other = Steps(), Steps()
    one.begin("step", "a")
    one.note("step", "key")
    other.note("step", "key")
    other.begin("step", "a")
    assert (one.begun, other.begun) == (1, 1)
    assert not set(one.recent) & set(other.recent)


class Result:
    """An array that is there when it is told to be."""

    def __init__(self) -> None:
        self.is_there = False

    def is_ready(self) -> bool:
        return self.is_there


def test_steps_end_in_their_order_when_their_results_are_there():
    steps, results = Steps(), [Result(), Result()]
    for result in results:
        steps.begin("step", "f")
        steps.await_result(result)
    results[1].is_there = True
    steps.look()
    assert (steps.begun, steps.ended) == (2, 0)
    results[0].is_there = True
    steps.look()
    assert (steps.begun, steps.ended) == (2, 2)


def test_the_longest_step_is_not_one_of_the_first(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: clock[0])
    steps = Steps()
    for seconds in (100.0, 50.0, 20.0, 3.0, 5.0, 4.0):
        clock[0] += 1000.0  # between steps the devices have nothing to do
        steps.begin("step", "f")
        result = Result()
        steps.await_result(result)
        clock[0] += seconds
        result.is_there = True
        steps.look()
    assert steps.longest_s == 5.0


def wait_here(started: threading.Event, end: threading.Event) -> None:
    started.set()
    end.wait()


def test_a_process_stands_still_until_a_thread_moves(monkeypatch):
    monkeypatch.setattr(heartbeat, "IDLE_SHARE", 1e9)
    started, end = threading.Event(), threading.Event()
    thread = threading.Thread(target=wait_here, args=(started, end))
    thread.start()
    started.wait()
    time.sleep(0.05)
    frames = {thread.ident: sys._current_frames()[thread.ident or 0]}
    monkeypatch.setattr(heartbeat.sys, "_current_frames", lambda: frames)
    stillness = Stillness()
    stillness.look()
    stillness.look()
    assert stillness.seconds > 0.0
    frames.clear()
    stillness.look()
    assert stillness.seconds == 0.0
    end.set()
    thread.join()


def test_a_busy_process_does_not_stand_still():
    stillness = Stillness()
    stillness.look()
    end = time.monotonic() + 0.1
    while time.monotonic() < end:
        pass
    stillness.look()
    assert stillness.seconds == 0.0


def test_a_place_is_the_innermost_line_outside_of_libraries():
    started, end = threading.Event(), threading.Event()
    thread = threading.Thread(target=wait_here, args=(started, end))
    thread.start()
    started.wait()
    time.sleep(0.05)
    assert place_of(sys._current_frames()[thread.ident or 0]).startswith("test_heartbeat.py:")
    assert place_of(sys._current_frames()[thread.ident or 0]).endswith(" in wait_here")
    end.set()
    thread.join()
    assert place_of(None) == ""
