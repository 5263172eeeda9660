"""A program while it is being drawn: its values so far, and drawing among them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import numpy as np

from benchmarks.random_programs.program import HELPERS, Leaf, Statement

SIZES = (2, 3, 4, 5, 6, 7, 8, 9, 12, 16)
MAX_ELEMENTS = 4096  # of one value
FLOATS = ("float32", "bfloat16", "float64", "float16")

_NAMESPACE: dict[str, object] = {}
exec(
    "import functools\nimport jax\nimport jax.numpy as jnp\nimport numpy as np\nfrom jax import lax\n"
    + "\n".join(HELPERS.values()),
    _NAMESPACE,
)


class Unfit(Exception):
    """A block has no value that it could take, or is not possible with what it drew."""


class Draft:
    """Values, parameters and batch leaves of a program that grows."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.mixes = True  # whether blocks may mix the examples of the batch, of which no micro-batches can be made
        self.examples = int(self.random.choice([4, 6, 8, 8, 8, 12, 16, 16, 5]))
        self.statements: list[Statement] = []
        self.parameters: list[Leaf] = []
        self.others: list[Leaf] = []
        self.batch: list[Leaf] = []
        self.updates: list[tuple[str, str]] = []
        self.block = "leaf"

    # Drawing

    def chance(self, probability: float) -> bool:
        return bool(self.random.random() < probability)

    def one(self, things: Sequence) -> object:
        return things[int(self.random.integers(len(things)))]

    def size(self, sizes: Sequence[int] = SIZES) -> int:
        return int(self.one(sizes))  # type: ignore[call-overload]

    def below(self, bound: int) -> int:
        return int(self.random.integers(bound))

    def pick(
        self,
        dtypes: Sequence[str] = FLOATS,
        *,
        rank: int | None = None,
        min_rank: int = 0,
        where: Callable[[Statement], bool] = lambda s: True,
    ) -> Statement:
        """A value, the latest more often than others. Raises: Unfit."""
        fitting = [
            s
            for s in self.statements
            if s.dtype in dtypes
            and (rank is None or len(s.shape) == rank)
            and len(s.shape) >= min_rank
            and math.prod(s.shape) > 0
            and where(s)
        ]
        if not fitting:
            raise Unfit
        back = min(int(self.random.geometric(0.4)), len(fitting))
        return fitting[-back]

    def axis(self, value: Statement, *, spare_examples: float = 0.7) -> int:
        """A dimension, seldom that of the examples where there are others. Raises: Unfit."""
        if not value.shape:
            raise Unfit
        if len(value.shape) > 1 and (self.chance(spare_examples) or not self.mixes):
            return 1 + self.below(len(value.shape) - 1)
        return self.below(len(value.shape))

    # Growing

    def emit(self, text: str) -> Statement:
        """A new value. Raises: Unfit for one that is too large, or of which jax refuses to make a shape."""
        name = f"v{len(self.statements)}"
        try:
            shape = self.shape_of(text)
        except (TypeError, ValueError, IndexError, ZeroDivisionError, NotImplementedError, OverflowError) as error:
            raise Unfit(text) from error
        if not hasattr(shape, "shape") or not 0 < math.prod(shape.shape) <= MAX_ELEMENTS or len(shape.shape) > 5:
            raise Unfit(text)
        made = Statement(name=name, text=text, shape=shape.shape, dtype=str(shape.dtype), block=self.block)
        self.statements.append(made)
        return made

    def emit_one(self, *texts: str) -> Statement:
        """One of several new values. Raises: Unfit, as `emit`."""
        return self.emit(str(self.one(texts)))

    def shape_of(self, text: str) -> object:
        names = [s.name for s in self.statements]
        function = eval(f"lambda {', '.join([*names, 'p', 's', 'batch'])}: {text}", _NAMESPACE)
        shapes = [jax.ShapeDtypeStruct(s.shape, _dtype(s.dtype)) for s in self.statements]
        leaves = [
            {x.name: jax.ShapeDtypeStruct(x.shape, _dtype(x.dtype)) for x in group}
            for group in (self.parameters, self.others, self.batch)
        ]
        return jax.eval_shape(function, *shapes, *leaves)

    def parameter(self, *shape: int, dtype: str = "float32", kind: str = "normal") -> str:
        if math.prod(shape) > MAX_ELEMENTS:
            raise Unfit
        name = f"w{len(self.parameters)}"
        self.parameters.append(Leaf(name=name, shape=shape, dtype=dtype, kind=kind))
        return f'p["{name}"]'

    def other(self, *shape: int, dtype: str, kind: str, update: str, bound: int = 2) -> str:
        """A leaf of the state that is not trained; `update` is what replaces it, with {} for itself."""
        name = f"s{len(self.others)}"
        here = f's["{name}"]'
        self.others.append(Leaf(name=name, shape=shape, dtype=dtype, kind=kind, bound=bound))
        self.updates.append((name, update.format(here)))
        return here

    def data(self, *shape: int, dtype: str = "float32", kind: str = "normal", bound: int = 2) -> Statement:
        """A new batch leaf of so many numbers for each example."""
        name = f"x{len(self.batch)}"
        shape = (self.examples, *shape)
        self.batch.append(Leaf(name=name, shape=shape, dtype=dtype, kind=kind, bound=bound))
        return self.emit(f'batch["{name}"]')

    def counter(self) -> str:
        """A whole number of the state that goes up with each step."""
        for name, update in self.updates:
            if update == f's["{name}"] + 1':
                return f's["{name}"]'
        return self.other(dtype="int32", kind="zeros", update="{} + 1")

    def integers(self, bound: int, shape: tuple[int, ...] | None = None) -> Statement:
        """Whole numbers from 0 that are below a bound, one for each example (of `shape` without its examples)."""
        wanted = (self.examples, *(shape or ()))
        known = [
            s
            for s in self.statements
            if s.shape == wanted and any(s.text == f'batch["{x.name}"]' and x.bound == bound for x in self.batch)
            and s.dtype == "int32"
        ]  # fmt: skip
        if known and self.chance(0.7):
            return known[-1]
        return self.data(*(shape or ()), dtype="int32", kind="integers", bound=bound)

    def saved(self) -> tuple[int, ...]:
        return tuple(map(len, (self.statements, self.parameters, self.others, self.batch, self.updates)))

    def restore(self, saved: tuple[int, ...]) -> None:
        lists: tuple[list, ...] = (self.statements, self.parameters, self.others, self.batch, self.updates)
        for items, count in zip(lists, saved, strict=True):
            del items[count:]


def _dtype(name: str) -> object:
    return jax.numpy.dtype(name)
