"""Recipes as text, as the command line takes them: `tensor_parallel(size=8)`, `cut(zero(1), stages=2)`."""

from __future__ import annotations

import ast
from typing import Any

from autopar import recipes
from autopar.errors import InvalidArgumentError
from autopar.recipes.recipe import Recipe

NAMES = tuple(name for name in recipes.__all__ if name != "Recipe")


def recipe_of(text: str) -> Recipe:
    """The recipe of a call of a function of `autopar.recipes`, with literal arguments and recipes among them.

    Nothing else in the text is run. Raises: InvalidArgumentError.
    """
    try:
        value = _value(ast.parse(text.strip(), mode="eval").body)
    except InvalidArgumentError:
        raise  # the recipe's own, which names its argument
    except (SyntaxError, ValueError, TypeError) as error:
        raise _refused(text, str(error)) from error
    if not isinstance(value, Recipe):
        raise _refused(text, "no recipe")
    return value


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in NAMES:
        return getattr(recipes, node.id)()
    if isinstance(node, ast.Call):
        if not isinstance(node.func, ast.Name) or node.func.id not in NAMES:
            raise ValueError(f"no recipe {ast.unparse(node.func)!r}")
        if any(keyword.arg is None for keyword in node.keywords):
            raise ValueError("** is not taken")
        named = {str(keyword.arg): _value(keyword.value) for keyword in node.keywords}
        return getattr(recipes, node.func.id)(*map(_value, node.args), **named)
    return ast.literal_eval(node)


def _refused(text: str, got: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        where=f"recipe {text!r}",
        expected=f"a call of {', '.join(NAMES)}",
        got=got,
        hint="such as 'tensor_parallel(size=8)' or 'cut(zero(1), stages=2, num_microbatches=8)'",
    )
