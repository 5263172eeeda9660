"""Sources of examples by what they offer: arrays, examples by number, a file of tokens, examples in a row.

An example is a pytree of arrays and numbers; lists of numbers in it are arrays, as Hugging Face's datasets have them.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from autopar.errors import InvalidArgumentError

_WHERE = "autopar.data.shard(source)"
_NONE = object()
MOST_EXAMPLES = 2**32  # what Grain's index shuffle counts in


class NumberedExamples(Protocol):
    """Examples that are read by their numbers, in any order."""

    def __len__(self) -> int: ...

    def rows(self, examples: np.ndarray, epoch: int) -> Any:
        """These examples, stacked leaf by leaf."""


class ArrayExamples:
    """Arrays whose leading axis counts examples; memory-mapped arrays are read only where examples are asked for."""

    def __init__(self, arrays: Any) -> None:
        self._arrays = jax.tree.map(lambda x: x if isinstance(x, np.ndarray) else np.asarray(x), arrays)
        sizes = {x.shape[:1] for x in jax.tree.leaves(self._arrays)}
        if len(sizes) != 1 or sizes == {()}:
            raise InvalidArgumentError(
                where=_WHERE, expected="arrays with one number of examples in dimension 0",
                got=", ".join(sorted(str(x.shape) for x in jax.tree.leaves(self._arrays))) or "no arrays",
                hint="give arrays of equal length, or a source with __len__ and __getitem__",
            )  # fmt: skip
        ((self._size,),) = sizes

    def __len__(self) -> int:
        return int(self._size)

    def rows(self, examples: np.ndarray, epoch: int) -> Any:
        return jax.tree.map(lambda x: np.asarray(x[examples]), self._arrays)


class ExamplesByNumber:
    """A source with `__len__` and `__getitem__`; with `__getitems__` too, it is asked for several at once."""

    def __init__(self, source: Any) -> None:
        self._source, self._size = source, len(source)
        kinds = type(source).__mro__
        self._counts_on = any(k.__name__ == "MapDataset" and k.__module__.startswith("grain.") for k in kinds)

    def __len__(self) -> int:
        return self._size

    def rows(self, examples: np.ndarray, epoch: int) -> Any:
        # A `grain.MapDataset` counts on through the epochs, and its random transformations draw by these numbers.
        numbers = (examples + epoch * self._size if self._counts_on else examples).tolist()
        several = getattr(self._source, "__getitems__", None)
        found = [self._source[i] for i in numbers] if several is None else several(numbers)
        for number, example in zip(numbers, found, strict=True):
            if example is None:
                raise InvalidArgumentError(
                    where=f"{_WHERE}, example {number % self._size}", expected="an example for each number", got="None",
                    hint="after filter() pass dataset.to_iter_dataset(), which leaves out what is filtered",
                )  # fmt: skip
        return stacked(found)


def is_stream(source: Any) -> bool:
    """Whether examples only come one after the other."""
    return hasattr(source, "__iter__") and not _is_numbered(source) and not _is_arrays(source)


def numbered(source: Any) -> NumberedExamples:
    """Raises: InvalidArgumentError for what holds no examples, or more than can be numbered."""
    examples: NumberedExamples
    if _is_arrays(source):
        examples = ArrayExamples(source)
    elif _is_numbered(source):
        examples = ExamplesByNumber(source)
    else:
        raise InvalidArgumentError(
            where=_WHERE, expected="arrays, a Grain dataset, an object with __len__ and __getitem__, or an iterable",
            got=type(source).__name__,
            hint="wrap what reads an example by its number in a class with __len__ and __getitem__",
        )  # fmt: skip
    if not 0 < len(examples) < MOST_EXAMPLES:
        repeats = "leave repeat() out: epochs=... counts the epochs, None for no end"
        raise InvalidArgumentError(
            where=_WHERE, expected="from 1 to 2**32 - 1 examples", got=f"{len(examples)} in {type(source).__name__}",
            hint=repeats if len(examples) else "look for where the examples are read or filtered: none is left",
        )  # fmt: skip
    return examples


# Grain's datasets that give the elements of another one as they are, by how the names of their classes begin.
_PASSING_ON = ("Prefetch", "Repeat", "Shuffle", "Slice", "WindowShuffle")


def check_not_batched(source: Any) -> None:
    """Raises: InvalidArgumentError for a Grain dataset whose elements are batches, as far as its classes say."""
    kind = type(source)
    while kind.__module__.startswith("grain."):
        if kind.__name__.lstrip("_").startswith("Batch"):
            raise InvalidArgumentError(
                where=_WHERE, expected="a dataset of examples", got=f"one of batches ({kind.__name__})",
                hint="leave batch(...) out: shard(..., batch_size=...) makes the batches, of all processes together",
            )  # fmt: skip
        parents: Any = getattr(source, "parents", ())
        if len(parents) != 1 or not kind.__name__.startswith(_PASSING_ON):
            return
        (source,) = parents
        kind = type(source)


def _is_arrays(source: Any) -> bool:
    if isinstance(source, list):
        return False  # a list of examples
    if isinstance(source, Iterator):
        return False  # a generator is a leaf, of which jax warns
    leaves = jax.tree.leaves(source)
    return bool(leaves) and all(isinstance(x, (np.ndarray, jax.Array)) for x in leaves)


def _is_numbered(source: Any) -> bool:
    return hasattr(source, "__len__") and hasattr(source, "__getitem__") and not isinstance(source, (dict, str, bytes))


class StreamExamples:
    """An iterable of examples, begun again for each epoch. The position is reached by skipping."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self._is_once = iter(source) is source
        self._is_begun = False

    @property
    def can_begin_again(self) -> bool:
        return not self._is_once

    def first(self) -> Any:
        """The first example. Raises: InvalidArgumentError where there is none."""
        examples = iter(self._source)
        for example in examples:
            if self._is_once:
                self._source = itertools.chain([example], examples)
            return example
        raise InvalidArgumentError(
            where=_WHERE, expected="an iterable of examples", got=f"an empty one, {type(self._source).__name__}",
            hint="look for where the examples are read; an iterator that was read before is empty",
        )  # fmt: skip

    def epoch(self, epoch: int, skip: int) -> Iterator[Any]:
        """The examples of an epoch after the first `skip`.

        Raises: InvalidArgumentError for an iterator at its end, and for an iterable that ends before them.
        """
        if self._is_once and (self._is_begun or epoch):
            raise InvalidArgumentError(
                where=_WHERE, expected="an iterable that can begin again, for another epoch or position",
                got=f"an iterator, {type(self._source).__name__}",
                hint="pass the dataset itself, or an object whose __iter__ opens the data anew",
            )  # fmt: skip
        self._is_begun = True
        examples = iter(self._source)
        skipped = sum(1 for _ in itertools.islice(examples, skip))
        following = next(examples, _NONE)
        if skip and following is _NONE:
            raise InvalidArgumentError(
                where=f"{_WHERE}, epoch {epoch}",
                expected=f"an iterable of more than {skip} examples, as the position says",
                got=f"{skipped} in {type(self._source).__name__}",
                hint="restore the position of the same data: an iterable gives the same examples whenever it begins",
            )  # fmt: skip
        return iter(()) if following is _NONE else itertools.chain([following], examples)


def stacked(examples: Sequence[Any]) -> Any:
    """Examples of one structure as one tree of arrays. Raises: InvalidArgumentError where they differ."""
    if not examples:
        return None
    leaves_of, trees = zip(*(jax.tree.flatten(x, is_leaf=_is_number_list) for x in examples), strict=True)
    if any(tree != trees[0] for tree in trees):
        odd = next(tree for tree in trees if tree != trees[0])
        raise InvalidArgumentError(
            where=_WHERE, expected=f"examples of one structure, {trees[0]}", got=f"{odd}",
            hint="map the source to examples that are alike",
        )  # fmt: skip
    columns = [[np.asarray(x) for x in column] for column in zip(*leaves_of, strict=True)]
    for column in columns:
        # Texts have a type for each length.
        kinds = {x.dtype for x in column if x.dtype.kind not in "US"}
        if len(kinds) > 1:
            raise InvalidArgumentError(
                where=_WHERE, expected="examples of one type", got=", ".join(sorted(map(str, kinds))),
                hint="convert them in the source: numpy.asarray(x, 'float32')",
            )  # fmt: skip
    try:
        leaves = [np.stack(column) for column in columns]
    except ValueError as error:
        shapes = sorted({str(np.shape(x)) for column in zip(*leaves_of, strict=True) for x in column})
        raise InvalidArgumentError(
            where=_WHERE, expected="examples of one shape", got=f"{', '.join(shapes[:4])} ({error})",
            hint="pad, cut or pack them to one shape in the source (grain: dataset.map(...))",
        ) from error  # fmt: skip
    return jax.tree.unflatten(trees[0], leaves)


def _is_number_list(x: Any) -> bool:
    return isinstance(x, list) and all(
        _is_number_list(y) if isinstance(y, list) else isinstance(y, (bool, int, float)) for y in x
    )


class TokenWindows:
    """Windows of a token file: `windows[i]` are `length` tokens from token `i * stride` on, as int32.

    Only what is read comes into memory. The tokens after the last whole window are left out.
    """

    def __init__(self, path: str | Path, length: int, dtype: np.dtype, stride: int) -> None:
        self.path, self.length, self.dtype, self.stride = Path(path), length, dtype, stride
        self._tokens = np.memmap(self.path, dtype=dtype, mode="r")

    def __len__(self) -> int:
        return (len(self._tokens) - self.length) // self.stride + 1

    def __getitem__(self, index: int) -> np.ndarray:
        index = range(len(self))[index]
        first = index * self.stride
        tokens = self._tokens[first : first + self.length]
        if tokens.dtype.itemsize >= 4 and tokens.max() > np.iinfo(np.int32).max:
            raise InvalidArgumentError(
                where=f"{self!r}, window {index}", expected="tokens below 2**31, which int32 holds",
                got=str(tokens.max()), hint="give the type that the file was written in: dtype='uint16'",
            )  # fmt: skip
        return tokens.astype(np.int32)

    def __repr__(self) -> str:
        return f"<{len(self)} windows of {self.length} tokens ({self.dtype}) of {self.path}>"


def tokens(
    path: str | Path, *, length: int, dtype: str | np.dtype | type = "uint16", stride: int | None = None
) -> TokenWindows:
    """Windows of `length` tokens of a file that holds nothing but tokens of one integer type, one after the other.

    Windows begin `stride` tokens apart; None: `length`, so that each token is in one window. With `length=n + 1` and
    `stride=n` a window has n tokens and the next token of each.

    Raises: InvalidArgumentError for a file that is not such tokens or has not one window; FileNotFoundError.
    """
    where = f"autopar.data.tokens({str(path)!r})"
    stride = length if stride is None else stride
    try:
        kind = np.dtype(dtype)
    except TypeError:
        kind = None
    if kind is None or kind.kind not in "iu":
        raise InvalidArgumentError(
            where=where, expected="an integer type of tokens", got=repr(dtype) if kind is None else str(kind),
            hint="give the type that the file was written in: numpy.array(tokens, 'uint16').tofile(path)",
        )  # fmt: skip
    if length < 1 or stride < 1:
        raise InvalidArgumentError(
            where=where, expected="length and stride of 1 or more", got=f"length={length}, stride={stride}",
            hint="length is the number of tokens of an example",
        )  # fmt: skip
    num_bytes = os.path.getsize(path)
    if num_bytes % kind.itemsize or num_bytes < length * kind.itemsize:
        raise InvalidArgumentError(
            where=where, expected=f"a file of {kind} tokens, at least {length} of them", got=f"{num_bytes} bytes",
            hint="write it with numpy.array(tokens, dtype).tofile(path), and give the same dtype here",
        )  # fmt: skip
    return TokenWindows(path, length, kind, stride)
