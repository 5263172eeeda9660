"""Leaves of arguments and results that are no arrays (functions, text): static, as under `eqx.filter_jit`.

A static leaf is part of the structure of its tree. So it is in the key of a call and in the tree of a traced step, and
no list of leaves has it.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

_NUMBERS = (bool, int, float, complex)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StaticLeaf:
    """A leaf as a node without children. A tree that is built from its structure has the value itself in its place."""

    value: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StaticLeaf) or type(self.value) is not type(other.value):
            return False  # 1, 1.0 and True are equal, and trace differently
        return self.value is other.value or bool(self.value == other.value)

    def __hash__(self) -> int:
        return hash(self.value)


jax.tree_util.register_pytree_node(StaticLeaf, lambda leaf: ((), leaf), lambda leaf, _: leaf.value)


def is_array_like(leaf: Any) -> bool:
    """Whether a leaf is an array, also of another library, a reference to one, a shape, or a number of numpy."""
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic)) or hasattr(leaf, "__jax_array__"):
        return True
    return (hasattr(leaf, "shape") and hasattr(leaf, "dtype")) or is_of_another_library(leaf)


def is_of_another_library(leaf: Any) -> bool:
    """Whether a leaf is an array that JAX does not take as it is."""
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic, type)):
        return False
    return hasattr(leaf, "__array__") or hasattr(leaf, "__dlpack__")


def set_apart(tree: Any, *, kept: tuple[type, ...] = ()) -> Any:
    """A tree with a `StaticLeaf` in place of each static leaf; the tree itself where it has none.

    Python's numbers are arrays, as under `jax.jit`, but for those in Equinox modules, whose layers branch on them.
    Leaves of the types `kept` stay everywhere. A leaf without a hash stays, and is refused where the step is traced. So
    does a sharding, which stands in place of an array.
    """
    equinox = sys.modules.get("equinox")
    modules: tuple[type, ...] = () if equinox is None else (equinox.Module,)

    def in_module(leaf: Any) -> Any:
        return StaticLeaf(leaf) if _is_static(leaf, kept) else leaf

    def outside(leaf: Any) -> Any:
        if modules and isinstance(leaf, modules):
            return _replaced(leaf, in_module, ())
        return StaticLeaf(leaf) if _is_static(leaf, (*_NUMBERS, *kept)) else leaf

    return _replaced(tree, outside, modules)


def _replaced(tree: Any, replacement: Callable[[Any], Any], nodes: tuple[type, ...]) -> Any:
    """A tree with its leaves, and its nodes of some types, replaced; itself where each is replaced by itself."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=lambda x: isinstance(x, (StaticLeaf, *nodes)))

    replaced = [replacement(leaf) for leaf in leaves]
    if all(a is b for a, b in zip(leaves, replaced, strict=True)):
        return tree
    return jax.tree.unflatten(structure, replaced)


def _is_static(leaf: Any, dynamic: tuple[type, ...]) -> bool:
    if isinstance(leaf, (StaticLeaf, jax.sharding.Sharding, *dynamic)) or is_array_like(leaf):
        return False
    try:
        hash(leaf)
    except TypeError:
        return False
    return True


def static_leaves(structure: Any) -> dict[str, Any]:
    """The static leaves of a tree's structure, by their paths."""
    place = object()
    tree = jax.tree.unflatten(structure, [place] * structure.num_leaves)
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves if leaf is not place}


def _with_static(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, StaticLeaf))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RawLeaves:
    """Where the static leaves of a call's arguments are among all their leaves: a call does not build its trees anew.

    `structure` is that of the arguments as they are passed, `static` the positions and values of static leaves.
    """

    structure: Any
    static: tuple[tuple[int, StaticLeaf], ...]

    @classmethod
    def of(cls, args: Sequence[Any]) -> RawLeaves:
        before = {id(leaf) for leaf in _with_static(tuple(args)) if isinstance(leaf, StaticLeaf)}
        leaves = [leaf for leaf in _with_static(set_apart(tuple(args))) if id(leaf) not in before]
        static = [(i, leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, StaticLeaf)]
        return cls(structure=jax.tree.structure(tuple(args)), static=tuple(static))

    def dynamic(self, leaves: Sequence[Any]) -> Sequence[Any] | None:
        """The leaves that are arrays, of arguments of this structure; None where a static one differs."""
        if not self.static:
            return leaves
        if any(StaticLeaf(leaves[i]) != leaf for i, leaf in self.static):
            return None
        positions = {i for i, _ in self.static}
        return [leaf for i, leaf in enumerate(leaves) if i not in positions]
