"""Steps named on the command line: `FILE:FUNCTION` or `MODULE:FUNCTION`, a function that returns a step and its
arguments, and what it is called with (`layers=48`); or `maxtext:FILE.yml`, a configuration of MaxText.

Also the train step of a MaxText configuration: `maxtext:base.yml` and `KEY=VALUE`, as on MaxText's own command line. It
is that of MaxText's ahead-of-time compilation (`train_compile`): its `train_step` and the shapes of state and batch; no
data, no weights, no accelerators.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import importlib
import importlib.util
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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


# The train step of a configuration of MaxText.

PREFIX = "maxtext:"
MODULES = (
    "flax.nnx",
    "flax.core.spmd",
    "maxtext.common.train_state_nnx",
    "maxtext.configs.pyconfig",
    "maxtext.optimizers.optimizers",
    "maxtext.trainers.pre_train.train",
    "maxtext.trainers.pre_train.train_compile",
    "maxtext.utils.maxtext_utils",
    "maxtext.utils.model_creation_utils",
    "maxtext.utils.sharding",
)
# What a configuration gets unless KEY=VALUE names it: no services, no files, one program; attention and the products of
# experts as jax has them, for which plans choose kernels. Megablox would be a loop of the Pallas interpreter.
DEFAULTS = {
    "run_name": "autopar",
    "base_output_directory": "maxtext_output",
    "skip_jax_distributed_system": True,
    "enable_checkpointing": False,
    "jax_cache_dir": "",
    "log_config": False,
    "dataset_type": "synthetic",
    "attention": "dot_product",
    "megablox": False,
}


def is_maxtext(name: str) -> bool:
    """Whether `FILE:FUNCTION` names a configuration of MaxText."""
    return name.startswith(PREFIX) and name.endswith((".yml", ".yaml"))


def maxtext_step(
    name: str,
    given: Sequence[str],
    num_devices: int,
    *,
    sharded: bool = False,
    arrays: bool = False,
    devices: Sequence[Any] | None = None,
) -> tuple[Callable[..., Any], Any, Any]:
    """The step of a configuration, its state and its batch.

    Args:
        name: `maxtext:base.yml`: a file, or one of those that come with MaxText.
        given: What is set in it, as `KEY=VALUE`.
        num_devices: Devices that `per_device_batch_size` counts for.
        sharded: Whether the step lies as the configuration's own axis rules say, on so many devices (`jax.jit` with
            shardings), or is a step for one device.
        arrays: Whether state and batch are arrays, initialised and synthetic, or their shapes.
        devices: Those to lie on: of this program, or such as compilers describe (`autopar.execute.aot.target_devices`).

    Raises: InvalidArgumentError where MaxText is not installed or refuses the configuration, and for too few devices.
    """
    modules = _modules(name)
    config = _config(modules, name, given, num_devices)
    mesh = _mesh(modules, name, config, num_devices if sharded else 1, devices or jax.devices())
    with _maxtext_errors(name, given):
        (state, batch), _, shardings, _, graph = modules.train_compile.get_shaped_inputs(mesh, config)
    of_parameters, shardings = modules.sharding.maybe_update_params_sharding_with_opt(config, shardings)
    of_state = modules.sharding.build_zero1_input_state_mesh_shardings(config, shardings, of_parameters)
    of_examples = functools.partial(_config_of_examples, config, len(batch["inputs"]))
    step = functools.partial(modules.train.train_step, graph)

    def train_step(state: Any, batch: Any) -> Any:
        own = of_examples(len(batch["inputs"]))
        with _mesh_set(mesh), modules.spmd.logical_axis_rules(config.logical_axis_rules):
            return step(own, of_state, of_parameters, state, batch)

    if sharded:
        of_batch = modules.sharding.get_input_data_sharding(config, mesh)
        inside, outside = (of_state, of_batch), (of_state, None)
        jitted = jax.jit(train_step, in_shardings=inside, out_shardings=outside, donate_argnums=0)
        return jitted, state, batch
    if arrays:
        return train_step, _initial_state(modules, config, mesh), modules.train.make_synthetic_batch(config, batch)
    return train_step, *jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (state, batch))


def _modules(name: str) -> SimpleNamespace:
    """MaxText's modules that make a step, by their last name. Raises: InvalidArgumentError where there are none."""
    try:
        return SimpleNamespace(**{module.rpartition(".")[2]: importlib.import_module(module) for module in MODULES})
    except ImportError as error:
        raise InvalidArgumentError(
            where=name, expected="MaxText and what it imports", got=str(error),
            hint="pip install 'autopar[maxtext]', on Python 3.12 or later",
        ) from error  # fmt: skip


def _mesh(modules: SimpleNamespace, name: str, config: Any, num_devices: int, devices: Sequence[Any]) -> Any:
    """The configuration's mesh over the first of these devices, of which one is enough for one device."""
    if num_devices == 1:
        axes = tuple(config.mesh_axes)
        kinds = (jax.sharding.AxisType.Auto,) * len(axes)
        return jax.sharding.Mesh(np.array(devices[:1]).reshape((1,) * len(axes)), axes, axis_types=kinds)
    if len(devices) < num_devices:
        raise InvalidArgumentError(
            where=name, expected=f"{num_devices} devices of this program, for the mesh", got=str(len(devices)),
            hint=f"XLA_FLAGS=--xla_force_host_platform_device_count={num_devices}",
        )  # fmt: skip
    return modules.maxtext_utils.get_mesh_from_config(config, devices[:num_devices])


def _initial_state(modules: SimpleNamespace, config: Any, mesh: Any) -> Any:
    """The state that training begins with, as MaxText initialises it."""
    nnx, made = modules.nnx, modules.model_creation_utils.create_nnx_abstract_model(config, mesh)
    schedule = modules.maxtext_utils.create_learning_rate_schedule(config)
    optimizer = modules.optimizers.get_optimizer(config, schedule, made[1], mesh=mesh)
    kind = nnx.LoRAParam if config.lora.enable_lora else nnx.Param

    @jax.jit
    def create() -> Any:
        with modules.spmd.logical_axis_rules(config.logical_axis_rules):
            model = made[0]()
            state = modules.train_state_nnx.TrainStateNNX(model, nnx.Optimizer(model, optimizer, wrt=kind))
        return nnx.split(state)[1]

    return create()


def _config(modules: SimpleNamespace, name: str, given: Sequence[str], num_devices: int) -> Any:
    """MaxText's configuration. Raises: InvalidArgumentError."""
    file = name.removeprefix(PREFIX)
    if not Path(file).is_file():
        file = str(Path(modules.pyconfig.__file__).parent / file)
    if not Path(file).is_file():
        raise InvalidArgumentError(
            where=name, expected="a configuration: a file, or one of MaxText's", got="no such file",
            hint="maxtext:base.yml, and model_name=... behind it",
        )  # fmt: skip
    counted = {"internal_compile": True, "internal_compile_num_devices": num_devices}
    own = [f"{key}={value}" for key, value in (DEFAULTS | counted).items()]
    with _maxtext_errors(name, given):
        return modules.pyconfig.initialize(["", file, *own, *given])


def _config_of_examples(config: Any, loaded: int, examples: int) -> Any:
    """The configuration as another `per_device_batch_size` has it: MaxText's step leaves out the examples beyond those
    that it is made for. Their share of the examples that are loaded stays.
    """
    own = copy.copy(config)
    for key in ("micro_batch_size_to_train_on", "global_batch_size_to_train_on"):
        object.__setattr__(own, key, getattr(config, key) * examples // loaded)  # it is read-only otherwise
    return own


@contextlib.contextmanager
def _maxtext_errors(name: str, given: Sequence[str]) -> Iterator[None]:
    """What MaxText does not take, which ends a program of its own, as an InvalidArgumentError."""
    try:
        yield
    except (Exception, SystemExit) as error:
        reason = error.__context__ if isinstance(error, SystemExit) else error
        raise InvalidArgumentError(
            where=" ".join([name, *given]), expected="a configuration that MaxText takes",
            got=f"{type(reason).__name__}: {reason}", hint="KEY=VALUE as on MaxText's own command line",
        ) from error  # fmt: skip


@contextlib.contextmanager
def _mesh_set(mesh: Any) -> Iterator[None]:
    """The mesh as MaxText's layers look for it, also while a step is traced, where `jax.set_mesh` is not allowed."""
    with contextlib.ExitStack() as contexts:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # `with mesh:`, by which MaxText's layers find it
            contexts.enter_context(mesh)
        contexts.enter_context(jax.sharding.use_abstract_mesh(mesh.abstract_mesh))
        yield
