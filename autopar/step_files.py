"""Steps named on the command line: `FILE:FUNCTION`, a function that returns a step and its arguments."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

from autopar.errors import InvalidArgumentError


def shapes_only(name: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The step that `FILE:FUNCTION` returns, and the shapes of its arguments: what the function makes takes no memory.

    Raises:
        InvalidArgumentError: As `returned_by`.
    """
    steps = []

    def arguments() -> tuple[Any, ...]:
        step, returned = returned_by(name)
        steps.append(step)
        return returned

    shapes = jax.eval_shape(arguments)
    return steps[0], shapes


def returned_by(name: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The step that `FILE:FUNCTION` returns, and its arguments.

    Raises:
        InvalidArgumentError: No such file or function, or one that returns something else.
    """
    path, _, function_name = name.rpartition(":")
    if not path or Path(name).is_file():
        raise InvalidArgumentError(
            where=name,
            expected="FILE:FUNCTION",
            got="a file without a function"
            if Path(name).is_file()
            else "no colon, which a function would stand behind",
            hint=f"name the function that returns (step, *arguments): {name}:FUNCTION",
        )
    if not Path(path).is_file():
        raise InvalidArgumentError(
            where=name,
            expected="FILE:FUNCTION with a Python file",
            got=f"no file {path!r}",
            hint="name it as examples/a.py:f",
        )
    function = getattr(_module(Path(path)), function_name, None)
    if not callable(function):
        raise InvalidArgumentError(
            where=path,
            expected=f"a function {function_name!r}",
            got="none of that name",
            hint="it takes no arguments and returns (step, *arguments)",
        )
    returned = function()
    if not (isinstance(returned, tuple) and len(returned) > 1 and callable(returned[0])):
        raise InvalidArgumentError(
            where=name,
            expected="a tuple of a step and its arguments",
            got=type(returned).__name__,
            hint="return train_step, state, batch",
        )
    return returned[0], returned[1:]


def _module(path: Path) -> ModuleType:
    """Runs a file as Python runs scripts: its folder is where it imports from first."""
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None, f"{path} is no Python file"
    assert specification.loader is not None, f"{path} cannot be loaded"
    module = importlib.util.module_from_spec(specification)
    sys.path.insert(0, str(path.parent.resolve()))
    sys.modules.setdefault(path.stem, module)
    specification.loader.exec_module(module)
    return module
