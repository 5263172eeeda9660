"""How long modules and functions are, and how many parameters functions take; each exception with its reason."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.test_imports import package_files, relative

MAX_MODULE_LINES = 900
MAX_FUNCTION_LINES = 60  # with its docstring
MAX_PARAMETERS = 8  # without self

_NUMBA = "compiled by numba, which takes arrays and no dataclasses"

LONG_MODULES: dict[str, str] = {}
LONG_FUNCTIONS = {
    "autopar/api.py:parallelize": "the public face: each option with its text",
    "autopar/recipes/parallelism.py:combine": "the public face: each option with its text",
    "solver/message_passing.py:bound": _NUMBA,
    "solver/stage_loops.py:labels": _NUMBA,
}
MANY_PARAMETERS = {
    "autopar/api.py:parallelize": "the public face: each option with its text",
    "autopar/recipes/parallelism.py:combine": "the public face: each option with its text",
    "solver/stage_loops.py:follow": _NUMBA,
    "solver/stage_loops.py:labels": _NUMBA,
    "solver/stage_loops.py:suffixes": _NUMBA,
}


def functions(path: Path) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """The functions and methods of a file, inner ones too, each named by its file: `autopar/api.py:parallelize`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield f"{relative(path)}:{node.name}", node


def num_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def num_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return len([a for a in named if a.arg not in ("self", "cls")]) + bool(arguments.vararg) + bool(arguments.kwarg)


def check_exceptions(found: dict[str, int], exceptions: dict[str, str], limit: int, what: str) -> None:
    over = {name: number for name, number in found.items() if number > limit and name not in exceptions}
    assert not over, f"more than {limit} {what}: {over}"
    stale = {name for name in exceptions if found.get(name, 0) <= limit}
    assert not stale, f"no more than {limit} {what}, so that they need no exception: {stale}"


def test_modules_are_short():
    found = {relative(path): path.read_text().count("\n") for path in package_files()}
    check_exceptions(found, LONG_MODULES, MAX_MODULE_LINES, "lines")


def test_functions_are_short():
    found: dict[str, int] = {}
    for path in package_files():
        for name, function in functions(path):
            found[name] = max(found.get(name, 0), num_lines(function))
    check_exceptions(found, LONG_FUNCTIONS, MAX_FUNCTION_LINES, "lines")


def test_functions_take_few_parameters():
    found: dict[str, int] = {}
    for path in package_files():
        for name, function in functions(path):
            found[name] = max(found.get(name, 0), num_parameters(function))
    check_exceptions(found, MANY_PARAMETERS, MAX_PARAMETERS, "parameters")


def test_the_counts_are_right():
    (function,) = ast.parse("def f(self, a, /, b, *c, d, **e):\n    pass\n").body
    assert isinstance(function, ast.FunctionDef)
    assert (num_lines(function), num_parameters(function)) == (2, 5)
