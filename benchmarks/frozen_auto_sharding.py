"""One step planned by XLA's own auto-sharding pass, in an environment where that still exists; a child of
`benchmarks.xla_auto_sharding`, which tells what for. Needs jax 0.10.0 with libtpu 0.0.40, and nothing of autopar.

    python -m benchmarks.frozen_auto_sharding STEP TOPOLOGY MESH SOLVER_TIMEOUT_S OUTPUT.json

`STEP` of `benchmarks.plain_steps`, such as `mlp v5e:2x4 2x4 600 out.json`. The output holds the compiled program's
text, its memory, and seconds (of the clock, of the processor): of compiling with the pass, and again with the shardings
that it chose for arguments and results, without it. The difference is about the time to decide.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from pathlib import Path

import jax
from jax.experimental import mesh_utils, topologies
from jax.experimental.pjit import AUTO
from jax.sharding import AxisType, Mesh

from benchmarks.plain_steps import STEPS

# Of the memory that the pass finds to be the least that a plan needs: at 1 it often finds no plan.
MEMORY_BUDGET_RATIO = 2.0


def now_s() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def since(begun: tuple[float, float]) -> tuple[float, float]:
    return time.perf_counter() - begun[0], time.process_time() - begun[1]


def compiled_with_pass(name: str, topology: str, axis_sizes: tuple[int, ...], solver_timeout_s: int) -> dict:
    """What the module's docstring says of the output."""
    case = STEPS[name]()
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    assert math.prod(axis_sizes) == len(devices), f"{topology} has {len(devices)} devices, the mesh {axis_sizes}"
    grid = mesh_utils.create_device_mesh(axis_sizes, list(devices), allow_split_physical_axes=True)
    names = tuple("xyz"[: len(axis_sizes)])
    mesh = Mesh(grid, names, axis_types=(AxisType.Auto,) * len(axis_sizes))
    options = {
        "xla_tpu_auto_spmd_partitioning_memory_budget_ratio": MEMORY_BUDGET_RATIO,
        "xla_tpu_auto_spmd_partitioning_solver_timeout_seconds": solver_timeout_s,
    }
    step = jax.jit(case.step, in_shardings=AUTO(mesh), out_shardings=AUTO(mesh), donate_argnums=(0, 1))
    lowered = step.lower(*case.args)
    begun = now_s()
    compiled = lowered.compile(compiler_options=options)
    with_pass_s = since(begun)
    text, stats = compiled.as_text(), compiled.memory_analysis()
    assert text is not None, "the TPU compiler gives its program"
    assert stats is not None, "and says what it allocates"
    inputs, _ = compiled.input_shardings
    given = jax.jit(
        case.step, in_shardings=inputs, out_shardings=compiled.output_shardings, donate_argnums=(0, 1)
    ).lower(*case.args)
    begun = now_s()
    given.compile()
    return {
        "text": text,
        "peak_bytes": stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes
        + stats.temp_size_in_bytes,
        "compile_with_pass_s": with_pass_s,
        "compile_without_pass_s": since(begun),
        "jax": jax.__version__,
    }


def main() -> None:
    library = os.environ.get("TPU_LIBRARY_PATH", "")
    # A later libtpu takes the same options and leaves everything unsplit.
    assert Path(library).is_relative_to(sys.prefix), f"expected this environment's libtpu, got {library!r}"
    name, topology, mesh, solver_timeout_s, output = sys.argv[1:]
    # The pass reads shardings as XLA used to write them, before Shardy.
    jax.config.update("jax_use_shardy_partitioner", False)
    found = compiled_with_pass(name, topology, tuple(map(int, mesh.split("x"))), int(solver_timeout_s))
    Path(output).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
