"""Arguments with batches of other sizes: what `autopar.fit` plans for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from autopar.common.jax_symbolic import evaluated, variables_of
from autopar.errors import InvalidArgumentError
from autopar.frontend.static_leaves import set_apart

HINT = (
    "name the arguments with examples (batch_argnums of parallelize), put the examples first, give dimensions of "
    "jax.export.symbolic_shape, or a function of the number of examples: lambda n: {...}"
)


def resized(args: Sequence[Any], argnums: Sequence[int], examples: int) -> list[Any]:
    """The arguments with batches of so many examples, as shapes.

    Symbolic dimensions, of whatever argument, are evaluated, their variable being the number of examples. A batch that
    is a function is called. Of a batch without either, first dimensions are replaced.

    Raises: InvalidArgumentError for a number that the constraints of a symbolic dimension exclude.
    """
    names = variables(args)

    def resized_one(number: int, arg: Any) -> Any:
        if number in argnums and callable(arg):
            return _shapes_of(arg, examples)
        if names:
            return jax.tree.map(at_size, arg) if variables([arg]) else arg
        return jax.tree.map(with_examples, set_apart(arg)) if number in argnums else arg

    def with_examples(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((examples, *leaf.shape[1:]), leaf.dtype)

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


def check_batch(name: str, args: Sequence[Any], argnums: Sequence[int]) -> None:
    """Raises: InvalidArgumentError for symbolic dimensions of several variables, and, where there are none, for a batch
    whose leaves do not have one number of examples first.
    """
    names = variables(args)
    if len(names) > 1:
        raise InvalidArgumentError(
            where=f"autopar.fit({name}, ...)",
            expected="symbolic dimensions of one variable, the number of examples",
            got=f"{len(names)}, {', '.join(sorted(names))}",
            hint="write the other dimensions as numbers",
        )
    given = [args[i] for i in argnums if i < len(args)]
    if names or (given and all(map(callable, given))):
        return
    leaves = [leaf for arg in given if not callable(arg) for leaf in jax.tree.leaves(set_apart(arg))]
    sizes = {getattr(leaf, "shape", ())[:1] for leaf in leaves}
    if len(sizes) != 1 or sizes == {()}:
        raise InvalidArgumentError(
            where=f"autopar.fit({name}, ...)",
            expected="a batch whose arrays all have the examples first",
            got=f"first dimensions {', '.join(str(size[0]) if size else 'none' for size in sizes) or 'of no array'}",
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
