"""Lowers each task of a staged program, as a JAX function on global arrays, for the devices of its stage."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from autopar.common import jax_compat
from autopar.inter_op.tasks import LoweredStage, StagedProgram, StageTask, groups_of_examples, layout_of, shape_of
from autopar.ir.jax_sharding import named_sharding
from autopar.ir.value_state import HOST
from autopar.lowering.emit import Emitter
from autopar.lowering.instructions import Key, Stack
from autopar.runtime.pipeline.dataflow import Dataflow, dataflow
from autopar.runtime.pipeline.program import Joined, Program

_WIDE = frozenset({"int64", "uint64", "float64", "complex128"})


def lower_tasks(
    program: StagedProgram,
    stages: Sequence[LoweredStage],
    meshes: Sequence[Mesh | None],
    weak: Mapping[int, bool] | None = None,
) -> list[Any]:
    """The lowered program of each task; `meshes` are those of the stages, None for those on devices of other processes.

    `weak` tells, for buffers that hold results of the step, whether their types are weak.
    """
    groups = groups_of_examples(stages)
    out = []
    for number, task in enumerate(program.tasks):
        mesh, stage = meshes[task.stage], stages[task.stage]
        out.append(None if mesh is None else lower_task(program, number, stage, mesh, groups, weak or {}))
    return out


@jax_compat.no_mesh_set()
def lower_task(
    program: StagedProgram, number: int, stage: LoweredStage, mesh: Mesh, groups: int, weak: Mapping[int, bool]
) -> Any:
    """Lowers one task. Its arguments are flat, in the order of the task's inputs."""
    task, linked = program.tasks[number], program.pipeline.tasks[number]
    m = stage.stage.graph.num_microbatches

    def copies(buffer: int) -> int:
        return m if program.pipeline.buffers[buffer].repeats and not task.kind.repeats else 1

    inputs = [key for key, b in zip(task.inputs, linked.inputs, strict=True) for _ in range(copies(b))]
    outputs = [key for key, b in zip(task.outputs, linked.outputs, strict=True) for _ in range(copies(b))]
    avals = [aval_of(stage, key) for key in inputs]
    donated = {linked.inputs[i] for i in linked.donated}
    positions = [b for b in linked.inputs for _ in range(copies(b))]
    function = task_function(task, stage, mesh, groups)
    result_buffers = [b for b in linked.outputs for _ in range(copies(b))]

    def typed(*arrays: Any) -> tuple[Any, ...]:
        outs = zip(function(*arrays), result_buffers, strict=True)
        return tuple(jax_compat.with_weak_type(x, weak[b]) if b in weak else x for x, b in outs)

    typed.__name__ = function.__name__
    jitted = jax.jit(
        typed,
        in_shardings=tuple(sharding_of(key, mesh) for key in inputs),
        out_shardings=tuple(sharding_of(key, mesh) for key in outputs),
        donate_argnums=tuple(i for i, b in enumerate(positions) if b in donated),
    )
    with _wide_types(stage):
        return jitted.lower(*avals)


def lower_joined(
    program: StagedProgram,
    executed: Program,
    stages: Sequence[LoweredStage],
    meshes: Sequence[Mesh | None],
    weak: Mapping[int, bool],
) -> list[Any]:
    """The lowered program of each chain of runs that is one."""
    groups, flow = groups_of_examples(stages), dataflow(program.pipeline, executed.num_microbatches)
    out: list[Any] = []
    for joined in executed.joined:
        stage = program.tasks[joined.parts[0][0]].stage
        mesh = meshes[stage]
        if mesh is None:
            out.append(None)
            continue
        out.append(_lower_chain(program, flow, joined, stages[stage], mesh, groups, weak))
    return out


@jax_compat.no_mesh_set()
def _lower_chain(
    program: StagedProgram,
    flow: Dataflow,
    joined: Joined,
    stage: LoweredStage,
    mesh: Mesh,
    groups: int,
    weak: Mapping[int, bool],
) -> Any:
    """Lowers one chain: the functions of its tasks, one after the other."""
    linked = [program.pipeline.tasks[number] for number, _ in joined.parts]
    tasks = [program.tasks[number] for number, _ in joined.parts]
    functions = [task_function(task, stage, mesh, groups) for task in tasks]
    key_of: dict[int, Key] = {}
    for task, link in zip(tasks, linked, strict=True):
        key_of |= zip((*link.inputs, *link.outputs), (*task.inputs, *task.outputs), strict=True)

    def run(*arrays: Any) -> tuple[Any, ...]:
        held = dict(zip(joined.reads, arrays, strict=True))
        for (_, micro_batch), link, function in zip(joined.parts, linked, functions, strict=True):
            read, made = (
                [x for b in buffers for x in flow.instances(b, link, micro_batch)]
                for buffers in (link.inputs, link.outputs)
            )
            held.update(zip(made, function(*(held[x] for x in read)), strict=True))
        return tuple(jax_compat.with_weak_type(held[x], weak[x[0]]) if x[0] in weak else held[x] for x in joined.makes)

    run.__name__ = "_and_".join(function.__name__ for function in functions)
    jitted = jax.jit(
        run,
        in_shardings=tuple(sharding_of(key_of[b], mesh) for b, _ in joined.reads),
        out_shardings=tuple(sharding_of(key_of[b], mesh) for b, _ in joined.makes),
        donate_argnums=joined.donated,
    )
    with _wide_types(stage):
        return jitted.lower(*(aval_of(stage, key_of[b]) for b, _ in joined.reads))


def _wide_types(stage: LoweredStage) -> contextlib.AbstractContextManager[Any]:
    """Types of 64 bits while a task of this stage is lowered, where the step itself asks for them (`jax.enable_x64` in
    its code): what is lowered is made of jax.numpy calls too, which would cut them to 32.
    """
    is_wide = any(value.dtype in _WIDE for value in stage.stage.graph.values)
    return jax.enable_x64(True) if is_wide else contextlib.nullcontext()


def task_function(task: StageTask, stage: LoweredStage, mesh: Mesh, groups: int) -> Callable[..., tuple[Any, ...]]:
    """The function of a task on flat arrays; a value of all micro-batches is one array for each of them."""
    graph = stage.stage.graph
    emitter = Emitter(graph, mesh, groups)
    stacked = {(i.op.inputs[0], i.read) for i in task.instructions if isinstance(i, Stack) and i.read is not None}

    def function(*arrays: Any) -> tuple[Any, ...]:
        remaining = iter(arrays)
        env: dict[Key, Any] = {}
        for key in task.inputs:
            env[key] = [next(remaining) for _ in range(graph.num_microbatches)] if key in stacked else next(remaining)
        for key in task.zeros:
            shape = shape_of(graph, key, stage.mesh)
            env[key] = emitter.pin(jnp.zeros(shape, graph.values[key[0]].dtype), layout_of(key))
        for instruction in task.instructions:
            emitter.run(instruction, env)
        out: list[Any] = []
        for key in task.outputs:
            value = env[key]
            out += value if isinstance(value, list) else [value]
        return tuple(out)

    function.__name__ = task.name.replace(" ", "_")
    return function


def sharding_of(key: Key, mesh: Mesh) -> NamedSharding:
    return named_sharding(layout_of(key), mesh, in_host=key[1][1] == HOST)


def aval_of(stage: LoweredStage, key: Key) -> jax.ShapeDtypeStruct:
    value = stage.stage.graph.values[key[0]]
    return jax_compat.struct(shape_of(stage.stage.graph, key, stage.mesh), value.dtype, value.weak_type)
