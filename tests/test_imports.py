"""Which module may import which: read from the files, so that an import inside a function counts too."""

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# A module imports modules of its own layer and of those that stand before it here.
LAYERS = ("vocabulary", "front end", "strategies and costs", "solver | runtime", "compiler", "face")
# Every module of the package, or sub-package. A new file is entered here.
LAYER_OF = {
    "algebra": "vocabulary",
    "axis_uses": "vocabulary",
    "cluster": "vocabulary",
    "constraints": "vocabulary",
    "collectives": "vocabulary",
    "deadlines": "vocabulary",
    "device_clock": "vocabulary",
    "errors": "vocabulary",
    "fitting": "vocabulary",
    "garbage": "vocabulary",
    "graph": "vocabulary",
    "hardware": "vocabulary",
    "hlo": "vocabulary",
    "hlo_loops": "vocabulary",
    "hlo_text": "vocabulary",
    "json_files": "vocabulary",
    "layout": "vocabulary",
    "lazy": "vocabulary",
    "local_devices": "vocabulary",
    "measurement": "vocabulary",
    "measuring": "vocabulary",
    "mesh": "vocabulary",
    "paths": "vocabulary",
    "plan": "vocabulary",
    "plan_checks": "vocabulary",
    "plan_file": "vocabulary",
    "plan_text": "vocabulary",
    "plan_timeline": "vocabulary",
    "progress": "vocabulary",
    "quantities": "vocabulary",
    "record": "vocabulary",
    "sharding_trees": "vocabulary",
    "specs": "vocabulary",
    "timeline": "vocabulary",
    "torus": "vocabulary",
    "tpu_slices": "vocabulary",
    "user_cache": "vocabulary",
    "value_state": "vocabulary",
    "traced_step": "vocabulary",
    "wires": "vocabulary",
    "alignment": "front end",
    "attention": "front end",
    "attention_checks": "front end",
    "attention_patterns": "front end",
    "attention_reading": "front end",
    "attention_sums": "front end",
    "batch_states": "front end",
    "building": "front end",
    "callbacks": "front end",
    "example_rules": "front end",
    "extrapolation": "front end",
    "grouped_convolutions": "front end",
    "jax_compat": "front end",
    "layer_assignment": "front end",
    "layer_kinds": "front end",
    "layers": "front end",
    "micro_batches": "front end",
    "partials": "front end",
    "pins": "front end",
    "placements": "front end",
    "recomputation": "front end",
    "rewriting": "front end",
    "rules": "front end",
    "scan_cutting": "front end",
    "stacked_layers": "front end",
    "stage_assignment": "front end",
    "stage_graphs": "front end",
    "contraction": "front end",
    "donation": "front end",
    "fingerprints": "front end",
    "purposes": "front end",
    "sinking": "front end",
    "staging": "front end",
    "assembly": "strategies and costs",
    "slack": "strategies and costs",
    "costs": "strategies and costs",
    "folding": "strategies and costs",
    "memory": "strategies and costs",
    "memory_fusion": "strategies and costs",
    "memory_steps": "strategies and costs",
    "resharding": "strategies and costs",
    "schedule_order": "strategies and costs",
    "strategies": "strategies and costs",
    "streams": "strategies and costs",
    "runtime": "solver | runtime",
    "solver": "solver | runtime",
    "alike": "compiler",
    "axis_roles": "compiler",
    "cache": "compiler",
    "compiled": "compiler",
    "compiler": "compiler",
    "elsewhere": "compiler",
    "elsewhere_gpu": "compiler",
    "elsewhere_tpu": "compiler",
    "decision_checks": "compiler",
    "distributed": "compiler",
    "emission": "compiler",
    "memory_refusals": "compiler",
    "global_step": "compiler",
    "intra_op": "compiler",
    "masks": "compiler",
    "recipe_notes": "compiler",
    "instructions": "compiler",
    "lowered": "compiler",
    "lowering": "compiler",
    "node_costs": "compiler",
    "offloading": "compiler",
    "overlap": "compiler",
    "pin_prices": "compiler",
    "memory_use": "compiler",
    "built_out": "compiler",
    "pipeline_search": "compiler",
    "search_space": "compiler",
    "asked_pipelines": "compiler",
    "pipelining": "compiler",
    "prediction": "compiler",
    "process_batches": "compiler",
    "seams": "compiler",
    "recording": "compiler",
    "stage_building": "compiler",
    "stage_costs": "compiler",
    "task_programs": "compiler",
    "tasks": "compiler",
    "whole_search": "compiler",
    "__init__": "face",
    "__main__": "face",
    "api": "face",
    "arguments": "face",
    "methods": "face",
    "nan_check": "face",
    "nnx_objects": "face",
    "signatures": "face",
    "fast_path": "face",
    "sharing_memory": "face",
    "short_batches": "compiler",
    "step": "face",
    "options": "front end",
    "decisions": "strategies and costs",
    "device_grids": "face",
    "constraining": "face",
    "recipes": "face",
    "tuning": "face",
    "verification": "face",
}

# Parts of jax that are private or differ between versions, and the files that may use them.
UNSTABLE_JAX = ("jax._src", "jax.core", "jax.experimental", "jax.extend", "jax.interpreters", "jaxlib")
JAX_COMPAT = "autopar/jax_compat.py"
ALSO_ALLOWED = {
    "autopar/elsewhere_gpu.py": ("jax.experimental.topologies",),
    "autopar/elsewhere_tpu.py": ("jax.experimental.topologies", "jax.experimental.mesh_utils"),
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
    """`autopar.solver.ilp` for solver/ilp.py, `autopar.mesh` for autopar/mesh.py; a package by its own name."""
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


def own_modules(path: Path) -> set[str]:
    """First part below `autopar` of what a file imports of the project: `mesh`, `solver`, `__init__`."""
    parts = [name.split(".") for name in imports(path) if name.split(".")[0] == "autopar"]
    known = {module_name(p).split(".")[1] for p in package_files()}
    return {name[1] if len(name) > 1 and name[1] in known else "__init__" for name in parts}


def part_of(path: Path) -> str:
    return module_name(path).split(".")[1]


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


@pytest.mark.parametrize("path", package_files(), ids=relative)
def test_every_module_has_a_layer(path):
    assert part_of(path) in LAYER_OF, f"enter {part_of(path)} into LAYER_OF of tests/test_imports.py"


def test_every_layer_is_of_a_module_that_is_there():
    assert set(LAYER_OF) == {part_of(path) for path in package_files()}
    assert set(LAYER_OF.values()) <= set(LAYERS)


@pytest.mark.parametrize("path", [p for p in package_files() if part_of(p) in LAYER_OF], ids=relative)
def test_imports_point_one_way(path):
    own = LAYER_OF[part_of(path)]
    above = LAYERS[LAYERS.index(own) + 1 :]
    upwards = {name for name in own_modules(path) if LAYER_OF.get(name) in above}
    assert not upwards, f"{relative(path)} ({own}) imports {upwards}, which stand above it"


def test_no_module_imports_itself_through_others():
    graph: dict[str, set[str]] = {}
    for path in package_files():
        graph.setdefault(part_of(path), set()).update(own_modules(path) - {part_of(path)})
    order = list(graphlib.TopologicalSorter(graph).static_order())
    assert set(order) >= set(graph)


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
    assert "solver" not in own_modules(path)


@pytest.mark.parametrize("path", package_files(), ids=relative)
def test_unstable_jax_stays_in_one_module(path):
    name = relative(path)
    allowed = (*UNSTABLE_JAX,) if name == JAX_COMPAT else ALSO_ALLOWED.get(name, ())
    used = {found for found in jax_names(path) if not is_within(found, allowed)}
    assert not used, f"{name} uses {used}: give it a stable face in {JAX_COMPAT}"


@pytest.mark.parametrize("folder", ["autopar", "solver", "runtime", "examples", "benchmarks", "tests"])
def test_nobody_imports_the_folders_by_their_own_names(folder):
    for path in real_files(ROOT / folder):
        tops = {name.split(".")[0] for name in imports(path)}
        assert not tops & {"solver", "runtime"}, f"{relative(path)}: import autopar.solver or autopar.runtime"


def test_the_reader_of_imports_sees_every_form(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / "solver").mkdir()
    file = tmp_path / "solver" / "a.py"
    file.write_text("import jax.numpy\nfrom . import b\nfrom .c import d\ndef f():\n    from autopar import mesh\n")
    assert imports(file) == {"jax.numpy", "autopar.solver.b", "autopar.solver.c.d", "autopar.mesh"}
    file.write_text("import jax\nx = jax.experimental.topologies.get\n")
    assert "jax.experimental.topologies.get" in jax_names(file)
