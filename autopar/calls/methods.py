"""`parallelize` on methods: each instance has a step of its own, with `self` bound and not counted."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from autopar.frontend.tracing import name_of

_Value = TypeVar("_Value")


class PerInstance:
    """A value for each instance, by identity, dropped when the instance is collected."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[Any, Any]] = {}

    def get(self, instance: Any, make: Callable[[Callable[[], Any]], _Value]) -> _Value:
        """The value of an instance, made once by `make` of a weak accessor; it may keep no other reference."""
        key = id(instance)
        if key not in self._values:
            try:
                reference: Any = weakref.ref(instance, lambda _: self._values.pop(key, None))
            except TypeError:  # an instance without weak references stays for good

                def reference() -> Any:
                    return instance

            self._values[key] = reference, make(reference)
        value: _Value = self._values[key][1]
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
    # Functions have no such attribute by their type; `inspect` reads it.
    bound.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])  # type: ignore[attr-defined]
    return bound


def keep_instance_alive(function: Callable[..., Any], instance: Any) -> Callable[..., Any]:
    """The same function, with a reference to an instance."""

    @functools.wraps(function)
    def keeping(*args: Any, _instance: Any = instance, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return keeping
