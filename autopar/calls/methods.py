"""`parallelize` on methods: each instance has a step of its own, with `self` bound and not counted."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from autopar.frontend.tracing import name_of

_Made = TypeVar("_Made")


class OfInstances:
    """What is made once for each instance, by identity, and goes when the instance goes."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Any, Any]] = {}

    def get(self, instance: Any, make: Callable[[Callable[[], Any]], _Made]) -> _Made:
        """What `make` gives for a function that gives the instance, for which it must not keep anything else."""
        key = id(instance)
        if key not in self._made:
            try:
                reference: Any = weakref.ref(instance, lambda _: self._made.pop(key, None))
            except TypeError:  # an instance without weak references stays for good

                def reference() -> Any:
                    return instance

            self._made[key] = reference, make(reference)
        value: _Made = self._made[key][1]
        return value


def without_self(function: Callable[..., Any], instance: Callable[[], Any]) -> Callable[..., Any]:
    """A function with its first argument bound to what `instance()` gives."""

    @functools.wraps(function)
    def bound(*args: Any, **kwargs: Any) -> Any:
        owner = instance()
        if owner is None:
            raise ReferenceError(f"the instance whose method {name_of(function)} is traced is gone: keep it")
        return function(owner, *args, **kwargs)

    signature = inspect.signature(function)
    bound.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])  # type: ignore[attr-defined]
    del bound.__wrapped__
    return bound


def keeping(function: Callable[..., Any], instance: Any) -> Callable[..., Any]:
    """The same function, which keeps an instance."""

    @functools.wraps(function)
    def kept(*args: Any, _instance: Any = instance, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return kept
