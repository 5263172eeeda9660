"""`PaddedArray`, an array of the state that lies on the devices in a larger shape than it has.

A `jax.Array` has shards of one size, and so a shape that divides by its devices; `jax.jit` refuses any other layout of
an argument or result. State that ZeRO's devices do not divide therefore comes back from a step in an object of its own,
a leaf of the same trees, which has the shape, the type and the numbers of the array and computes as one.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from autopar.common import jax_compat
from autopar.frontend.pad_state import store, unstore
from autopar.ir.jax_sharding import HOST_MEMORY
from autopar.ir.padded import PaddedForm, PaddedLeaf
from autopar.runtime.execution.dispatch import turn


class PaddedArray:
    """An array on several devices that do not divide its shape, as a step returns it (`autopar.recipes.zero`).

    It has `shape`, `dtype`, `ndim`, `size` and `nbytes` of the array, takes part in its operators and methods, and
    `numpy.asarray` and `jax.numpy.asarray` give its numbers. `sharding`, `addressable_shards` and `devices()` are those
    of `stored`, the `jax.Array` that holds it with padding at the end. `jax.jit` takes no such object:
    `autopar.unpadded(tree)` gives ordinary arrays. Steps of autopar take it as it is.
    """

    __slots__ = ("__weakref__", "form", "stored")
    # NumPy's operators leave it to those of the right operand, as for a `jax.Array`.
    __array_priority__ = 100

    def __init__(self, stored: Any, form: PaddedForm) -> None:
        self.stored, self.form = stored, form

    @property
    def shape(self) -> tuple[int, ...]:
        return self.form.shape

    @property
    def dtype(self) -> Any:
        return self.stored.dtype

    @property
    def weak_type(self) -> bool:
        return bool(self.stored.weak_type)

    @property
    def ndim(self) -> int:
        return len(self.form.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.form.shape))

    @property
    def nbytes(self) -> int:
        return int(self.size * self.dtype.itemsize)

    @property
    def sharding(self) -> Any:
        return self.stored.sharding

    @property
    def addressable_shards(self) -> Any:
        return self.stored.addressable_shards

    @property
    def is_fully_addressable(self) -> bool:
        return bool(self.stored.is_fully_addressable)

    @property
    def is_fully_replicated(self) -> bool:
        return bool(self.stored.is_fully_replicated)

    def devices(self) -> Any:
        return self.stored.devices()

    def is_deleted(self) -> bool:
        return bool(self.stored.is_deleted())

    def delete(self) -> None:
        self.stored.delete()

    def block_until_ready(self) -> PaddedArray:
        self.stored.block_until_ready()
        return self

    def copy(self) -> PaddedArray:
        return PaddedArray(self.stored.copy(), self.form)

    def unpadded(self) -> jax.Array:
        """The array, on the same devices: split as far as they divide it, else whole on each."""
        if self.stored.sharding.memory_kind == HOST_MEMORY:
            return self._from_host_memory()
        return _alone(_unstoring(self.form, _even_sharding(self.form.shape, self.stored.sharding)), self.stored)

    def _from_host_memory(self) -> jax.Array:
        if not jax_compat.is_key_dtype(self.dtype):
            return jax.numpy.asarray(np.asarray(self))
        numbers = np.asarray(jax.random.key_data(self.stored))
        return jax_compat.key_of(_unstored_numbers(numbers, self.form), self.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(_unstored_numbers(np.asarray(self.stored), self.form), dtype=dtype)

    def __jax_array__(self) -> jax.Array:
        return self.unpadded()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in PaddedArray.__slots__ or not hasattr(jax_compat.ArrayImpl, name):
            raise AttributeError(f"'PaddedArray' object has no attribute {name!r}")
        return getattr(self.unpadded(), name)

    def __len__(self) -> int:
        return len(self.unpadded())

    def __iter__(self) -> Any:
        return iter(self.unpadded())

    def __getitem__(self, index: Any) -> Any:
        return self.unpadded()[index]

    def __bool__(self) -> bool:
        return bool(self.unpadded())  # as jax does: an error but for one element

    def __float__(self) -> float:
        return float(np.asarray(self))

    def __repr__(self) -> str:
        return f"PaddedArray({self.dtype}{list(self.shape)}, stored as {list(self.form.stored_shape)})"

    __hash__ = object.__hash__


_OPERATORS = (
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv", "mod", "rmod", "pow",
    "rpow", "matmul", "rmatmul", "neg", "pos", "abs", "eq", "ne", "lt", "le", "gt", "ge", "invert", "and", "or", "xor",
)  # fmt: skip


def _operator(name: str) -> Any:
    def computed(self: PaddedArray, *others: Any) -> Any:
        return getattr(self.unpadded(), name)(*(o.unpadded() if isinstance(o, PaddedArray) else o for o in others))

    computed.__name__ = name
    return computed


for _name in _OPERATORS:
    setattr(PaddedArray, f"__{_name}__", _operator(f"__{_name}__"))


def unpadded(tree: Any) -> Any:
    """A tree with ordinary arrays in place of every `PaddedArray`, on the same devices: split as far as these divide
    an array, else whole on each. For `jax.jit`, and for libraries that take nothing but a `jax.Array`.
    """
    return jax.tree.map(lambda leaf: leaf.unpadded() if isinstance(leaf, PaddedArray) else leaf, tree)


def stored_leaves(leaves: Sequence[Any], padded: Sequence[PaddedLeaf], shardings: Sequence[Any]) -> list[Any]:
    """The leaves of a call as a step stores them, in these shardings where they are padded here; no `PaddedArray` is
    left.
    """
    forms = {leaf.leaf: leaf.form for leaf in padded}
    return [
        _stored(leaf, forms[i], shardings[i])
        if i in forms
        else leaf.unpadded()
        if isinstance(leaf, PaddedArray)
        else leaf
        for i, leaf in enumerate(leaves)
    ]


def stored_as_they_are(leaves: Sequence[Any], padded: Sequence[PaddedLeaf]) -> list[Any] | None:
    """The leaves of a call that are stored as a step has them; None where one of those is not."""
    out = list(leaves)
    for at in padded:
        leaf = leaves[at.leaf]
        if not isinstance(leaf, PaddedArray) or leaf.form != at.form:
            return None
        out[at.leaf] = leaf.stored
    return out


def padded_results(results: Sequence[Any], padded: Sequence[PaddedLeaf], tied: dict[int, int]) -> Sequence[Any]:
    """The results of a step, in the shapes of its code."""
    if not padded:
        return results
    out = list(results)
    for at in padded:
        if at.leaf in tied:
            out[tied[at.leaf]] = PaddedArray(results[tied[at.leaf]], at.form)
    return out


def _stored(leaf: Any, form: PaddedForm, sharding: Any) -> Any:
    if isinstance(leaf, PaddedArray):
        if leaf.form == form:
            return leaf.stored
        leaf = leaf.unpadded()
    is_near = isinstance(leaf, jax.Array) and leaf.sharding.device_set == sharding.device_set
    if is_near and HOST_MEMORY not in (sharding.memory_kind, leaf.sharding.memory_kind):
        return _alone(_storing(form, sharding), leaf)
    padded = store_on_host(leaf, form)
    return jax.device_put(padded, sharding) if jax.process_count() == 1 else padded


def store_on_host(array: Any, form: PaddedForm) -> Any:
    """An array of the host's memory in its stored shape, padded with zeros; random keys are a `jax.Array` there too."""
    if jax_compat.is_key_dtype(array.dtype):
        numbers = np.asarray(jax.random.key_data(array))
        behind = numbers.shape[array.ndim :]
        return jax_compat.key_of(_stored_numbers(numbers.reshape(*form.flat_shape, *behind), form), array.dtype)
    return _stored_numbers(np.asarray(array).reshape(form.flat_shape), form)


def _stored_numbers(numbers: np.ndarray, form: PaddedForm) -> np.ndarray:
    """Numbers with the dimensions of what is stored, and behind them those of one element, padded with zeros."""
    behind = numbers.shape[len(form.flat_shape) :]
    if form.rows:
        parts = np.split(numbers, np.cumsum(form.rows)[:-1])
        numbers = np.concatenate([_padded_to(part, (form.rows_of_part, *part.shape[1:])) for part in parts])
    return _padded_to(numbers, (*form.stored_shape, *behind))


def _unstored_numbers(numbers: np.ndarray, form: PaddedForm) -> np.ndarray:
    """What `_stored_numbers` was given, in the array's own shape."""
    behind = numbers.shape[len(form.stored_shape) :]
    if form.rows:
        numbers = np.concatenate([numbers[i * form.rows_of_part :][:n] for i, n in enumerate(form.rows)])
    return numbers[tuple(slice(n) for n in form.flat_shape)].reshape(*form.shape, *behind)


def _padded_to(array: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    return np.pad(array, [(0, s - n) for n, s in zip(array.shape, shape, strict=True)])


@jax_compat.no_mesh_set()
def _alone(program: Any, array: Any) -> jax.Array:
    """Runs a program while no other one runs: programs that send may wait for one another on virtual devices."""
    with turn:
        result: jax.Array = jax.block_until_ready(program(jax.block_until_ready(array)))
        return result


@functools.cache
def _storing(form: PaddedForm, sharding: Any) -> Any:
    return jax.jit(lambda x: store(x, form), out_shardings=sharding)


@functools.cache
def _unstoring(form: PaddedForm, sharding: Any) -> Any:
    return jax.jit(lambda x: unstore(x, form), out_shardings=sharding)


def _even_sharding(shape: tuple[int, ...], sharding: Any) -> Any:
    """A sharding on the same mesh that splits a shape among as many devices as divide one of its dimensions."""
    assert isinstance(sharding, NamedSharding), "a step's results have named shardings"
    mesh, best = sharding.mesh, (1, PartitionSpec())
    for name, size in mesh.shape.items():
        for d, n in enumerate(shape):
            if n % size == 0 and size > best[0]:
                best = size, PartitionSpec(*(None,) * d, name)
    return NamedSharding(mesh, best[1])
