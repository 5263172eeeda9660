"""Which module may import which: read from the files, so that an import inside a function counts too."""

import ast
import contextlib
import graphlib
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Packages of `autopar/`, lowest first; `""` is what lies at the top level, all but `__main__`. A package imports only
# those before it.
PACKAGES = (
    "common",
    "hardware",
    "ir",
    "ops",
    "frontend",
    "passes",
    "lowering",
    "plan",
    "cost",
    "solver",
    "runtime",
    "search",
    "execute",
    "recipes",
    "train",
    "",
    "__main__",
)
# Anyone may import these.
LEAVES = ("errors",)
# The same for packages within packages; `""` is what lies beside them.
INNER_PACKAGES = {
    "ops": ("kernels", "attention", ""),
    "search": ("intra_op", "inter_op", ""),
    "train": ("mixed_precision", "data", "checkpoint", "monitoring", "launch", ""),
}
# The same for the modules of solver/ and runtime/; `""` is the package itself.
INNER_MODULES = {
    "solver": (
        "problem",
        "stage_problem",
        "presolve",
        "message_passing",
        "solving",
        "stage_loops",
        "stage_search",
        "",
    ),
    "runtime": (
        "program",
        "schedule",
        "zero_bubble_schedules",
        "standard_schedules",
        "emit",
        "verify",
        "simulator",
        "cross_mesh",
        "transfers",
        "execute",
        "coordinator",
        "heartbeat",
        "agreement",
        "moves",
        "process_rows",
        "",
    ),
}

# Parts of jax that are private or differ between versions, and the files that may use them.
UNSTABLE_JAX = ("jax._src", "jax.core", "jax.experimental", "jax.extend", "jax.interpreters", "jaxlib")
JAX_COMPAT = tuple(f"autopar/common/jax_{part}.py" for part in ("compat", "distributed", "local"))
ALSO_ALLOWED = {
    "autopar/execute/aot.py": ("jax.experimental.topologies", "jax.experimental.mesh_utils"),
}


def package_files() -> list[Path]:
    """The package's own files by their real places: autopar/solver and autopar/runtime are links."""
    return sorted(p for folder in ("autopar", "solver", "runtime") for p in real_files(ROOT / folder))


def real_files(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            yield from real_files(path)
        elif path.suffix == ".py":
            yield path


def module_name(path: Path) -> str:
    """`autopar.solver.solving` of solver/solving.py, `autopar.ir.layout` of autopar/ir/layout.py; a package by its own
    name.
    """
    parts = path.relative_to(ROOT).with_suffix("").parts
    full = parts if parts[0] == "autopar" else ("autopar", *parts)
    return ".".join(full[:-1] if full[-1] == "__init__" and len(full) > 2 else full)


def imports(path: Path) -> set[str]:
    """Full names of all that a file imports; `from a import b` gives `a.b`, which may be a module or a name in it."""
    package = module_name(path).split(".") if path.name == "__init__.py" else module_name(path).split(".")[:-1]
    package = [part for part in package if part != "__init__"]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            found |= {f"{origin}.{alias.name}" for alias in node.names}
    return found


def own_imports(path: Path) -> set[str]:
    """Full names of what a file imports of the project, without leaves."""
    names = {name for name in imports(path) if name.split(".")[0] == "autopar"}
    return {name for name in names if "." in name and name.split(".")[1] not in LEAVES}


def package_of(name: str, packages: tuple[str, ...], depth: int) -> str:
    """Which of some packages a full name belongs to; its part number `depth` says so."""
    parts = name.split(".")
    return parts[depth] if len(parts) > depth and parts[depth] in packages else ""


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def is_within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def jax_names(path: Path) -> set[str]:
    """Parts of jax that a file imports or reaches as attributes: `jax.experimental.topologies`."""
    found = {name for name in imports(path) if is_within(name, ("jax", "jaxlib"))}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            found.add(ast.unparse(node))
    return {name for name in found if is_within(name, UNSTABLE_JAX)}


def test_every_package_has_a_row_and_says_what_it_is_for():
    folders = {path for path in (ROOT / "autopar").iterdir() if path.is_dir() and (path / "__init__.py").exists()}
    assert {path.name for path in folders} == set(PACKAGES) - {"", "__main__"}
    for path in folders:
        inner = {inner.parent.name for inner in path.glob("*/__init__.py")}
        assert inner == set(INNER_PACKAGES.get(path.name, ())) - {""}
        assert (path / "__init__.py").read_text().startswith('"""'), f"{relative(path)} has no docstring"


def test_every_module_of_solver_and_runtime_has_a_row():
    for top, modules in INNER_MODULES.items():
        assert {path.stem for path in real_files(ROOT / top)} - {"__init__"} == set(modules) - {""}


def upward_imports(path: Path, packages: tuple[str, ...], depth: int) -> set[str]:
    own = packages.index(package_of(module_name(path), packages, depth))
    prefix = module_name(path).split(".")[:depth]
    same_top = (name for name in own_imports(path) if name.split(".")[:depth] == prefix)
    return {name for name in same_top if packages.index(package_of(name, packages, depth)) > own}


@pytest.mark.parametrize("path", package_files(), ids=relative)
def test_imports_point_one_way(path):
    upwards = upward_imports(path, PACKAGES, 1)
    assert not upwards, f"{relative(path)} imports {upwards}, of packages that stand behind its own in PACKAGES"
    top = module_name(path).split(".")[1]
    inner = INNER_PACKAGES | INNER_MODULES
    if top in inner:
        upwards = upward_imports(path, inner[top], 2)
        assert not upwards, f"{relative(path)} imports {upwards}, of modules that stand behind its own"


def test_no_module_imports_itself_through_others():
    modules = {module_name(path) for path in package_files()}
    graph: dict[str, set[str]] = {}
    for path in package_files():
        found = graph.setdefault(module_name(path), set())
        for name in own_imports(path):
            found |= {name if name in modules else name.rpartition(".")[0]} & modules
        found.discard(module_name(path))
    order = list(graphlib.TopologicalSorter(graph).static_order())
    assert set(order) == modules


@pytest.mark.parametrize("path", sorted(real_files(ROOT / "solver")), ids=relative)
def test_the_solver_knows_neither_jax_nor_the_compiler(path):
    foreign = {
        name
        for name in imports(path)
        if is_within(name, ("jax", "jaxlib", "flax", "optax"))
        or (is_within(name, ("autopar",)) and not is_within(name, ("autopar.solver",)))
    }
    assert not foreign, f"{relative(path)} imports {foreign}"


@pytest.mark.parametrize("path", sorted(real_files(ROOT / "runtime")), ids=relative)
def test_the_runtime_does_not_know_the_solver(path):
    assert not {name for name in own_imports(path) if is_within(name, ("autopar.solver",))}


@pytest.mark.parametrize("path", package_files(), ids=relative)
def test_unstable_jax_stays_in_one_module(path):
    name = relative(path)
    allowed = (*UNSTABLE_JAX,) if name in JAX_COMPAT else ALSO_ALLOWED.get(name, ())
    used = {found for found in jax_names(path) if not is_within(found, allowed)}
    assert not used, f"{name} uses {used}: give it a stable face in {JAX_COMPAT[0]}"


@pytest.mark.cases(2)
@pytest.mark.parametrize("folder", ["autopar", "solver", "runtime", "examples", "benchmarks", "tests"])
def test_nobody_imports_the_folders_by_their_own_names(folder):
    for path in real_files(ROOT / folder):
        tops = {name.split(".")[0] for name in imports(path)}
        assert not tops & {"solver", "runtime"}, f"{relative(path)}: import autopar.solver or autopar.runtime"


def is_there(name: str) -> bool:
    """Whether a full name is a module or a name in one."""
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module(name)
        return True
    module, _, own = name.rpartition(".")
    return hasattr(importlib.import_module(module), own)


@pytest.mark.cases(2)
@pytest.mark.parametrize("folder", ["examples", "benchmarks"])
def test_names_that_are_imported_of_the_package_are_there(folder):
    """No other test imports the files whose packages are not installed."""
    for path in real_files(ROOT / folder):
        missing = [name for name in imports(path) if is_within(name, ("autopar",)) and not is_there(name)]
        assert not missing, f"{relative(path)} imports {missing}"


def test_the_reader_of_imports_sees_every_form(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / "solver").mkdir()
    file = tmp_path / "solver" / "a.py"
    file.write_text("import jax.numpy\nfrom . import b\nfrom .c import d\ndef f():\n    from autopar import mesh\n")
    assert imports(file) == {"jax.numpy", "autopar.solver.b", "autopar.solver.c.d", "autopar.mesh"}
    file.write_text("import jax\nx = jax.experimental.topologies.get\n")
    assert "jax.experimental.topologies.get" in jax_names(file)
