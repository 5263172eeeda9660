"""What malloc keeps of freed memory goes back to the system."""

import ctypes
import sys

import pytest

from autopar.common.free_memory import give_back_free_memory

PIECE, PIECES = 64 << 10, 2000  # below the size from which malloc maps memory of its own


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.skipif(sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc")
def test_freed_memory_is_given_back():
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
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
