"""A step compiled under its plan: one program over all devices, or the programs of a pipeline's tasks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.common import jax_compat
from autopar.compiler.materialize import make_function, make_staged
from autopar.errors import UnsupportedError
from autopar.executables.compile_tasks import compile_tasks, sharding_of
from autopar.executables.multiprocess import GlobalStep, naming_the_lost
from autopar.executables.stage_shards import StageShardedLeaves, seams_of
from autopar.frontend.callbacks import raise_failures
from autopar.inter_op.staged import StagedStep
from autopar.inter_op.tasks import layout_of
from autopar.ir.jax_sharding import check_host_memory, named_sharding, submesh
from autopar.ir.traced_step import TracedStep
from autopar.ir.value_state import HOST
from autopar.plan.plan import Plan
from autopar.plan.sharding_trees import shardings_in
from autopar.runtime.execution.cross_process import crossing, is_here
from autopar.runtime.execution.cut_shards import End
from autopar.runtime.execution.dispatch import InFlight, in_flight_on, smallest, turn
from autopar.runtime.execution.execute import Executor, Way
from autopar.runtime.execution.global_arrays import aval_of, from_whole
from autopar.runtime.execution.transfers import route
from autopar.runtime.pipeline.verify import verify_program
from autopar.sharding.rules import RuleBook


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A step compiled under a plan for one set of shapes.

    Everything inside is by leaf: user trees hold arrays only, since their constructors may compute on what they hold.
    `executable` takes the constants and the leaves of the dynamic arguments and gives the leaves of the results;
    `donated` are the leaves that it takes over. `across` brings arguments to the devices in a program of several
    processes, None in one process. `in_flight` counts what is handed out, where that is limited, by the result `noted`.
    `failures` is where callbacks leave what they raise; None where there are none.
    """

    plan: Plan
    traced: TracedStep
    executable: Any
    constants: tuple[Any, ...]
    constant_shardings: tuple[Any, ...]
    leaf_shardings: tuple[NamedSharding, ...]
    donated: frozenset[int]
    across: GlobalStep | None = None
    in_flight: InFlight | None = None
    noted: int | None = None
    failures: list[BaseException] | None = None

    @property
    def shardings(self) -> tuple[Any, ...]:
        """Of the dynamic arguments, in their structures. Raises: UnsupportedError where a node takes arrays only."""
        return shardings_in(self.traced.in_tree, self.leaf_shardings, f"compiled {self.traced.name}")

    def __call__(self, *args: Any) -> Any:
        return jax.tree.unflatten(self.traced.out_tree, self.run(leaves_of(self.traced, args)))

    def run(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """The leaves of the results, of the leaves of the dynamic arguments."""
        with turn:
            if self.across is None:
                return self._hand_out(leaves)
            return naming_the_lost(lambda: self._across_processes(leaves))

    def _across_processes(self, leaves: Sequence[Any]) -> Any:
        assert self.across is not None, "for programs of several processes"
        return self._hand_out(self.across.arguments(leaves))

    def _hand_out(self, leaves: Sequence[Any]) -> Any:
        results = self.executable(self.constants, *leaves)
        if self.in_flight is not None and self.noted is not None:
            self.in_flight.add(results[self.noted])
        if self.failures is not None:
            raise_failures(results, self.failures)
        return results

    def ready(self) -> Compiled:
        """The same with its constants on the devices."""
        return dataclasses.replace(self, constants=put(self.constants, self.constant_shardings))

    def as_text(self) -> str:
        """The optimised program."""
        return self.executable.as_text()

    def memory_analysis(self) -> Any:
        return self.executable.memory_analysis()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CompiledPipeline:
    """A step compiled as the tasks of a pipeline.

    `leaf_shardings` are those of the dynamic arguments' leaves on the first stage that reads them, `donated` the leaves
    that are taken over; `copies` are (input of the pipeline, leaf of the arguments, sharding) for what further stages
    read too. `across` brings arguments and results
    to their places in a program of several processes, None in one process; there a task of which this process has no
    device has no executable. `seams` are those of the arguments and of the results, where some lie in parts on the
    stages: what is numbered by leaves is then numbered by pieces.
    """

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
    seams: tuple[StageShardedLeaves, StageShardedLeaves] | None = None
    across: GlobalStep | None = None

    @property
    def shardings(self) -> tuple[Any, ...]:
        """Of the dynamic arguments, in their structures. Raises: UnsupportedError where a node takes arrays only."""
        return shardings_in(self.traced.in_tree, self.leaf_shardings, f"compiled {self.traced.name}")

    def __call__(self, *args: Any) -> Any:
        return jax.tree.unflatten(self.traced.out_tree, self.run(leaves_of(self.traced, args)))

    def run(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """The leaves of the results, of the leaves of the dynamic arguments."""
        with turn:
            if self.across is None:
                return self._run(leaves)
            return naming_the_lost(lambda: self._across_processes(leaves))

    def _run(self, leaves: Sequence[Any]) -> list[Any]:
        if self.seams is None:
            return self._run_in_one_process(leaves)
        arguments, results = self.seams
        return results.join(self._run_in_one_process(arguments.cut(leaves)))

    def _run_in_one_process(self, leaves: Sequence[Any]) -> list[Any]:
        inputs = [leaves[i] if i >= 0 else None for i in self.leaf_of_input]
        if self.copies:
            put = jax.device_put([leaves[leaf] for _, leaf, _ in self.copies], [s for _, _, s in self.copies])
            for (position, _, _), array in zip(self.copies, put, strict=True):
                inputs[position] = array
        return self._run_on(inputs)

    def _across_processes(self, leaves: Sequence[Any]) -> list[Any]:
        assert self.across is not None, "for programs of several processes"
        return self.across.results(self._run_on(self.across.arguments(leaves)))

    def _run_on(self, inputs: list[Any]) -> list[Any]:
        for position, constant in self.fixed:
            inputs[position] = constant
        results: list[Any] = [None] * len(self.staged.step.results)
        for position, array in zip(self.staged.staged.results, self.executor(inputs), strict=True):
            results[position] = array
        for position, literal in self.literals:
            results[position] = literal
        return results

    def ready(self) -> CompiledPipeline:
        """The same with its constants on the devices."""
        shardings = _input_shardings(self.staged, self.plan)
        positions, constants = [p for p, _ in self.fixed], [c for _, c in self.fixed]
        fixed = put(constants, [shardings[p] for p in positions])
        return dataclasses.replace(self, fixed=tuple(zip(positions, fixed, strict=True)))

    def as_text(self) -> str:
        """The optimised programs of all tasks, one after the other."""
        return "\n\n".join(e.as_text() for e in self.executables if e is not None)


def leaves_of(traced: TracedStep, args: tuple[Any, ...]) -> list[Any]:
    """The leaves of the dynamic arguments. Raises: TypeError for arguments of another structure."""
    leaves, tree = jax.tree.flatten(args)
    if tree != traced.in_tree:
        raise TypeError(f"expected arguments with the structure {traced.in_tree}, got {tree}")
    return leaves


@jax_compat.no_mesh_set()
def build(traced: TracedStep, plan: Plan, rules: RuleBook) -> Compiled | CompiledPipeline:
    """Emits, lowers and compiles a step under a plan for this program's devices.

    Raises: NotEnoughDevicesError, PlanMismatchError, UnsupportedError where the plan keeps state in the memory of the
    host and this program's devices cannot.
    """
    plan.check_devices()
    if plan.record.pipeline is not None:
        return build_pipeline(traced, plan, rules)
    return build_whole(traced, plan, plan.concrete_mesh(), rules)


def build_whole(traced: TracedStep, plan: Plan, mesh: Mesh, rules: RuleBook) -> Compiled:
    """Compiles a step as one program for the devices of a mesh.

    Raises: PlanMismatchError, UnsupportedError where the plan keeps state in the memory of the host and these devices
    cannot.
    """
    return lower_whole(traced, plan, mesh, rules).compile()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoweredWhole:
    """A step as one program that is not compiled yet."""

    plan: Plan
    traced: TracedStep
    lowered: Any
    mesh: Mesh
    constants: tuple[Any, ...]
    constant_shardings: tuple[Any, ...]
    leaf_shardings: tuple[NamedSharding, ...]
    result_shardings: Sequence[NamedSharding]
    failures: list[BaseException] | None

    def compile(self) -> Compiled:
        several = _processes(self.mesh) > 1
        reads = list(enumerate(self.leaf_shardings))
        not_state = set(range(len(self.traced.out_avals))) - set(self.traced.tied.values())
        return Compiled(
            plan=self.plan,
            traced=self.traced,
            executable=self.lowered.compile(),
            constants=self.constants,
            constant_shardings=self.constant_shardings,
            leaf_shardings=self.leaf_shardings,
            donated=frozenset(self.traced.tied),
            across=GlobalStep(self.traced, reads, self.result_shardings) if several else None,
            in_flight=in_flight_on(list(self.mesh.devices.flat)),
            noted=smallest(self.traced.out_avals, not_state),
            failures=self.failures,
        )


@jax_compat.no_mesh_set()
def lower_whole(traced: TracedStep, plan: Plan, mesh: Mesh, rules: RuleBook) -> LoweredWhole:
    """Lowers a step as one program for the devices of a mesh. Raises: what `build_whole` raises."""
    made = make_function(traced, plan, mesh, rules)
    if made.lowered.in_host:
        here = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
        check_host_memory(f"plan of {plan.record.step}", (here or list(mesh.devices.flat))[0])
    inputs = [named_sharding(layout, mesh, in_host=state == HOST) for layout, state in made.lowered.entries()]
    results = [named_sharding(v.layout, mesh, in_host=v.in_host) for v in plan.record.results]
    constants = tuple(inputs[: len(made.graph.constants)])
    arguments = tuple(inputs[len(constants) :])

    def step(constants: tuple[Any, ...], *leaves: Any) -> Any:
        results = made.function(*constants, *leaves)
        return [result_like(x, aval) for x, aval in zip(results, traced.out_avals, strict=True)]

    step.__name__ = traced.name
    jitted = jax.jit(
        step,
        in_shardings=(constants, *arguments),
        out_shardings=results,
        donate_argnums=tuple(i + 1 for i in sorted(traced.tied)),
    )
    shapes = tuple(jax_compat.shape_of(c) for c in made.graph.constants)
    return LoweredWhole(
        plan=plan,
        traced=traced,
        lowered=jitted.lower(shapes, *traced.in_avals),
        mesh=mesh,
        constants=made.graph.constants,
        constant_shardings=constants,
        leaf_shardings=arguments,
        result_shardings=results,
        failures=made.failures,
    )


def build_pipeline(traced: TracedStep, plan: Plan, rules: RuleBook) -> CompiledPipeline:
    """Compiles each task of a pipeline for the devices of its stage."""
    staged = make_staged(traced, plan, rules)
    program = staged.program()
    verify_program(program, staged.schedule)  # milliseconds, beside compiling
    seams = _seams(staged, plan)
    meshes = stage_meshes(staged)
    lowered = [p.lowered for p in staged.stages]
    here = [mesh if is_here(NamedSharding(mesh, PartitionSpec())) else None for mesh in meshes]
    executables = compile_tasks(staged.staged, lowered, here, weak_results(staged, traced))
    in_flight = [in_flight_on(list(meshes[task.stage].devices.flat)) for task in staged.staged.tasks]
    executor = Executor(program, executables, routes(staged, meshes), in_flight)
    num_constants = len(staged.graph.constants)
    shardings = _input_shardings(staged, plan)
    leaf_of_input, copies, fixed = [], [], []
    seen: set[int] = set()
    for position, argument in enumerate(staged.staged.arguments):
        leaf = argument - num_constants
        if leaf < 0:
            fixed.append((position, staged.graph.constants[argument]))
            leaf_of_input.append(-1)
        elif leaf in seen:
            copies.append((position, leaf, shardings[position]))
            leaf_of_input.append(-1)
        else:
            seen.add(leaf)
            leaf_of_input.append(leaf)
    first = {leaf: shardings[i] for i, leaf in enumerate(leaf_of_input) if leaf >= 0}
    unread = NamedSharding(meshes[0], PartitionSpec())
    in_parts = dict(enumerate(seams[0].leaves)) if seams is not None else {}
    per_leaf = [
        seam.sharding if (seam := in_parts.get(piece.leaf)) is not None else first.get(i, unread)
        for i, piece in enumerate(staged.step.arguments)
        if piece.part == 0
    ]
    literals = [
        (position, result_like(atom.literal.val, traced.out_avals[staged.step.results[position].leaf]))
        for position, atom in enumerate(staged.graph.block.outputs)
        if not isinstance(atom, int)
    ]
    return CompiledPipeline(
        plan=plan,
        traced=traced,
        staged=staged,
        executables=tuple(executables),
        executor=executor,
        leaf_shardings=tuple(per_leaf),
        donated=frozenset(traced.tied),
        leaf_of_input=tuple(leaf_of_input),
        copies=tuple(copies),
        fixed=tuple(fixed),
        literals=tuple(literals),
        seams=seams,
        across=_across(traced, staged, plan, shardings) if jax.process_count() > 1 else None,
    )


def _seams(staged: StagedStep, plan: Plan) -> tuple[StageShardedLeaves, StageShardedLeaves] | None:
    """Of arguments and results. Raises: UnsupportedError in a program of several processes."""
    cut, record = staged.step, plan.record
    num_constants = len(record.arguments) - len({piece.leaf for piece in cut.arguments})
    arguments = seams_of(record.arguments[num_constants:], cut.arguments, plan)
    results = seams_of(record.results, cut.results, plan)
    if arguments is None or results is None:
        return None
    if jax.process_count() > 1:
        raise UnsupportedError(
            where=f"the scan over {cut.trips} layers of {record.step}",
            expected="a pipeline in one process, where stages are cut out of a scan",
            got=f"{jax.process_count()} processes",
            hint="write the layers out in a Python loop, or use a plan of one stage",
        )
    return arguments, results


def _across(traced: TracedStep, staged: StagedStep, plan: Plan, input_shardings: Sequence[NamedSharding]) -> GlobalStep:
    """What a pipeline needs in a program of several processes."""
    program, meshes, constants = staged.staged, stage_meshes(staged), len(staged.graph.constants)
    made: list[NamedSharding | None] = [None] * len(traced.out_avals)
    for position, b in zip(program.results, program.pipeline.outputs, strict=True):
        made[position] = sharding_of(program.key_of[b], meshes[program.stage_of[b]])
    leaves = [max(argument - constants, -1) for argument in program.arguments]
    return GlobalStep(traced, list(zip(leaves, input_shardings, strict=True)), made)


def stage_meshes(staged: StagedStep) -> list[Mesh]:
    """The mesh of each stage, of this program's devices.

    Raises: NotEnoughDevicesError.
    """
    return [submesh(s.mesh, s.first_device) for s in staged.submeshes]


def routes(staged: StagedStep, meshes: Sequence[Mesh]) -> list[Way]:
    """The way of each transfer between the meshes."""
    program, here = staged.staged, jax.process_index()

    def aval(buffer: int) -> jax.ShapeDtypeStruct:
        value = staged.stages[program.stage_of[buffer]].stage.graph.values[program.key_of[buffer][0]]
        return jax_compat.struct(value.shape, value.dtype)

    def end(buffer: int) -> End:
        key, lowered = program.key_of[buffer], staged.stages[program.stage_of[buffer]].lowered
        mesh = meshes[program.stage_of[buffer]]
        return End(layout=layout_of(key), logical=lowered.mesh, mesh=mesh, sharding=sharding_of(key, mesh))

    def way(source: int, target: int) -> Way:
        value, ends = aval(source), (end(source), end(target))
        if all(d.process_index == here for e in ends for d in e.mesh.devices.flat):
            return route(value.shape, *ends)
        return crossing(value.shape, value.dtype, *ends)

    return [way(t.source, t.target) for t in program.pipeline.transfers]


def _input_shardings(staged: StagedStep, plan: Plan) -> list[NamedSharding]:
    """Of each of the pipeline's inputs."""
    program, meshes = staged.staged, stage_meshes(staged)
    return [sharding_of(program.key_of[b], meshes[program.stage_of[b]]) for b in program.pipeline.inputs]


def put(arrays: Sequence[Any], shardings: Sequence[NamedSharding]) -> tuple[Any, ...]:
    """Arrays that every process has, on the devices."""
    if jax.process_count() == 1:
        return tuple(jax.device_put(list(arrays), list(shardings)))
    return tuple(from_whole(a, aval_of(a), s) for a, s in zip(arrays, shardings, strict=True))


def _processes(mesh: Mesh) -> int:
    return len({d.process_index for d in mesh.devices.flat})


def result_like(value: Any, aval: jax.ShapeDtypeStruct) -> Any:
    """A result with the weak type that jax gives it; of a literal an array."""
    if not isinstance(value, jax.Array):
        value = jax.numpy.asarray(np.asarray(value), aval.dtype)
    return jax_compat.with_weak_type(value, bool(aval.weak_type))


def weak_results(staged: StagedStep, traced: TracedStep) -> dict[int, bool]:
    """Whether the type is weak, of each buffer of a pipeline that holds a result, and of what such a one is sent of."""
    program, pieces = staged.staged, staged.step.results
    found = {
        b: bool(traced.out_avals[pieces[position].leaf].weak_type)
        for position, b in zip(program.results, program.pipeline.outputs, strict=True)
    }
    for transfer in reversed(program.pipeline.transfers):
        if transfer.target in found:
            found.setdefault(transfer.source, found[transfer.target])
    return found
