"""The command line.

    autopar plan FILE:FUNCTION --cluster dgx-h100x16 --save plan.json
    autopar explain plan.json WHAT
    autopar diff plan.json other.json
    autopar verify FILE:FUNCTION --cluster tpu-v5e:2x4
    autopar tune FILE:FUNCTION --save plan.json
    autopar measure --save cluster.json

FUNCTION takes no arguments and returns a step and its arguments, `(train_step, state, batch)`. For absent hardware it
is traced, not run, so its state may exceed the memory of this machine.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

import autopar
from autopar.common.cache_dir import default_directory
from autopar.errors import AutoparError, InvalidArgumentError
from autopar.hardware import calibrate
from autopar.hardware.cluster import Cluster
from autopar.plan.plan import Plan
from autopar.step import on_cluster
from autopar.xla import aot


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status: 0, or 1 after an error that autopar has words for."""
    parsed = _parser().parse_args(arguments)
    try:
        text = str(parsed.command(parsed))
    except AutoparError as error:
        print(f"autopar: {error}", file=sys.stderr)
        return 1
    try:
        print(text, flush=True)
    except BrokenPipeError:  # whoever reads it (head, less) has read enough
        # What is left in the buffer would be written, and fail again, when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="autopar", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    plan = commands.add_parser("plan", help="plan a step for a cluster, here or not, and print the plan")
    plan.add_argument("function", metavar="FILE:FUNCTION", help="a function that returns (step, *arguments)")
    plan.add_argument(
        "--cluster", default="local", help="local, dgx-h100x16, tpu-v5e:2x4 or a .json file (%(default)s)"
    )
    plan.add_argument(
        "--memory-limit-bytes",
        metavar="SIZE",
        help="memory of one device that the step may use: 80GB, 16GiB or 1000000",
    )
    plan.add_argument("--save", metavar="PATH", help="write the plan as JSON")
    plan.set_defaults(command=_plan)

    explain = commands.add_parser("explain", help="why a module or an argument of a saved plan is split as it is")
    explain.add_argument("plan", metavar="PLAN.json")
    explain.add_argument(
        "what", metavar="WHAT", help="part of a module's or an argument's path, or a name as tables have it"
    )
    explain.set_defaults(command=lambda parsed: _load(parsed.plan).explain(parsed.what))

    diff = commands.add_parser("diff", help="what differs between two saved plans of a step")
    diff.add_argument("one", metavar="PLAN.json")
    diff.add_argument("other", metavar="OTHER.json")
    diff.set_defaults(command=lambda parsed: _load(parsed.one).diff(_load(parsed.other)))

    verify = commands.add_parser("verify", help="hold a step's plan against the program that XLA makes of it")
    verify.add_argument(
        "function", metavar="FILE:FUNCTION", help="as for plan; run for real where the cluster is local"
    )
    verify.add_argument(
        "--cluster", default="local", help="local, or tpu-v5e:2x4 or dgx-h100x2 to compile for it (%(default)s)"
    )
    verify.set_defaults(command=_verify)

    tune = commands.add_parser("tune", help="time the plans predicted to be the fastest on the devices here")
    tune.add_argument("function", metavar="FILE:FUNCTION", help="as for plan; run for real")
    tune.add_argument(
        "--cluster", default="local", help="what to plan for: local, local:4, or a .json file for these (%(default)s)"
    )
    tune.add_argument("--save", metavar="PATH", help="write the fastest plan as JSON")
    tune.set_defaults(command=_tune)

    measure = commands.add_parser(
        "measure", help="time the devices of this machine, so that plans for them count with what they really do"
    )
    measure.add_argument("--devices", type=int, metavar="N", help="the first N devices only")
    measure.add_argument("--save", metavar="PATH", help="write the cluster, for --cluster PATH, not to the cache")
    measure.set_defaults(command=_measure)
    return parser


def _plan(parsed: argparse.Namespace) -> Plan:
    cluster = Cluster.parse(parsed.cluster)
    step, arguments = shapes_only(parsed.function)
    plan = autopar.plan(step, *arguments, cluster=cluster, memory_limit_bytes=parsed.memory_limit_bytes)
    if parsed.save:
        plan.save(parsed.save)
    return plan


def _verify(parsed: argparse.Namespace) -> autopar.Verification:
    cluster = Cluster.parse(parsed.cluster)
    is_local = parsed.cluster.startswith("local")
    compile_for = None if is_local else aot.spec_of(cluster)
    if not is_local and compile_for is None:
        raise InvalidArgumentError(
            where="--cluster",
            expected="local, or hardware that there is a compiler for, such as tpu-v5e:2x4 or dgx-h100",
            got=parsed.cluster,
            hint="verify where the hardware is, with --cluster local",
        )
    step, arguments = returned_by(parsed.function) if is_local else shapes_only(parsed.function)
    return autopar.verify(_planned_for(step, cluster), *arguments, compile_for=compile_for)


def _tune(parsed: argparse.Namespace) -> autopar.Tuning:
    if not parsed.cluster.startswith("local") and not parsed.cluster.endswith(".json"):
        raise InvalidArgumentError(
            where="--cluster",
            expected="the devices here: local, local:4, or a .json file that was measured on them",
            got=parsed.cluster,
            hint="tune where the hardware is, or predict: autopar plan",
        )
    if parsed.save and not Path(parsed.save).absolute().parent.is_dir():
        raise InvalidArgumentError(
            where="--save", expected="a path in a folder that is there", got=parsed.save, hint="make the folder first"
        )
    cluster = Cluster.parse(parsed.cluster)
    step, arguments = returned_by(parsed.function)
    tuned = autopar.tune(_planned_for(step, cluster), *arguments)
    if parsed.save:
        tuned.plan.save(parsed.save)
    return tuned


def _planned_for(step: Callable[..., Any], cluster: Cluster) -> autopar.Step:
    """A step on a cluster: what `parallelize` made as it is, a plain function with its defaults."""
    parallel = step if isinstance(step, autopar.Step) else autopar.parallelize(step)
    assert isinstance(parallel, autopar.Step), "given a function, it makes a step"
    return on_cluster(parallel, cluster)


def _measure(parsed: argparse.Namespace) -> str:
    """Measures, and says what came out and where it lies."""
    measurement = calibrate.measure(parsed.devices)
    if parsed.save:
        Cluster.of_measurement(measurement, parsed.devices).save(parsed.save)
        return f"{measurement}\n\nSaved to {parsed.save}: plan for it with --cluster {parsed.save}"
    path = measurement.save()
    if path is None:
        directory = default_directory() or "the user's cache"
        return f"{measurement}\n\nNot saved: {directory} cannot be written (choose a file with --save)"
    return f"{measurement}\n\nSaved to {path}: Cluster.local() counts with it from now on"


def _load(path: str) -> Plan:
    if not Path(path).is_file():
        raise InvalidArgumentError(
            where=path, expected="a plan in a file", got="no such file", hint="make one with autopar plan ... --save"
        )
    return Plan.load(path)


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


if __name__ == "__main__":
    sys.exit(main())
