"""What blocks are registered in, and what several of their modules use."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.random_programs.drafting import Draft

Block = Callable[[Draft], object]
REGISTERED: list[Block] = []
REAL = ("float32", "float64")
INTEGERS = ("int32", "int64", "uint8", "uint32")


def block(function: Block) -> Block:
    REGISTERED.append(function)
    return function


def root(n: int) -> str:
    return f"{n**-0.5:.3f}"
