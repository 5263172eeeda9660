"""Keyword arguments and argument names of a step, mapped to positions by its function's signature."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax

from autopar.errors import InvalidArgumentError, expect_one_of

_NAMED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@jax.tree_util.register_static
class Omitted:
    """Placeholder for an argument left to its default in front of one that a call passes."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Omitted)

    def __hash__(self) -> int:
        return 0

    def __repr__(self) -> str:
        return "omitted"


OMITTED = Omitted()


class Signature:
    """The positions of a function's arguments: positional ones, then keyword-only ones, then a dictionary of the rest.

    Arguments that a call leaves out behind the last one that it gives have no place; one in between is `OMITTED`.
    """

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self._name = name
        try:
            self._signature = inspect.signature(function)
        except ValueError:  # some built-in functions have none
            self._signature = inspect.signature(lambda *args: None)
        parameters = list(self._signature.parameters.values())
        self._positional = [p.name for p in parameters if p.kind in _NAMED]
        self._keyword_only = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        self._rest = next((p.name for p in parameters if p.kind is p.VAR_KEYWORD), None)
        self._any_number = any(p.kind is p.VAR_POSITIONAL for p in parameters)
        self.names = [*self._positional, *self._keyword_only, *([self._rest] if self._rest else [])]

    def __str__(self) -> str:
        return f"({', '.join(self._signature.parameters)})"

    def most(self, num_args: int) -> int:
        """The most arguments that a call may pass, at least `num_args`."""
        return num_args if self._any_number else max(num_args, len(self.names))

    def from_first(self, number: int) -> int:
        """The number of a positional argument, of one that counts from the last as in `jax.jit`; others as they are."""
        most = len(self._positional)
        return number + most if not self._any_number and -most <= number < 0 else number

    def places(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """The arguments of a call in their places. Raises: TypeError as the function would, InvalidArgumentError."""
        if not kwargs:
            return tuple(args)
        by_name = dict(self._signature.bind(*args, **kwargs).arguments)
        if self._any_number:
            if any(name in self._keyword_only or name == self._rest for name in by_name):
                raise InvalidArgumentError(
                    where=self._name,
                    expected="arguments by position, where a function takes any number of them",
                    got=f"the keywords {', '.join(kwargs)}",
                    hint="bind the keyword arguments with functools.partial",
                )
            bound = self._signature.bind(*args, **kwargs)
            return bound.args
        placed = [by_name.get(name, OMITTED) for name in self.names]
        while placed and placed[-1] is OMITTED:
            placed.pop()
        return tuple(placed)

    def caller(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, to be called with arguments in their places."""

        @functools.wraps(function)
        def called(*places: Any) -> Any:
            return self._call(function, places)

        return called

    def _call(self, function: Callable[..., Any], places: Sequence[Any]) -> Any:
        if self._any_number:
            return function(*places)
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for i, (name, value) in enumerate(zip(self.names, places, strict=False)):
            if isinstance(value, Omitted):
                continue
            if name == self._rest:
                kwargs |= value
            elif name in self._keyword_only or len(args) < i:  # behind one that is left out
                kwargs[name] = value
            else:
                args.append(value)
        return function(*args, *places[len(self.names) :], **kwargs)

    def names_of(self, num_args: int) -> list[str]:
        """The names of so many arguments by position; those of `*args` have none."""
        named = self._positional[:num_args]
        return named + [""] * (num_args - len(named))

    def numbers(self, option: str, names: str | Sequence[str]) -> tuple[int, ...]:
        """The places of arguments, by name. Raises: InvalidArgumentError for a name that there is not."""
        names = (names,) if isinstance(names, str) else tuple(names)
        allowed_names = self._positional if self._any_number else self.names
        for name in names:
            where, expected = (
                f"parallelize({self._name}, {option}=...)",
                f"names of its arguments: {', '.join(allowed_names)}",
            )
            expect_one_of(where, name, allowed_names, "name them as in the function's signature", expected)
        return tuple(allowed_names.index(name) for name in names)
