"""Threads of a program that ends, and begins none any more."""

import concurrent.futures
import threading

import pytest

from autopar.train.checkpoint import preemption
from autopar.train.checkpoint.preemption import SpareThreads


@pytest.fixture
def ended(monkeypatch):
    """Has Python refuse threads, as it does when a program ends."""

    def refuse():
        def begin(*_, **__):
            raise RuntimeError("can't create new thread at interpreter shutdown")

        monkeypatch.setattr(threading, preemption._BEGINS, begin)

    return refuse


def test_threads_and_pools_run_on_spare_threads(ended):
    before, spare, seen = threading.active_count(), SpareThreads(4), []
    ended()
    with spare.in_use():
        thread = threading.Thread(target=lambda: seen.append(threading.current_thread()))
        thread.start()
        thread.join(timeout=10)
        assert seen == [thread]
        assert not thread.is_alive()
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            assert list(pool.map(lambda x: x + 1, range(8))) == list(range(1, 9))
    assert threading.active_count() == before  # a spare thread is counted once it has become one
    with pytest.raises(RuntimeError, match="at interpreter shutdown"):
        threading.Thread(target=print).start()
    spare.release()


def test_without_spare_threads_the_error_is_pythons(ended):
    spare = SpareThreads(1)
    spare.release()
    ended()
    with spare.in_use(), pytest.raises(RuntimeError, match="at interpreter shutdown"):
        threading.Thread(target=print).start()


def test_while_python_begins_threads_none_is_used():
    spare = SpareThreads(1)
    with spare.in_use():
        thread = threading.Thread(target=lambda: None)
        thread.start()
        thread.join()
    assert len(spare._idle) == 1
    spare.release()
