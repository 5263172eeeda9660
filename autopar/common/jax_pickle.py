"""Pickles of JAX's equations, for other processes on the same machine that read them and run none."""

from __future__ import annotations

import functools
import importlib
import io
import pickle
import sys
import types
from typing import Any

import jax
import numpy as np
from jax._src import core
from jax.extend import source_info_util

from autopar.common import jax_compat

# The packages whose functions another process finds by their names.
_IMPORTED = ("jax", "jaxlib", "numpy", "autopar", "ml_dtypes", "msgspec", "builtins")
# Those whose objects it may make: to import them runs nothing of the user's.
_KNOWN = frozenset(_IMPORTED) | sys.stdlib_module_names - {"__main__"}


class OnlyElsewhereError(BaseException):
    """A function was called that only the process has in which the step was traced: nothing may take that for an error
    of the function's own.
    """


class Absent:
    """Stands for a function that only the process has in which the step was traced."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise OnlyElsewhereError("a function of an equation is only in the process in which the step was traced")


def dumps(value: object) -> bytes:
    """A value with equations in it, in bytes that `pickle.loads` reads.

    Of an equation stay its primitive, its parameters and its variables. Left out are where it was written, functions in
    its parameters that another process cannot import, and the numbers of arrays on devices.

    Raises: what `pickle` raises, for parameters that it cannot write; PicklingError for objects of the user's classes,
        whose modules another process would have to run.
    """
    to = io.BytesIO()
    _Pickler(to, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return to.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, core.Primitive):
            return _primitive, (value.name, *_name_of(value))
        if isinstance(value, core.DebugInfo):
            return _no_debug_info, ()
        if isinstance(value, type(source_info_util.current())):
            return _no_source_info, ()
        if isinstance(value, jax_compat.ArrayImpl):
            return (np.array, (np.asarray(value),)) if value.size == 1 else (_shape, (value.shape, value.dtype))
        if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)) and not _is_imported(value):
            return Absent, ()
        made_by = value if isinstance(value, type) else type(value)
        if made_by.__module__.split(".")[0] not in _KNOWN:
            raise pickle.PicklingError(f"{made_by.__module__}.{made_by.__qualname__} is the user's")
        return NotImplemented


def _is_imported(function: Any) -> bool:
    """Whether another process finds a function by its name."""
    if not isinstance(function, types.FunctionType) or function.__module__.split(".")[0] not in _IMPORTED:
        return False
    found: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is function


@functools.lru_cache(1024)
def _name_of(primitive: Any) -> tuple[str, str]:
    """(module, name) by which a primitive is found; empty ones where it is nowhere."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in _IMPORTED:
            for attribute, value in list(vars(module).items()):
                if value is primitive:
                    return name, attribute
    return "", ""


def _primitive(name: str, module: str, attribute: str) -> Any:
    """The primitive of that name in this process; one that cannot be bound, where no module of ours has it."""
    return getattr(importlib.import_module(module), attribute) if module else core.Primitive(name)


def _shape(shape: tuple[int, ...], dtype: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def _no_debug_info() -> Any:
    return core.DebugInfo("a step", "another process", (), ())


def _no_source_info() -> Any:
    return source_info_util.new_source_info()
