"""What malloc keeps of freed memory goes back to the system."""

import ctypes
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from autopar.train.checkpoint import array_files
from autopar.train.checkpoint.array_files import GivingBack, give_back_free_memory

ROOT = Path(__file__).parents[3]
PIECE, PIECES = 64 << 10, 2000  # below the size from which malloc maps memory of its own


needs_glibc = pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="needs glibc"
)


def resident_bytes() -> int:
    """As counted page by page; /proc/self/statm lags behind by megabytes."""
    with open("/proc/self/smaps_rollup") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("Rss:"))


def resident_bytes_between(start, end):
    """Of the mappings that overlap with these addresses alone: other threads allocate too."""
    total = 0
    with open("/proc/self/smaps") as file:
        for line in file:
            if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
                inside = int(bounds[1], 16) < end and start < int(bounds[2], 16)
            elif inside and line.startswith("Rss:"):
                total += 1024 * int(line.split()[1])
    return total


def allocating():
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    return libc


@needs_glibc
def test_freed_memory_is_given_back():
    libc = allocating()
    pieces = [libc.malloc(PIECE) for _ in range(PIECES)]
    last = libc.malloc(PIECE)  # what lies behind the others, so that they are not the end of the heap
    for piece in pieces:
        ctypes.memset(piece, 1, PIECE)
    for piece in pieces:
        libc.free(piece)
    before = resident_bytes()
    give_back_free_memory()
    assert resident_bytes() < before - PIECE * PIECES // 2
    libc.free(last)


def given_back_bytes() -> int:
    """What a thread's arena gives back of the pieces that the thread frees, while something is at work.

    Nothing but the pieces is allocated in the thread meanwhile: a list that grows and the lock by which an event waits
    lie between the pieces, and one that the other thread frees stays there, in that thread's own cache.
    """
    libc, touched, go = allocating(), threading.Lock(), threading.Lock()
    pieces = [0] * (PIECES // 4)
    GivingBack().end()  # from here on glibc keeps up to 64 MiB at the end of each arena
    work = GivingBack()

    def run():
        for i in range(len(pieces)):
            pieces[i] = libc.malloc(PIECE)
            ctypes.memset(pieces[i], 1, PIECE)
        touched.release()
        go.acquire()
        for piece in reversed(pieces):
            libc.free(piece)

    touched.acquire()
    go.acquire()
    thread = threading.Thread(target=run)
    thread.start()
    assert touched.acquire(timeout=60)
    bounds = min(pieces), max(pieces) + PIECE
    before = resident_bytes_between(*bounds)  # in this thread: what it allocates does not lie behind the pieces
    go.release()
    thread.join()
    after = resident_bytes_between(*bounds)
    work.end()
    return before - after


@pytest.mark.slow
@needs_glibc
def test_the_end_of_another_threads_arena_is_given_back_while_it_works():
    program = f"from {__name__} import given_back_bytes; print(given_back_bytes())"  # its arenas are new
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) > 0.8 * PIECE * PIECES // 4


def test_the_threshold_is_low_from_the_first_beginning_to_the_last_end(monkeypatch):
    called = []
    monkeypatch.setattr(array_files, "_function", lambda name: lambda *args: called.append((name, *args)))
    monkeypatch.setattr(array_files, "_is_set_by_user", lambda: False)
    first, second = GivingBack(), GivingBack()
    assert called == [("mallopt", -3, 32 << 20), ("mallopt", -1, 128 << 10)]
    first.end()
    first.end()
    assert called[2:] == [("malloc_trim", 0)]
    second.end()
    assert called[3:] == [("mallopt", -1, 64 << 20), ("malloc_trim", 0)]


@needs_glibc
def test_thresholds_that_a_user_sets_are_left(monkeypatch):
    called = []
    monkeypatch.setattr(array_files, "_function", lambda name: lambda *args: called.append((name, *args)))
    monkeypatch.setattr(array_files, "_is_set_by_user", lambda: True)
    GivingBack().end()
    assert called == [("malloc_trim", 0)]
    monkeypatch.setattr(array_files, "_is_set_by_user", lambda: False)
    first, second = GivingBack(), GivingBack()
    first.end()
    first.end()
    assert [row[:2] for row in called[1:]] == [("mallopt", -3), ("mallopt", -1), ("malloc_trim", 0)]
    second.end()
    assert called[4:] == [("mallopt", -1, 64 << 20), ("malloc_trim", 0)]
