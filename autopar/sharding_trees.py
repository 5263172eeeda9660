"""Shardings in the structure of a user's tree, for the public face only: inside, everything is lists of leaves.

The constructor of a user's node runs whenever a tree is put together. One that computes on what it holds, or checks it,
takes arrays and tracers but no shardings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from autopar.errors import UnsupportedError


def shardings_in(tree: Any, shardings: Sequence[Any], where: str) -> Any:
    """The shardings of a tree's leaves in the structure of the tree.

    Raises: UnsupportedError that names the class whose constructor does not take them as they are.
    """
    try:
        made = jax.tree.unflatten(tree, shardings)
        kept = jax.tree.leaves(made)
        if len(kept) == len(shardings) and all(a is b for a, b in zip(kept, shardings, strict=True)):
            return made
        cause: Exception | None = None
    except Exception as error:  # whatever a user's constructor raises
        cause = error
    refusing = _refusing(tree)
    raise UnsupportedError(
        where=where,
        expected="classes whose constructors take shardings in place of arrays",
        got=f"{refusing}, whose constructor " + (f"raises {cause!r:.120}" if cause is not None else "changes them"),
        hint="take plan.sharding(path) of each leaf, with the paths that the plan prints (plan.record.arguments), or "
        "device_put the leaves of jax.tree.leaves; step.init and calls of the step need no tree of shardings",
    ) from cause


def _refusing(tree: Any) -> str:
    """The innermost class of a tree that does not hold plain objects as they are."""
    for child in tree.children():
        if found := _refusing(child):
            return found
    markers = [object() for _ in range(tree.num_leaves)]
    try:
        kept = jax.tree.leaves(jax.tree.unflatten(tree, markers))
        refuses = len(kept) != len(markers) or any(a is not b for a, b in zip(kept, markers, strict=True))
    except Exception:
        refuses = True
    node = tree.node_data()
    return f"{node[0].__module__}.{node[0].__qualname__}" if refuses and node is not None else ""
