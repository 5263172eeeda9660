"""A step compiled as the programs of a pipeline's tasks, each for the devices of its stage."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.common import jax_compat
from autopar.common.progress import Progress
from autopar.errors import UnsupportedError
from autopar.execute.step_leaves import (
    GlobalStep,
    LeafwiseStep,
    copied,
    has_aval,
    is_as_compiled,
    put,
    result_like,
    text_of_leaf,
)
from autopar.ir.graph import HOST
from autopar.ir.jax_sharding import named_sharding, submesh
from autopar.ir.rules import RuleBook
from autopar.ir.traced_step import TracedStep
from autopar.lowering.emit import Emitter
from autopar.lowering.instructions import Key, Stack
from autopar.plan.plan import Plan
from autopar.plan.schema import PlannedValue
from autopar.plan.summary import num_stages
from autopar.runtime.cross_mesh import End
from autopar.runtime.execute import Executor, in_flight_on
from autopar.runtime.program import Dataflow, Joined, Program, dataflow, work_of
from autopar.runtime.transfers import Crossing, crossing, is_here
from autopar.runtime.verify import verify_program
from autopar.search.inter_op.staged import StagedStep
from autopar.search.inter_op.tasks import (
    LoweredStage,
    StagedProgram,
    StageTask,
    groups_of_examples,
    layout_of,
    shape_of,
)
from autopar.search.materialize import make_staged, with_saved_names

# Lowers each task of a staged program, as a JAX function on global arrays, for the devices of its stage.

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
    """The lowered program of each chain of runs that is one: of those that do the same in other micro-batches, one."""
    groups, flow = groups_of_examples(stages), dataflow(program.pipeline, executed.num_microbatches)
    known: dict[Hashable, Any] = {}
    out: list[Any] = []
    for joined in executed.joined:
        mesh = meshes[program.tasks[joined.parts[0][0]].stage]
        work = work_of(joined, executed.pipeline)
        if work not in known:
            known[work] = None if mesh is None else _lower_chain(program, flow, joined, stages, mesh, groups, weak)
        out.append(known[work])
    return out


@jax_compat.no_mesh_set()
def _lower_chain(
    program: StagedProgram,
    flow: Dataflow,
    joined: Joined,
    stages: Sequence[LoweredStage],
    mesh: Mesh,
    groups: int,
    weak: Mapping[int, bool],
) -> Any:
    """Lowers one chain: the functions of its tasks, one after the other."""
    linked = [program.pipeline.tasks[number] for number, _ in joined.parts]
    tasks = [program.tasks[number] for number, _ in joined.parts]
    functions = [task_function(task, stages[task.stage], mesh, groups) for task in tasks]
    key_of: dict[int, tuple[LoweredStage, Key]] = {}
    for task, link in zip(tasks, linked, strict=True):
        keys = zip((*link.inputs, *link.outputs), (*task.inputs, *task.outputs), strict=True)
        key_of |= {b: (stages[task.stage], key) for b, key in keys}

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
        in_shardings=tuple(sharding_of(key_of[b][1], mesh) for b, _ in joined.reads),
        out_shardings=tuple(sharding_of(key_of[b][1], mesh) for b, _ in joined.makes),
        donate_argnums=joined.donated,
    )
    with contextlib.ExitStack() as types:
        for task in tasks:
            types.enter_context(_wide_types(stages[task.stage]))
        return jitted.lower(*(aval_of(*key_of[b]) for b, _ in joined.reads))


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


# Compiles the programs of a pipeline beside one another: XLA's compilers hold no lock of Python's.

# A compiler of a GPU or a TPU takes gigabytes for a large program.
MOST_AT_ONCE = 8


def compile_all(lowered: Sequence[Any | None], options: Sequence[Mapping[str, Any]], progress: Progress) -> list[Any]:
    """The executables of lowered programs, each under its options of XLA; None where there is none.

    One that stands several times is compiled once, under the options of the first.

    Raises: the error of the first that cannot be compiled, when those that were begun are done.
    """
    at_once = min(os.cpu_count() or 1, MOST_AT_ONCE)
    first_of: dict[int, int] = {}
    first = [first_of.setdefault(id(program), i) for i, program in enumerate(lowered)]
    programs = {i: lowered[i] for i in first_of.values() if lowered[i] is not None}
    with ThreadPoolExecutor(at_once, thread_name_prefix="autopar-compile") as threads:
        compiling = {i: threads.submit(jax_compat.compiled, x, dict(options[i])) for i, x in programs.items()}
        try:
            for done, future in enumerate(as_completed(compiling.values()), start=1):
                future.result()
                progress.at(f"compiled {done} of {len(programs)} programs")
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise
    return [compiling[i].result() if i in compiling else None for i in first]


# Leaves that are one array for the user and shards on the stages: split before a step, joined after it.
#
# Nothing is copied: the parts and the whole share the devices' buffers, and donation of a part deletes the whole.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageShardedLeaf:
    """One leaf: its shape and sharding over all its stages, and the sharding of the part on each of them."""

    path: str
    shape: tuple[int, ...]
    sharding: NamedSharding
    parts: tuple[NamedSharding, ...]

    @property
    def part_shape(self) -> tuple[int, ...]:
        return (self.shape[0] // len(self.parts), *self.shape[1:])

    def split(self, array: Any) -> list[jax.Array]:
        """The parts of an array. Raises: ValueError for another shape or sharding."""
        if not isinstance(array, jax.Array) or array.shape != self.shape or not self._has_sharding(array):
            raise ValueError(f"{self.path}: expected an array of shape {self.shape} on {self.sharding}")
        shards = {shard.device: shard.data for shard in array.addressable_shards}
        return [
            jax.make_array_from_single_device_arrays(
                self.part_shape, part, [shards[device] for device in part.mesh.devices.flat]
            )
            for part in self.parts
        ]

    def join(self, parts: Sequence[jax.Array]) -> jax.Array:
        """The inverse of `split`."""
        shards = [shard.data for part in parts for shard in part.addressable_shards]
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, shards)

    def _has_sharding(self, array: jax.Array) -> bool:
        return array.sharding == self.sharding or array.sharding.is_equivalent_to(self.sharding, len(self.shape))


@dataclasses.dataclass(frozen=True, slots=True)
class StageShardedLeaves:
    """All leaves of the arguments, or of the results, in order; None for leaves on a single stage."""

    leaves: tuple[StageShardedLeaf | None, ...]

    def split(self, leaves: Sequence[Any]) -> list[Any]:
        """Leaves and slices in order. Raises: ValueError."""
        out: list[Any] = []
        for leaf, sharded in zip(leaves, self.leaves, strict=True):
            out += [leaf] if sharded is None else sharded.split(leaf)
        return out

    def join(self, pieces: Sequence[Any]) -> list[Any]:
        """The inverse of `split`."""
        remaining = iter(pieces)
        return [
            next(remaining) if sharded is None else sharded.join([next(remaining) for _ in sharded.parts])
            for sharded in self.leaves
        ]


def stage_sharded_leaves(values: Sequence[PlannedValue], plan: Plan) -> StageShardedLeaves:
    """The leaves of a plan's arguments (without constants) or results."""
    return StageShardedLeaves(tuple(_stage_sharded_leaf(value, plan) if value.stages else None for value in values))


def _stage_sharded_leaf(value: PlannedValue, plan: Plan) -> StageShardedLeaf:
    meshes = [submesh(*plan.stage_mesh(stage)) for stage in value.stages]
    return StageShardedLeaf(
        path=value.path,
        shape=value.shape,
        sharding=plan.sharding_of(value),
        parts=tuple(named_sharding(value.layout, mesh, in_host=value.in_host) for mesh in meshes),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PassedOn:
    """A result that is an input of the pipeline as it is: of no task, so that it is laid out here.

    `replaces`: it is the new state in the place of that input; others are copies, which survive when the input is taken
    over by another step.
    """

    result: int
    argument: int
    sharding: NamedSharding
    weak: bool
    replaces: bool

    def of(self, value: Any) -> Any:
        """The result, of what the input is; that itself where it is the new state or on devices of other processes."""
        if value is None or not is_here(self.sharding) or (self.replaces and isinstance(value, jax.Array)):
            return value
        return jax_compat.with_weak_type(jax.device_put(copied(value), self.sharding), self.weak)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CompiledPipeline(LeafwiseStep):
    """A step compiled as the tasks of a pipeline.

    `leaf_shardings`: the sharding of each leaf of the dynamic arguments on the first stage that reads it; `donated`:
    the donated leaves; `copies`: (input of the pipeline, leaf of the arguments, sharding) for further stages that read
    a leaf; `sent`: inputs that are sent to further stages, which only arrays on devices are. `across` places arguments
    and results in a program of several processes; None in one process. A task without a device of this process has no
    executable. `stage_sharded`: the leaves of arguments and results where some are sharded over the stages; then slices
    are numbered in place of leaves.
    """

    refuses_late: ClassVar[bool] = True
    plan: Plan
    traced: TracedStep
    staged: StagedStep
    executables: tuple[Any, ...]
    executor: Executor
    leaf_shardings: tuple[NamedSharding, ...]
    donated: frozenset[int]
    leaf_of_input: tuple[int, ...]
    copies: tuple[tuple[int, int, NamedSharding], ...]
    fixed: tuple[tuple[int, Any], ...]
    literals: tuple[tuple[int, Any], ...]
    sent: tuple[tuple[int, NamedSharding], ...]
    passed_on: tuple[PassedOn, ...]
    stage_sharded: tuple[StageShardedLeaves, StageShardedLeaves] | None = None
    across: GlobalStep | None = None

    @property
    def own_constants(self) -> Sequence[Any]:
        return [constant for _, constant in self.fixed]

    def accepts(self, leaves: Sequence[Any], positions: Sequence[int]) -> bool:
        """As of `LeafwiseStep`: the first tasks take over the state before the last ones see their arguments, and some
        arguments are read by none.
        """
        if self.across is not None:
            return True  # it brings the leaves to their layouts
        avals, shardings = self.traced.in_avals, self.leaf_shardings
        return all(is_as_compiled(leaves[i], avals[i], shardings[i]) for i in positions)

    def placed(self, leaves: Sequence[Any]) -> list[Any]:
        """The leaves in their layouts, as `jax.jit` has them: arrays that are committed to others are refused.

        Raises: TypeError.
        """
        out = list(leaves)
        traced = self.traced
        of_leaves = zip(traced.in_avals, self.leaf_shardings, traced.in_paths, strict=True)
        for i, (aval, sharding, path) in enumerate(of_leaves):
            if is_as_compiled(out[i], aval, sharding):
                continue
            if not has_aval(out[i], aval) or getattr(out[i], "committed", False):
                raise TypeError(
                    f"compiled {traced.name}, {path}: expected {aval.dtype}{list(aval.shape)} in {sharding}, got "
                    f"{text_of_leaf(out[i])}"
                )
            out[i] = jax.device_put(out[i], sharding)
        return out

    def _run(self, leaves: Sequence[Any]) -> list[Any]:
        if self.stage_sharded is None:
            return self._run_in_one_process(leaves)
        arguments, results = self.stage_sharded
        return results.join(self._run_in_one_process(arguments.split(leaves)))

    def _run_in_one_process(self, leaves: Sequence[Any]) -> list[Any]:
        inputs = [leaves[i] if i >= 0 else None for i in self.leaf_of_input]
        if self.copies:
            copies = jax.device_put([leaves[leaf] for _, leaf, _ in self.copies], [s for _, _, s in self.copies])
            for (position, _, _), array in zip(self.copies, copies, strict=True):
                inputs[position] = array
        return self._run_on(inputs)

    def _run_across(self, leaves: Sequence[Any]) -> list[Any]:
        assert self.across is not None, "for programs of several processes"
        return self.across.results(self._run_on(self.across.arguments(leaves)))

    def _run_on(self, inputs: list[Any]) -> list[Any]:
        for position, constant in self.fixed:
            inputs[position] = constant
        for position, sharding in self.sent:
            if isinstance(inputs[position], (np.ndarray, np.generic, bool, int, float, complex)):
                inputs[position] = jax.device_put(inputs[position], sharding)
        results: list[Any] = [None] * len(self.staged.step.results)
        for position, array in zip(self.staged.staged.results, self.executor(inputs), strict=True):
            results[position] = array
        for position, literal in self.literals:
            results[position] = literal
        for passed in self.passed_on:
            results[passed.result] = passed.of(inputs[passed.argument])
        return results

    def ready(self) -> CompiledPipeline:
        """The same step with its constants on the devices."""
        shardings = _input_shardings(self.staged, self.plan)
        positions, constants = [p for p, _ in self.fixed], [c for _, c in self.fixed]
        fixed = put(constants, [shardings[p] for p in positions])
        return dataclasses.replace(self, fixed=tuple(zip(positions, fixed, strict=True)))

    def as_text(self) -> str:
        """The optimised programs of all tasks, one after the other."""
        return "\n\n".join(e.as_text() for e in self.executables if e is not None)


def build_pipeline(traced: TracedStep, plan: Plan, rules: RuleBook, progress: Progress) -> CompiledPipeline:
    """Compiles each task of a pipeline for the devices of its stage."""
    traced = with_saved_names(traced, plan)
    staged = make_staged(traced, plan, rules)
    program = staged.program()
    verify_program(program, staged.schedule)  # milliseconds, beside compiling
    stage_sharded = _stage_sharded(staged, plan)
    meshes = stage_meshes(plan)
    lowered = [p.lowered for p in staged.stages]
    local_meshes = [mesh if is_here(NamedSharding(mesh, PartitionSpec())) else None for mesh in meshes]
    weak = weak_results(staged, traced)
    device = meshes[0].devices.flat[0]
    options = [plan.compiler_options_on(device, exchanges=task.only_exchanges) for task in staged.staged.tasks] + [
        plan.compiler_options_on(device) for _ in program.joined
    ]
    programs = lower_tasks(staged.staged, lowered, local_meshes, weak)
    programs += lower_joined(staged.staged, program, lowered, local_meshes, weak)
    executables = compile_all(programs, options, progress)
    stages = [task.stage for task in staged.staged.tasks]
    stages += [stages[joined.parts[0][0]] for joined in program.joined]
    in_flight = [in_flight_on(list(meshes[stage].devices.flat)) for stage in stages]
    executor = Executor(program, executables, routes(staged, meshes), in_flight)
    num_constants = len(staged.graph.constants)
    shardings = _input_shardings(staged, plan)
    leaf_of_input, copies, fixed = [], [], []
    read_leaves: set[int] = set()
    for position, argument in enumerate(staged.staged.arguments):
        leaf = argument - num_constants
        if leaf < 0:
            fixed.append((position, staged.graph.constants[argument]))
            leaf_of_input.append(-1)
        elif leaf in read_leaves:
            copies.append((position, leaf, shardings[position]))
            leaf_of_input.append(-1)
        else:
            read_leaves.add(leaf)
            leaf_of_input.append(leaf)
    first = {leaf: shardings[i] for i, leaf in enumerate(leaf_of_input) if leaf >= 0}
    return CompiledPipeline(
        plan=plan,
        traced=traced,
        staged=staged,
        executables=tuple(executables),
        executor=executor,
        leaf_shardings=_leaf_shardings(staged, plan, first, stage_sharded),
        donated=frozenset(traced.tied),
        leaf_of_input=tuple(leaf_of_input),
        copies=tuple(copies),
        fixed=tuple(fixed),
        literals=_literals(staged, traced),
        sent=_sent(staged, shardings),
        passed_on=_passed_on(staged, traced, shardings),
        stage_sharded=stage_sharded,
        across=_across(traced, staged, plan, shardings) if jax.process_count() > 1 else None,
    )


def _literals(staged: StagedStep, traced: TracedStep) -> tuple[tuple[int, Any], ...]:
    """The results that are literals of the code, with their positions."""
    results = enumerate(zip(staged.graph.block.outputs, staged.step.results, strict=True))
    return tuple(
        (position, result_like(atom.literal.val, traced.out_avals[made.leaf]))
        for position, (atom, made) in results
        if not isinstance(atom, int)
    )


def _sent(staged: StagedStep, shardings: Sequence[NamedSharding]) -> tuple[tuple[int, NamedSharding], ...]:
    """The inputs of the pipeline that are sent between stages, with their shardings."""
    sources = {transfer.source for transfer in staged.staged.pipeline.transfers}
    inputs = zip(staged.staged.pipeline.inputs, shardings, strict=True)
    return tuple((position, sharding) for position, (b, sharding) in enumerate(inputs) if b in sources)


def _passed_on(staged: StagedStep, traced: TracedStep, shardings: Sequence[NamedSharding]) -> tuple[PassedOn, ...]:
    """The results that are inputs of the pipeline."""
    program, step, constants = staged.staged, staged.step, len(staged.graph.constants)
    position_of = {b: position for position, b in enumerate(program.pipeline.inputs)}
    found = []
    for result, b in zip(program.results, program.pipeline.outputs, strict=True):
        if b not in position_of:
            continue
        position, made = position_of[b], step.results[result]
        argument = program.arguments[position] - constants
        read = step.arguments[argument] if argument >= 0 else None
        replaces = read is not None and traced.tied.get(read.leaf) == made.leaf and read.part == made.part
        weak = bool(traced.out_avals[made.leaf].weak_type)
        found.append(
            PassedOn(result=result, argument=position, sharding=shardings[position], weak=weak, replaces=replaces)
        )
    return tuple(found)


def _stage_sharded(staged: StagedStep, plan: Plan) -> tuple[StageShardedLeaves, StageShardedLeaves] | None:
    """The leaves of arguments and results, where any is sharded over the stages.

    Raises: UnsupportedError with several processes.
    """
    step, record = staged.step, plan.record
    if step.parts == 1:
        return None
    arguments = stage_sharded_leaves(tuple(record.leaves.values()), plan)
    results = stage_sharded_leaves(record.results, plan)
    if jax.process_count() > 1:
        raise UnsupportedError(
            where=f"the scan over {step.trips} layers of {record.step}",
            expected="a pipeline in one process, where stages are cut out of a scan",
            got=f"{jax.process_count()} processes",
            hint="write the layers out in a Python loop, or use a plan of one stage",
        )
    return arguments, results


def _leaf_shardings(
    staged: StagedStep, plan: Plan, read: Mapping[int, NamedSharding], stage_sharded: Any
) -> tuple[NamedSharding, ...]:
    """The sharding of each leaf: of slices as one array, on the first stage that reads it, else as planned."""
    in_slices = dict(enumerate(stage_sharded[0].leaves)) if stage_sharded is not None else {}
    planned = [value for value in plan.record.arguments if value.kind != "constant"]
    out = []
    for i, piece in enumerate(staged.step.arguments):
        if piece.part == 0:
            sharded = in_slices.get(piece.leaf)
            whole = read[i] if i in read else plan.sharding_of(planned[piece.leaf])
            out.append(whole if sharded is None else sharded.sharding)
    return tuple(out)


def _across(traced: TracedStep, staged: StagedStep, plan: Plan, input_shardings: Sequence[NamedSharding]) -> GlobalStep:
    """The placement of arguments and results of a pipeline in a program of several processes."""
    program, meshes, constants = staged.staged, stage_meshes(plan), len(staged.graph.constants)
    result_shardings: list[NamedSharding | None] = [None] * len(traced.out_avals)
    for position, b in zip(program.results, program.pipeline.outputs, strict=True):
        result_shardings[position] = sharding_of(program.key_of[b], meshes[program.stage_of[b]])
    leaves = [max(argument - constants, -1) for argument in program.arguments]
    return GlobalStep(traced, list(zip(leaves, input_shardings, strict=True)), result_shardings)


def stage_meshes(plan: Plan) -> list[Mesh]:
    """The mesh of each stage, of this program's devices. Raises: NotEnoughDevicesError."""
    return [submesh(*plan.stage_mesh(stage)) for stage in range(num_stages(plan.record))]


def routes(staged: StagedStep, meshes: Sequence[Mesh]) -> list[Crossing]:
    """The route of each transfer between the meshes of stages."""
    program = staged.staged

    def aval(buffer: int) -> jax.ShapeDtypeStruct:
        value = staged.stages[program.stage_of[buffer]].stage.graph.values[program.key_of[buffer][0]]
        return jax_compat.struct(value.shape, value.dtype)

    def end(buffer: int) -> End:
        key, lowered = program.key_of[buffer], staged.stages[program.stage_of[buffer]].lowered
        mesh = meshes[program.stage_of[buffer]]
        return End(layout=layout_of(key), logical=lowered.mesh, mesh=mesh, sharding=sharding_of(key, mesh))

    def way(source: int, target: int) -> Crossing:
        value = aval(source)
        return crossing(value.shape, value.dtype, end(source), end(target))

    return [way(t.source, t.target) for t in program.pipeline.transfers]


def _input_shardings(staged: StagedStep, plan: Plan) -> list[NamedSharding]:
    """The sharding of each of the pipeline's inputs."""
    program, meshes = staged.staged, stage_meshes(plan)
    return [sharding_of(program.key_of[b], meshes[program.stage_of[b]]) for b in program.pipeline.inputs]


def weak_results(staged: StagedStep, traced: TracedStep) -> dict[int, bool]:
    """For each buffer that holds a result, or is sent to such a buffer, whether its type is weak."""
    program, pieces = staged.staged, staged.step.results
    weak = {
        b: bool(traced.out_avals[pieces[position].leaf].weak_type)
        for position, b in zip(program.results, program.pipeline.outputs, strict=True)
    }
    for transfer in reversed(program.pipeline.transfers):
        if transfer.target in weak:
            weak.setdefault(transfer.source, weak[transfer.target])
    return weak
