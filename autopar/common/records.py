"""Frozen dataclasses of which passes make millions: `__init__` and `replaced` at a fraction of the usual cost.

The `__init__` of a frozen dataclass calls `object.__setattr__` with each field's name. Here fields are stored as plain
attributes of a class with the same slots that is not frozen, the class of the object until it is complete.

`lazy` is an attribute that is computed on first access.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")
_COPY = "_unfrozen_copy"


class lazy(Generic[T]):
    """An attribute computed on first access, without the lock of `functools.cached_property` before Python 3.12."""

    def __init__(self, work: Callable[[Any], T]) -> None:
        self.work, self.name, self.__doc__ = work, work.__name__, work.__doc__

    def __get__(self, instance: Any, owner: Any = None) -> T:
        value = instance.__dict__[self.name] = self.work(instance)
        return value


def made_often(cls: type[T]) -> type[T]:
    """Class decorator, over `@dataclasses.dataclass(frozen=True)`: the same class, whose objects are made faster.

    It cannot have subclasses. Raises: TypeError for a class with `default_factory`.
    """
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]  # a decorated class
    if any(f.default_factory is not dataclasses.MISSING for f in fields):
        raise TypeError(f"{cls.__name__} has fields that `made_often` does not make")
    slots = cls.__dict__.get("__slots__")
    unfrozen = type(cls.__name__, cls.__bases__, {"__slots__": tuple(slots)}) if slots is not None else None
    names: dict[str, Any] = {
        "frozen": cls,
        "unfrozen": unfrozen,
        "set_class": object.__dict__["__class__"].__set__,
        "new": object.__new__,
    }
    parameters: dict[bool, list[str]] = {False: [], True: []}
    for f in fields:
        if f.init:
            has_default = f.default is not dataclasses.MISSING
            names[f"default_{f.name}"] = f.default
            parameters[bool(f.kw_only)].append(f"{f.name}=default_{f.name}" if has_default else f.name)
    listed = ", ".join(["self", *parameters[False], *(["*", *parameters[True]] if parameters[True] else [])])
    given = [f.name for f in fields if f.init]
    if unfrozen is not None:
        lines = ["set_class(self, unfrozen)", *(f"self.{n} = {n}" for n in given), "self.__class__ = frozen"]
    else:
        lines = ["at = self.__dict__", *(f"at[{n!r}] = {n}" for n in given)]
    has_post_init = hasattr(cls, "__post_init__")
    if has_post_init:
        lines.append("self.__post_init__()")
    setattr(cls, "__init__", _function("__init__", listed, lines, names))  # noqa: B010
    setattr(cls, "__init_subclass__", classmethod(_refuse))  # noqa: B010
    if unfrozen is not None and not has_post_init:
        lines = ["copy = new(unfrozen)", *(f"copy.{n} = self.{n}" for n in given), "return copy"]
        setattr(cls, _COPY, _function(_COPY, "self", lines, names))
    return cls


def _refuse(cls: type, **keywords: Any) -> None:
    raise TypeError(f"{cls.__name__} would be made as an object of its base, which is `made_often`")


def _function(name: str, parameters: str, lines: list[str], names: dict[str, Any]) -> Callable[..., Any]:
    made: dict[str, Any] = {}
    exec(f"def {name}({parameters}):\n" + "".join(f"    {line}\n" for line in lines), names, made)
    function: Callable[..., Any] = made[name]
    return function


def replaced(record: T, **changes: Any) -> T:
    """`dataclasses.replace`; faster for objects of a class that is `made_often`. Raises: TypeError, AttributeError."""
    copy = getattr(record, _COPY, None)
    if copy is None:
        return dataclasses.replace(record, **changes)  # type: ignore[type-var]  # of a dataclass
    made = copy()
    for name, value in changes.items():
        setattr(made, name, value)
    made.__class__ = type(record)
    return made


class HashedById(enum.Enum):
    """An enum whose members are hashed by what they are: `Enum` hashes their names anew each time, in Python."""

    __hash__ = object.__hash__
