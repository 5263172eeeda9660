"""Arguments with batches of other sizes: what `autopar.fit` plans for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from autopar.common.jax_compat import evaluated, variables_of
from autopar.errors import InvalidArgumentError
from autopar.frontend.static_leaves import set_apart

# By the number of an argument with examples, of each leaf the dimension that counts them; None: it has none.
Axes = Mapping[int, Sequence[int | None]]
HINT = (
    "name the arguments with examples (batch_argnums of parallelize) and their dimension (batch_axis), give dimensions "
    "of jax.export.symbolic_shape, or a function of the number of examples: lambda n: {...}"
)


def resized(args: Sequence[Any], axes: Axes, examples: int) -> list[Any]:
    """The arguments with batches of so many examples, as shapes.

    Symbolic dimensions, of whatever argument, are evaluated, their variable being the number of examples. A batch that
    is a function is called. Of a batch without either, the dimensions of examples are replaced.

    Raises: InvalidArgumentError for a number that the constraints of a symbolic dimension exclude.
    """
    names = variables(args)

    def resized_one(number: int, arg: Any) -> Any:
        if number in axes and callable(arg):
            return _shapes_of(arg, examples)
        if names:
            return jax.tree.map(at_size, arg) if variables([arg]) else arg
        if number not in axes:
            return arg
        leaves, tree = jax.tree.flatten(set_apart(arg))
        return jax.tree.unflatten(tree, map(with_examples, leaves, axes[number]))

    def with_examples(leaf: Any, dim: int | None) -> Any:
        if dim is None:
            return leaf
        return jax.ShapeDtypeStruct((*leaf.shape[:dim], examples, *leaf.shape[dim + 1 :]), leaf.dtype)

    def at_size(leaf: Any) -> Any:
        shape = getattr(leaf, "shape", ())
        if not variables_of(shape):
            return leaf
        try:
            sizes = evaluated(shape, dict.fromkeys(names, examples))
        except ValueError as error:
            raise InvalidArgumentError(
                where="autopar.fit",
                expected=f"batches for which {error} holds, as {_text(shape)} says",
                got=f"{examples} examples",
                hint="choose multiple=, or leave the constraint out: the sizes to be tried are not known before",
            ) from None
        return jax.ShapeDtypeStruct(sizes, leaf.dtype, weak_type=getattr(leaf, "weak_type", False))

    return [resized_one(number, arg) for number, arg in enumerate(args)]


def variables(args: Sequence[Any]) -> set[str]:
    """The variables of symbolic dimensions in arguments."""
    leaves = [leaf for arg in args for leaf in jax.tree.leaves(arg)]
    return {name for leaf in leaves for name in variables_of(getattr(leaf, "shape", ()))}


def check_batch(name: str, args: Sequence[Any], axes: Axes) -> None:
    """Raises: InvalidArgumentError for symbolic dimensions of several variables, and, where there are none, for a batch
    whose leaves do not have one number of examples.
    """
    names = variables(args)
    if len(names) > 1:
        raise InvalidArgumentError(
            where=f"autopar.fit({name}, ...)",
            expected="symbolic dimensions of one variable, the number of examples",
            got=f"{len(names)}, {', '.join(sorted(names))}",
            hint="write the other dimensions as numbers",
        )
    given = [args[i] for i in axes if i < len(args)]
    if names or (given and all(map(callable, given))):
        return
    arrays = [i for i in axes if i < len(args) and not callable(args[i])]
    dims = [(leaf, dim) for i in arrays for leaf, dim in zip(jax.tree.leaves(set_apart(args[i])), axes[i], strict=True)]
    sizes = {getattr(leaf, "shape", ())[dim : dim + 1] for leaf, dim in dims if dim is not None}
    if len(sizes) != 1 or sizes == {()}:
        raise InvalidArgumentError(
            where=f"autopar.fit({name}, ...)",
            expected="a batch whose arrays all have one number of examples, first or in the dimension of batch_axis",
            got=f"sizes {', '.join(str(size[0]) if size else 'none' for size in sizes) or 'of no array'}",
            hint=HINT,
        )


def _text(shape: Sequence[Any]) -> str:
    return f"({', '.join(map(str, shape))})"


def _shapes_of(function: Callable[[int], Any], examples: int) -> Any:
    """What a function gives for so many examples, as shapes; arrays that it makes take no memory."""
    made: list[Any] = []

    def arrays() -> list[Any]:
        made.append(set_apart(function(examples)))
        return [None if isinstance(leaf, jax.ShapeDtypeStruct) else leaf for leaf in jax.tree.leaves(made[-1])]

    shapes = jax.eval_shape(arrays)
    leaves, tree = jax.tree.flatten(made[-1])
    return jax.tree.unflatten(
        tree, [leaf if shape is None else shape for leaf, shape in zip(leaves, shapes, strict=True)]
    )
