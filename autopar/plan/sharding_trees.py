"""Shardings in the structure of a user's tree, for the public API only: internally, all values are lists of leaves.

The constructor of a user's node runs whenever a tree is rebuilt. A constructor that checks its leaves, or computes with
them, accepts arrays and tracers but no shardings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from autopar.errors import UnsupportedError
from autopar.frontend.static_leaves import set_apart


def shardings_in(tree: Any, shardings: Sequence[Any], where: str) -> Any:
    """The shardings of a tree's leaves in the structure of the tree.

    Raises: UnsupportedError that names the class whose constructor does not accept them.
    """
    holds, trees = _put_in(tree, shardings)
    if holds:
        return trees
    raise UnsupportedError(
        where=where,
        expected="classes whose constructors take shardings in place of arrays",
        got=f"{_refusing(tree, shardings)}, whose constructor takes arrays only",
        hint="take plan.sharding(path) of each leaf, with the paths that the plan prints (plan.record.arguments), or "
        "device_put the leaves of jax.tree.leaves; step.init and calls of the step need no tree of shardings",
    )


def _refusing(tree: Any, shardings: Sequence[Any]) -> str:
    """The innermost class of a tree that does not hold its shardings as they are."""
    first = 0
    for child in tree.children():
        if refusing := _refusing(child, shardings[first : first + child.num_leaves]):
            return refusing
        first += child.num_leaves
    node = tree.node_data()
    if node is None or _put_in(tree, shardings)[0]:
        return ""
    return f"{node[0].__module__}.{node[0].__qualname__}"


def _put_in(tree: Any, shardings: Sequence[Any]) -> tuple[bool, Any]:
    """(whether a tree holds shardings as they are, the tree with them)."""
    try:
        filled = jax.tree.unflatten(tree, shardings)
        leaves = jax.tree.leaves(set_apart(filled))
    except Exception:  # whatever a user's constructor raises
        return False, None
    return len(leaves) == len(shardings) and all(a is b for a, b in zip(leaves, shardings, strict=True)), filled
