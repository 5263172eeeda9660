"""Attributes computed on first access."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class lazy(Generic[T]):
    """An attribute that is worked out when it is first asked for, as `functools.cached_property` does it; that one
    takes a lock up to Python 3.11, which costs more than what is worked out here.
    """

    def __init__(self, work: Callable[[Any], T]) -> None:
        self.work, self.name, self.__doc__ = work, work.__name__, work.__doc__

    def __get__(self, instance: Any, owner: Any = None) -> T:
        value = instance.__dict__[self.name] = self.work(instance)
        return value
