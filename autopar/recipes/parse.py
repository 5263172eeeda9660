"""Recipes as text: `tensor_parallel(size=8)`, `cut(zero(1), stages=2)`, or by the names of other systems: `fsdp`."""

from __future__ import annotations

import ast
import difflib
import inspect
import re
from collections.abc import Sequence
from typing import Any

from autopar import recipes
from autopar.errors import InvalidArgumentError
from autopar.recipes.recipe import Recipe

NAMES = tuple(name for name in recipes.__all__ if name != "Recipe")
# The names that PyTorch, DeepSpeed and Megatron have for recipes, each with its first arguments here.
ALIASES: dict[str, tuple[str, tuple[Any, ...]]] = {
    "dp": ("data_parallel", ()),
    "ddp": ("data_parallel", ()),
    "fsdp": ("zero", (3,)),
    "zero1": ("zero", (1,)),
    "zero2": ("zero", (2,)),
    "zero3": ("zero", (3,)),
    "tp": ("tensor_parallel", ()),
    "sp": ("sequence_parallel", ()),
    "ep": ("expert_parallel", ()),
    "pp": ("pipeline", ()),
}


def recipe_of(text: str, others: Sequence[str] = ()) -> Recipe:
    """The recipe of a call of a function of `autopar.recipes` or of an alias, with literal arguments and recipes.

    A name alone is a call without arguments. Nothing else in the text is run. `others`: names that the caller takes as
    well, which a refusal lists. Raises: InvalidArgumentError.
    """
    try:
        value = _value(ast.parse(text.strip(), mode="eval").body)
    except InvalidArgumentError:
        raise  # the recipe's own, which names its argument
    except SyntaxError as error:
        raise _refused(text, "text that is neither a name nor a call", others) from error
    except (ValueError, TypeError) as error:
        raise _refused(text, str(error), others) from error
    if not isinstance(value, Recipe):
        raise _refused(text, "a value that is not a recipe", others)
    return value


def as_recipe(value: Any) -> Any:
    """A text as the recipe that it names, any other value as it is. Raises: InvalidArgumentError."""
    return recipe_of(value) if isinstance(value, str) else value


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and (node.id in NAMES or node.id in ALIASES):
        return _called(node.id, (), {})
    if isinstance(node, ast.Call):
        if not isinstance(node.func, ast.Name) or node.func.id not in (*NAMES, *ALIASES):
            raise ValueError(f"the unknown name {ast.unparse(node.func)!r}")
        if any(keyword.arg is None for keyword in node.keywords):
            raise ValueError("** is not taken")
        named = {str(keyword.arg): _value(keyword.value) for keyword in node.keywords}
        return _called(node.func.id, tuple(map(_value, node.args)), named)
    if isinstance(node, ast.Name):
        raise ValueError(f"the unknown name {node.id!r}")
    return ast.literal_eval(node)


def _called(name: str, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    function, first = ALIASES.get(name, (name, ()))
    return getattr(recipes, function)(*first, *args, **named)


def _refused(text: str, got: str, others: Sequence[str] = ()) -> InvalidArgumentError:
    assigned = re.fullmatch(r"\s*(\w+)\s*=\s*\d+\s*", text)
    if assigned and assigned[1] in inspect.signature(recipes.combine).parameters:
        meant = f"'combine({text.strip()})'? or"
    else:
        close = difflib.get_close_matches(text, (*others, *NAMES, *ALIASES), 1)
        meant = f"{close[0]!r}? or" if close else "such as 'fsdp',"
    return InvalidArgumentError(
        where=f"recipe {text!r}",
        expected=f"{''.join(f'{name!r}, ' for name in others)}a call of {', '.join(NAMES)}, or {', '.join(ALIASES)}",
        got=got,
        hint=f"{meant} 'tensor_parallel(size=8)' or 'cut(zero(1), stages=2, num_microbatches=8)'",
    )
