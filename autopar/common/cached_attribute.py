"""Attributes computed on first access."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class lazy(Generic[T]):
    """An attribute computed on first access, without the lock of `functools.cached_property` before Python 3.12."""

    def __init__(self, work: Callable[[Any], T]) -> None:
        self.work, self.name, self.__doc__ = work, work.__name__, work.__doc__

    def __get__(self, instance: Any, owner: Any = None) -> T:
        value = instance.__dict__[self.name] = self.work(instance)
        return value
