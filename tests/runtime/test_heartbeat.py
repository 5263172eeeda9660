"""The watch of process 0, beside a store that keeps account of waits in vain."""

import atexit
import time

from autopar.common import jax_distributed
from autopar.runtime.heartbeat import BEAT_S, Watch


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
