"""The name of a recipe: the call of its function, as a plan made under it prints it."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar

from autopar.plan.options import PlanRequest


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
