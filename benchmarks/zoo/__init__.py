"""Training steps of every kind that the compiler is tried on, each small enough to compile in seconds on a CPU."""

from collections.abc import Callable

from benchmarks.zoo.case import Case
from benchmarks.zoo.gpt import gpt, gpt_bf16, gpt_odd, gpt_remat
from benchmarks.zoo.gpt_scan import gpt_scan, gpt_scan_remat
from benchmarks.zoo.mlp import mlp

CASES: dict[str, Callable[..., Case]] = {
    case.__name__: case for case in (mlp, gpt, gpt_remat, gpt_bf16, gpt_odd, gpt_scan, gpt_scan_remat)
}

__all__ = ["CASES", "Case"]
