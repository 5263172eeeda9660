"""A step compiled under its plan: one program over all devices, or the programs of a pipeline's tasks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from autopar import jax_compat
from autopar.compiler import make_function, make_staged
from autopar.pipelining import Staged
from autopar.plan import Plan
from autopar.rules import RuleBook
from autopar.runtime.execution import Executor
from autopar.runtime.transfers import End, Route, route
from autopar.specs import named_sharding, submesh
from autopar.staging import TracedStep
from autopar.task_programs import compile_tasks, sharding_of
from autopar.tasks import layout_of


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A step compiled under a plan for one set of shapes. `executable` takes the dynamic arguments and constants."""

    plan: Plan
    traced: TracedStep
    executable: Any
    constants: tuple[Any, ...]
    constant_shardings: tuple[Any, ...]
    shardings: tuple[Any, ...]
    donated: frozenset[int]

    def __call__(self, *args: Any) -> Any:
        return self.executable(self.constants, *args)

    def ready(self) -> Compiled:
        """The same with its constants on the devices."""
        return dataclasses.replace(self, constants=jax.device_put(self.constants, self.constant_shardings))

    def as_text(self) -> str:
        """The optimised program."""
        return self.executable.as_text()

    def memory_analysis(self) -> Any:
        return self.executable.memory_analysis()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CompiledPipeline:
    """A step compiled as the tasks of a pipeline.

    `shardings` are those of the dynamic arguments on the first stage that reads them; `copies` are (input of the
    pipeline, leaf of the arguments, sharding) for what further stages read too.
    """

    plan: Plan
    traced: TracedStep
    staged: Staged
    executables: tuple[Any, ...]
    executor: Executor
    shardings: tuple[Any, ...]
    donated: frozenset[int]
    leaf_of_input: tuple[int, ...]
    copies: tuple[tuple[int, int, NamedSharding], ...]
    fixed: tuple[tuple[int, Any], ...]
    literals: tuple[tuple[int, Any], ...]

    def __call__(self, *args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        if tree != self.traced.in_tree:
            raise TypeError(f"expected arguments with the structure {self.traced.in_tree}, got {tree}")
        inputs = [leaves[i] if i >= 0 else None for i in self.leaf_of_input]
        if self.copies:
            put = jax.device_put([leaves[leaf] for _, leaf, _ in self.copies], [s for _, _, s in self.copies])
            for (position, _, _), array in zip(self.copies, put, strict=True):
                inputs[position] = array
        for position, constant in self.fixed:
            inputs[position] = constant
        results: list[Any] = [None] * len(self.traced.out_avals)
        for position, array in zip(self.staged.staged.results, self.executor(inputs), strict=True):
            results[position] = array
        for position, literal in self.literals:
            results[position] = literal
        return jax.tree.unflatten(self.traced.out_tree, results)

    def ready(self) -> CompiledPipeline:
        """The same with its constants on the devices."""
        shardings = _input_shardings(self.staged, self.plan)
        fixed = tuple((position, jax.device_put(c, shardings[position])) for position, c in self.fixed)
        return dataclasses.replace(self, fixed=fixed)

    def as_text(self) -> str:
        """The optimised programs of all tasks, one after the other."""
        return "\n\n".join(e.as_text() for e in self.executables)


def build(traced: TracedStep, plan: Plan, rules: RuleBook) -> Compiled | CompiledPipeline:
    """Emits, lowers and compiles a step under a plan for this program's devices.

    Raises: NotEnoughDevicesError, PlanMismatchError.
    """
    if plan.record.pipeline is not None:
        return build_pipeline(traced, plan, rules)
    return build_whole(traced, plan, plan.concrete_mesh(), rules)


def build_whole(traced: TracedStep, plan: Plan, mesh: Mesh, rules: RuleBook) -> Compiled:
    """Compiles a step as one program for the devices of a mesh."""
    made = make_function(traced, plan, mesh, rules)
    inputs = [named_sharding(layout, mesh) for layout in made.lowered.inputs]
    results = [named_sharding(v.layout, mesh) for v in plan.record.results]
    constants = tuple(inputs[: len(made.graph.constants)])
    arguments = jax.tree.unflatten(traced.in_tree, inputs[len(constants) :])

    def step(constants: tuple[Any, ...], *args: Any) -> Any:
        return jax.tree.unflatten(traced.out_tree, made.function(*constants, *jax.tree.leaves(args)))

    step.__name__ = traced.name
    replaced = frozenset(traced.argument_of[i] for i in traced.tied)
    jitted = jax.jit(
        step,
        in_shardings=(constants, *arguments),
        out_shardings=jax.tree.unflatten(traced.out_tree, results),
        donate_argnums=tuple(i + 1 for i in sorted(replaced)),
    )
    shapes = tuple(jax_compat.shape_of(c) for c in made.graph.constants)
    executable = jitted.lower(shapes, *jax.tree.unflatten(traced.in_tree, traced.in_avals)).compile()
    return Compiled(
        plan=plan,
        traced=traced,
        executable=executable,
        constants=made.graph.constants,
        constant_shardings=constants,
        shardings=arguments,
        donated=replaced,
    )


def build_pipeline(traced: TracedStep, plan: Plan, rules: RuleBook) -> CompiledPipeline:
    """Compiles each task of a pipeline for the devices of its stage."""
    staged = make_staged(traced, plan, rules)
    meshes = stage_meshes(staged)
    lowered = [p.lowered for p in staged.stages]
    executables = compile_tasks(staged.staged, lowered, meshes)
    executor = Executor(staged.program, executables, routes(staged, meshes))
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
    unread = NamedSharding(meshes[0], jax.sharding.PartitionSpec())
    per_leaf = [first.get(i, unread) for i in range(len(traced.in_avals))]
    literals = [
        (position, jnp_array(atom.literal.val, traced.out_avals[position]))
        for position, atom in enumerate(staged.graph.block.outputs)
        if not isinstance(atom, int)
    ]
    return CompiledPipeline(
        plan=plan,
        traced=traced,
        staged=staged,
        executables=tuple(executables),
        executor=executor,
        shardings=jax.tree.unflatten(traced.in_tree, per_leaf),
        donated=frozenset(traced.argument_of[i] for i in traced.tied),
        leaf_of_input=tuple(leaf_of_input),
        copies=tuple(copies),
        fixed=tuple(fixed),
        literals=tuple(literals),
    )


def stage_meshes(staged: Staged) -> list[Mesh]:
    """The mesh of each stage, of this program's devices.

    Raises: NotEnoughDevicesError.
    """
    return [submesh(s.mesh, s.first_device) for s in staged.submeshes]


def routes(staged: Staged, meshes: Sequence[Mesh]) -> list[Route]:
    """The way of each transfer between the meshes."""
    program = staged.staged

    def shape(buffer: int) -> tuple[int, ...]:
        return staged.stages[program.stage_of[buffer]].stage.graph.values[program.key_of[buffer][0]].shape

    def end(buffer: int) -> End:
        key, lowered = program.key_of[buffer], staged.stages[program.stage_of[buffer]].lowered
        mesh = meshes[program.stage_of[buffer]]
        return End(layout=layout_of(key), logical=lowered.mesh, mesh=mesh, sharding=sharding_of(key, mesh))

    return [route(shape(t.source), end(t.source), end(t.target)) for t in program.pipeline.transfers]


def _input_shardings(staged: Staged, plan: Plan) -> list[NamedSharding]:
    """Of each of the pipeline's inputs."""
    program, meshes = staged.staged, stage_meshes(staged)
    return [sharding_of(program.key_of[b], meshes[program.pipeline.buffers[b].mesh]) for b in program.pipeline.inputs]


def jnp_array(value: Any, aval: jax.ShapeDtypeStruct) -> Any:
    return jax.numpy.asarray(np.asarray(value), aval.dtype)
