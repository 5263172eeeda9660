"""A recipe as a value, and the request of a plan that it makes."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar

from autopar.errors import InvalidArgumentError, expect_one_of
from autopar.plan.options import PlanRequest

# The name of a recipe: the call of its function, as a plan made under it prints it.


class _HasRequest(Protocol):
    @property
    def request(self) -> PlanRequest: ...


P = ParamSpec("P")
R = TypeVar("R", bound=_HasRequest)


def named(function: Callable[P, R]) -> Callable[P, R]:
    """Makes a function of recipes name what it returns after its call: `zero(1, size=8)`."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def of_name(*args: P.args, **kwargs: P.kwargs) -> R:
        made: Any = function(*args, **kwargs)
        name = f"{function.__name__}({', '.join(_arguments(signature, *args, **kwargs))})"
        return dataclasses.replace(made, request=dataclasses.replace(made.request, recipe=name))

    return of_name


def _arguments(signature: inspect.Signature, *args: Any, **kwargs: Any) -> list[str]:
    """The arguments that are not the defaults, as they are written in a call."""
    given = signature.bind(*args, **kwargs).arguments
    texts: list[str] = []
    for name, value in given.items():
        parameter = signature.parameters[name]
        if value == parameter.default:
            continue
        text = value.request.recipe if hasattr(value, "request") else repr(value)
        is_named = parameter.kind is inspect.Parameter.KEYWORD_ONLY or len(texts) < list(given).index(name)
        texts.append(f"{name}={text}" if is_named else text)
    return texts


# Checks of the arguments of recipes.


def check_zero_stage(where: str, stage: object) -> None:
    """Raises: InvalidArgumentError for what is no stage of ZeRO."""
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise InvalidArgumentError(
            where=where,
            expected="0, 1, 2 or 3",
            got=repr(stage),
            hint="0 keeps the whole state on every device",
        )


def check_gather(where: str, gather: object, stage: int, gathers: Sequence[str]) -> None:
    """Raises: InvalidArgumentError for a time to gather parameters that there is not, or not in this stage of ZeRO."""
    if gather not in gathers or (gather == "ahead" and stage == 0):
        raise InvalidArgumentError(
            where=where,
            expected=f"{' or '.join(map(repr, gathers))}, the second with zero=1, 2 or 3",
            got=f"{gather!r} with zero={stage}",
            hint="leave it out to gather after the update",
        )


def check_sequence(where: str, kind: object, kinds: Sequence[str]) -> None:
    """Raises: InvalidArgumentError for a way to split positions that is not one of the kinds."""
    expect_one_of(where, kind, kinds, "leave it out")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Constraints of a plan; the search chooses the rest. Made by the functions of `autopar.recipes`."""

    request: PlanRequest = dataclasses.field(default_factory=PlanRequest)
