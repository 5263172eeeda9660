"""Steps named on the command line: `FILE:FUNCTION` or `MODULE:FUNCTION`, a function that returns a step and its
arguments, and what it is called with (`layers=48`); or `maxtext:FILE.yml`, a configuration of MaxText.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from autopar.command_line.maxtext_steps import is_maxtext, maxtext_step
from autopar.common import jax_compat
from autopar.errors import InvalidArgumentError
from autopar.frontend.jit_shardings import shardings_of_results
from autopar.frontend.static_leaves import set_apart
from autopar.frontend.tracing import name_of


def shapes_only(
    name: str, given: Sequence[str] = (), num_devices: int = 1, *, sharded: bool = False
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The step that `FILE:FUNCTION` returns, and the shapes of its arguments, with the shardings that the function
    gives to them: what it makes takes no memory.

    Args:
        name, given, num_devices: As of `returned_by`.
        sharded: Whether a configuration of MaxText is to lie as its own rules say.

    Raises:
        InvalidArgumentError: As `returned_by`.
    """
    if is_maxtext(name):
        step, state, batch = maxtext_step(name, given, num_devices, sharded=sharded)
        return step, (state, batch)
    made = []

    def arguments() -> list[Any]:
        step, returned = returned_by(name, given)
        leaves, structure = jax.tree.flatten(set_apart(returned))  # functions and text within them are no arrays
        made.append((step, structure, [None if isinstance(leaf, jax_compat.Tracer) else leaf for leaf in leaves]))
        return [_made(leaf) for leaf in leaves]

    closed, shapes = jax.make_jaxpr(arguments, return_shape=True)()
    step, structure, own = made[0]
    rows = zip(shapes, shardings_of_results(closed), own, strict=True)
    return step, jax.tree.unflatten(structure, [_with_sharding(*row) for row in rows])


def _made(leaf: Any) -> Any:
    """An array in place of a shape, which a function that is traced cannot return."""
    return jnp.empty(leaf.shape, leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf


def _with_sharding(shape: jax.ShapeDtypeStruct, sharding: Any, own: Any) -> jax.ShapeDtypeStruct:
    """A shape with the sharding that the function gives to it, or that of an array from outside of the function."""
    sharding = sharding or getattr(own, "sharding", None)
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return shape
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding, weak_type=shape.weak_type)


def devices_for_meshes(number: int) -> None:
    """Gives this program so many virtual CPU devices, where jax has looked for none yet: for the meshes of steps that
    are for other hardware. What is asked for in XLA_FLAGS stays.
    """
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    with contextlib.suppress(RuntimeError):  # the devices are known, and are what they are
        jax.config.update("jax_num_cpu_devices", number)


def returned_by(
    name: str, given: Sequence[str] = (), num_devices: int = 1
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The step that `FILE:FUNCTION` returns, and its arguments.

    Args:
        name: A file, or a module that can be imported, and a function in it; or a configuration of MaxText.
        given: Arguments of the function, as `NAME=VALUE`: a number, a text or another literal of Python, or with
            `@FILE:NAME` or `@MODULE:NAME` an object that stands there, such as a configuration.
        num_devices: Devices that a configuration's batch counts for.

    Raises:
        InvalidArgumentError: No such file or function, one that takes other arguments, or returns something else.
    """
    if is_maxtext(name):
        step, state, batch = maxtext_step(name, given, num_devices, arrays=True)
        return step, (state, batch)
    function = _function(name)
    returned = function(**_arguments(name, function, given))
    if not (isinstance(returned, tuple) and len(returned) > 1 and callable(returned[0])):
        raise InvalidArgumentError(
            where=name,
            expected="a tuple of a step and its arguments, one or more",
            got=_told(returned),
            hint="return train_step, state, batch",
        )
    step, arguments = returned[0], returned[1:]
    try:
        signature = inspect.signature(step)
    except ValueError:  # a builtin says so itself when it is called
        return step, arguments
    try:
        signature.bind(*arguments)
    except TypeError as error:
        called = f"{name_of(step)}({', '.join(signature.parameters)})"
        raise InvalidArgumentError(
            where=name,
            expected=f"a tuple of the step, which stands first, and every argument of {called}",
            got=f"{name_of(step)} and {len(arguments)} argument{'s' * (len(arguments) > 1)} ({error})",
            hint="return (train_step, *arguments), the arguments in the order of the step's parameters",
        ) from error
    return step, arguments


def _told(returned: Any) -> str:
    """What a function returned, in words."""
    if not isinstance(returned, tuple):
        return "None" if returned is None else f"a {type(returned).__name__}"
    if not returned:
        return "an empty tuple"
    if not callable(returned[0]):
        return f"a tuple whose first element ({type(returned[0]).__name__}) cannot be called"
    return f"a tuple of {name_of(returned[0])} alone"


def _function(name: str) -> Callable[..., Any]:
    path, _, function_name = name.rpartition(":")
    if not path or Path(name).is_file():
        raise InvalidArgumentError(
            where=name,
            expected="FILE:FUNCTION",
            got="a file, and no function in it" if Path(name).is_file() else "no colon with a function behind it",
            hint=f"name the function that returns (step, *arguments): {name}:FUNCTION",
        )
    function = getattr(_module(name, path), function_name, None)
    if not callable(function):
        raise InvalidArgumentError(
            where=path,
            expected=f"a function {function_name!r}",
            got="none of that name",
            hint="it returns (step, *arguments)",
        )
    return function


def _arguments(name: str, function: Callable[..., Any], given: Sequence[str]) -> dict[str, Any]:
    """The values of `NAME=VALUE`, as far as the function takes such names."""
    values = {}
    for text in given:
        argument, equals, value = text.partition("=")
        if not equals or not argument.isidentifier():
            raise InvalidArgumentError(
                where="--arg", expected="NAME=VALUE", got=repr(text), hint="such as --arg layers=48"
            )
        values[argument] = _value(value)
    try:
        signature = inspect.signature(function)
    except ValueError:  # a builtin says so itself when it is called
        return values
    try:
        signature.bind(**values)
    except TypeError as error:
        raise InvalidArgumentError(
            where=name, expected=f"arguments of {getattr(function, '__name__', 'the function')}{signature}",
            got=f"{' '.join(given) or 'none'} ({error})", hint="give each as --arg NAME=VALUE",
        ) from error  # fmt: skip
    return values


def _value(text: str) -> Any:
    if text.startswith("@"):
        path, _, name = text[1:].rpartition(":")
        module = _module(text, path)
        if not hasattr(module, name):
            raise InvalidArgumentError(
                where=f"--arg ...={text}", expected=f"an object {name!r} in {path}", got="none of that name",
                hint="name an object that is made where the module is imported",
            )  # fmt: skip
        return getattr(module, name)
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text  # as a shell has it: --arg dtype=bfloat16


def _module(where: str, path: str) -> ModuleType:
    """A file by its path, or a module by the name under which it is imported.

    Raises: InvalidArgumentError where there is neither.
    """
    if Path(path).is_file():
        return _module_of_file(Path(path))
    if all(part.isidentifier() for part in path.split(".")):
        if "" not in sys.path:  # as `python -m` has it
            sys.path.insert(0, "")
        try:
            return importlib.import_module(path)
        except ModuleNotFoundError as error:
            # One that the module itself imports is for its author to see.
            if error.name is None or not f"{path}.".startswith(f"{error.name}."):
                raise
    raise InvalidArgumentError(
        where=where,
        expected="FILE:FUNCTION with a Python file, or with a module that can be imported",
        got=f"no file {path!r}",
        hint="name it as examples/a.py:f, or package.module:f",
    )


def _module_of_file(path: Path) -> ModuleType:
    """Runs a file as Python runs scripts: its folder is where it imports from first."""
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None, f"{path} is no Python file"
    assert specification.loader is not None, f"{path} cannot be loaded"
    module = importlib.util.module_from_spec(specification)
    sys.path.insert(0, str(path.parent.resolve()))
    sys.modules.setdefault(path.stem, module)
    specification.loader.exec_module(module)
    return module
