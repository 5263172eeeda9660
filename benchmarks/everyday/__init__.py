"""Fifty training steps as people write them, each small enough to compile in seconds on a CPU.

`STEPS` has them by name; each is made for a batch of any size. `MIXING` names those whose result is one of the whole
batch, which its parts do not have: micro-batches of them are rightly refused.
"""

from collections.abc import Callable

from benchmarks.everyday import language
from benchmarks.zoo.case import Case

STEPS: dict[str, Callable[[int], Case]] = {make.__name__: make for module in (language,) for make in module.STEPS}

MIXING: dict[str, str] = {}

__all__ = ["MIXING", "STEPS", "Case"]
