"""The train step of a MaxText configuration: `maxtext:base.yml` and `KEY=VALUE`, as on MaxText's own command line.

What MaxText would compile ahead of time (`train_compile`): its `train_step` and the shapes of state and batch; no data,
no weights, no accelerators.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

from autopar.errors import InvalidArgumentError

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
        devices: Those to lie on: of this program, or such as compilers describe (`autopar.xla.aot.target_devices`).

    Raises: InvalidArgumentError where MaxText is not installed or refuses the configuration, and for too few devices.
    """
    modules = _modules(name)
    config = _config(modules, name, given, num_devices)
    mesh = _mesh(modules, name, config, num_devices if sharded else 1, devices or jax.devices())
    with _told(name, given):
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
    with _told(name, given):
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
def _told(name: str, given: Sequence[str]) -> Iterator[None]:
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
