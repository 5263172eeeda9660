"""The last step that processes agree on: the same one in all, whoever is told, whoever waits for whom."""

import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.train.checkpoint import preemption
from autopar.train.checkpoint.preemption import CommonEnd

STEPS = 400


class Store:
    """What `SharedStore` does, for threads."""

    def __init__(self):
        self._values, self._lock = {}, threading.Lock()

    def set(self, key, value):
        with self._lock:
            self._values[key] = value

    def set_once(self, key, value):
        with self._lock:
            return self._values.setdefault(key, value)

    def below(self, prefix):
        with self._lock:
            return {key[len(prefix) :]: value for key, value in self._values.items() if key.startswith(prefix)}


class Loops:
    """Loops of several processes. Each begins a step and then waits until the others have begun the one before it, as a
    loop does that reads a loss; then it asks.
    """

    def __init__(self, paces_s, told, store, numbers=lambda n: n):
        self.paces_s, self.told, self.numbers = paces_s, told, numbers
        self.begun, self.ended_after = [0] * len(paces_s), [None] * len(paces_s)
        self.moved = threading.Condition()
        self.ends = [CommonEnd(store, p, len(paces_s), number=0, timeout_s=20) for p in range(len(paces_s))]

    def run(self):
        threads = [threading.Thread(target=self._loop, args=(p,), daemon=True) for p in range(len(self.paces_s))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        for end in self.ends:
            end.close()
        assert not any(thread.is_alive() for thread in threads), f"stuck at {self.begun}"
        return self.ended_after

    def _loop(self, process):
        for step in range(1, STEPS):
            with self.moved:
                self.begun[process] = step
                self.moved.notify_all()
                others = [n for p, n in enumerate(self.ended_after) if p != process and n is not None]
                assert not others or step <= max(others), "a process that goes on waits for one that has ended"
                assert self.moved.wait_for(lambda step=step: min(self.begun) >= step - 1, 10), f"stuck at {self.begun}"
            if self.told.get(process) == step:
                self.ends[process].tell()
            time.sleep(self.paces_s[process])
            if self.ends[process].reached(self.numbers(step)):
                self.ended_after[process] = step
                return


@pytest.fixture(autouse=True)
def looks_often(monkeypatch):
    monkeypatch.setattr(preemption, "POLL_S", 0.003)
    monkeypatch.setattr(preemption, "_AGREEING_S", 0.001)


@settings(max_examples=15, deadline=None)
@given(
    paces_s=st.lists(st.sampled_from([0.0, 0.0005, 0.003]), min_size=1, max_size=4),
    told=st.dictionaries(st.integers(0, 3), st.integers(1, 8), min_size=1),
)
def test_all_end_after_the_same_step(paces_s, told):
    told = {process % len(paces_s): step for process, step in told.items()}
    ended = Loops(paces_s, told, Store()).run()
    assert len(set(ended)) == 1
    assert min(told.values()) <= ended[0] < STEPS


def test_steps_that_are_asked_about_twice_and_go_back():
    numbers = [n for n in (*range(1, 6), *range(3, 400)) for _ in range(2)]
    ended = Loops([0.0, 0.001], {1: 20}, Store(), numbers=lambda n: numbers[n - 1]).run()
    assert ended[0] == ended[1] is not None


def test_who_is_never_told_goes_on():
    store = Store()
    ends = [CommonEnd(store, p, 2, number=0) for p in range(2)]
    assert not any(end.reached(step) for step in range(1, 20) for end in ends)
    for end in ends:
        end.close()
    time.sleep(0.05)
    assert store.below("") == {}


def test_a_process_that_does_not_answer_is_named_and_all_go_on(caplog):
    """That one too, when it comes: it does not end without the others."""
    store = Store()
    with caplog.at_level("WARNING", "autopar"):
        ends = [CommonEnd(store, 0, 2, number=0, timeout_s=0.05)]
        ends[0].tell()
        time.sleep(0.3)
        ends.append(CommonEnd(store, 1, 2, number=0))
        time.sleep(0.3)
        assert not any(end.reached(step) for step in range(1, 5) for end in ends)
    assert "processes [1] do not answer" in caplog.text
    assert "this process answered too late" in caplog.text
