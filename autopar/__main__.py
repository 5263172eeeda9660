"""The command line.

    autopar plan FILE:FUNCTION --cluster dgx-h100x16 --save plan.json
    autopar explain plan.json WHAT
    autopar diff plan.json other.json

FUNCTION takes no arguments and returns a step and its arguments, `(train_step, state, batch)`. It is traced, not run,
so that it may make a state that no memory here would hold.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

import autopar
from autopar.cluster import Cluster
from autopar.errors import AutoparError, InvalidArgumentError
from autopar.plan import Plan


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status: 0, or 1 after an error that autopar has words for."""
    parsed = _parser().parse_args(arguments)
    try:
        print(parsed.command(parsed))
    except AutoparError as error:
        print(f"autopar: {error}", file=sys.stderr)
        return 1
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
    plan.add_argument("--memory-limit-bytes", type=int, help="memory of one device that the step may use")
    plan.add_argument("--save", metavar="PATH", help="write the plan as JSON")
    plan.set_defaults(command=_plan)

    explain = commands.add_parser("explain", help="why a module or an argument of a saved plan is split as it is")
    explain.add_argument("plan", metavar="PLAN.json")
    explain.add_argument("what", metavar="WHAT", help="part of a module's or an argument's path")
    explain.set_defaults(command=lambda parsed: _load(parsed.plan).explain(parsed.what))

    diff = commands.add_parser("diff", help="what differs between two saved plans of a step")
    diff.add_argument("one", metavar="PLAN.json")
    diff.add_argument("other", metavar="OTHER.json")
    diff.set_defaults(command=lambda parsed: _load(parsed.one).diff(_load(parsed.other)))
    return parser


def _plan(parsed: argparse.Namespace) -> Plan:
    cluster = Cluster.parse(parsed.cluster)
    step, arguments = step_and_arguments(parsed.function)
    plan = autopar.plan(step, *arguments, cluster=cluster, memory_limit_bytes=parsed.memory_limit_bytes)
    if parsed.save:
        plan.save(parsed.save)
    return plan


def _load(path: str) -> Plan:
    if not Path(path).is_file():
        raise InvalidArgumentError(
            where=path, expected="a plan in a file", got="no such file", hint="make one with autopar plan ... --save"
        )
    return Plan.load(path)


def step_and_arguments(name: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The step that `FILE:FUNCTION` returns, and the shapes of its arguments.

    Raises:
        InvalidArgumentError: No such file or function, or one that returns something else.
    """
    path, _, function_name = name.rpartition(":")
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
    steps: list[Any] = []

    def arguments() -> tuple[Any, ...]:
        returned = function()
        if not (isinstance(returned, tuple) and len(returned) > 1 and callable(returned[0])):
            raise InvalidArgumentError(
                where=name,
                expected="a tuple of a step and its arguments",
                got=type(returned).__name__,
                hint="return train_step, state, batch",
            )
        steps.append(returned[0])
        return returned[1:]

    shapes = jax.eval_shape(arguments)  # traces: what the function makes takes no memory
    return steps[0], shapes


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
