"""First and last micro-batches that run as one program with what stands before and behind the loop.

Gradients are exchanged once a step, behind the last micro-batch: a program of its own can hide that behind nothing.
Compiled together with the backward pass of that micro-batch, the exchange of each gradient runs beside the backward
passes of the layers in front of it; parameters that are gathered once run beside the first forward pass. Each such
program is compiled in addition to those of the other micro-batches, so it must save a part of the step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence

from autopar.cost import peak_memory
from autopar.cost.memory_program import task_program
from autopar.cost.overlap import timed_together
from autopar.cost.stream_work import Ran
from autopar.errors import PlanMismatchError
from autopar.inter_op.staged import JoinedTask, StagedStep, with_waits
from autopar.lowering.instructions import Key
from autopar.plan.options import WORTHWHILE
from autopar.runtime.emit import emit, joinable
from autopar.runtime.program import Node, TaskKind, runs_of
from autopar.runtime.simulator import merged, simulate


def join_where_it_pays(staged: StagedStep, limit_bytes: int) -> StagedStep:
    """A step with those chains of runs as one program each that hide what is sent within a mesh, and so take at least
    `WORTHWHILE` of the step off it, within the memory that there is or that the step needs anyway.

    Of the chains at the end those of meshes that end about last. Chains on other meshes would not shorten the step.
    """
    if not any(p.model.overlap.kinds for p in staged.stages):
        return staged
    least_s, end_s = WORTHWHILE * staged.simulation.step_time_s, staged.simulation.step_time_s
    once_of_stage: dict[int, float] = {}
    for each, seconds in zip(staged.staged.tasks, staged.task_s, strict=True):
        once_of_stage[each.stage] = once_of_stage.get(each.stage, 0.0) + (0.0 if each.kind.repeats else seconds)
    if all(once_s < least_s for once_s in once_of_stage.values()):
        return staged  # no chain can hide as much
    chains = joinable(staged.simulated.pipeline, staged.schedule)
    ends_s = _ends_s(staged)
    tasks: dict[tuple[Node, ...], JoinedTask] = {}
    known: dict[Hashable, JoinedTask] = {}
    for chain in chains:
        once_s = sum(staged.task_s[n] for n, _ in chain if not staged.staged.tasks[n].kind.repeats)
        if once_s < least_s:
            continue  # no more than that can hide
        key = _key(staged, chain)
        if key not in known:
            known[key] = joined_task(staged, chain)
        task = tasks[chain] = dataclasses.replace(known[key], parts=chain)
        saved_s = sum(staged.task_s[n] for n, _ in chain) - task.seconds
        at_end = staged.staged.tasks[chain[-1][0]].kind is TaskKind.AFTER
        hides = task.hidden_s > sum(staged.hidden_s[n] for n, _ in chain)
        if not hides or saved_s < least_s or (at_end and ends_s[_mesh_of(staged, chain[-1])] < end_s - saved_s):
            del tasks[chain]
    for kind in (TaskKind.AFTER, TaskKind.FORWARD):
        taken = [task.parts for task in staged.joined]
        taken += [chain for chain in tasks if staged.staged.tasks[chain[-1][0]].kind is kind]
        if len(taken) == len(staged.joined):
            continue
        made = with_joined(staged, [tasks[chain] for chain in chains if chain in taken])
        fits = max(made.peak_bytes) <= max(limit_bytes, *staged.peak_bytes)
        if fits and made.simulation.step_time_s + least_s <= staged.simulation.step_time_s:
            staged = made
    return staged


def _ends_s(staged: StagedStep) -> dict[int, float]:
    """When the last run of each mesh ends."""
    found: dict[int, float] = {}
    for step, end_s in zip(staged.simulated.instructions, staged.simulation.ends_s, strict=True):
        for run in runs_of(step):
            mesh = _mesh_of(staged, run)
            found[mesh] = max(found.get(mesh, 0.0), end_s)
    return found


def _mesh_of(staged: StagedStep, run: Node) -> int:
    return staged.simulated.pipeline.tasks[run[0]].mesh


def _key(staged: StagedStep, chain: Sequence[Node]) -> Hashable:
    """Equal for chains of stages that do the same, cut into the same tasks."""
    tasks = [staged.staged.tasks[number] for number, _ in chain]
    sizes = [(task.kind, task.level, len(task.instructions), len(task.inputs), len(task.outputs)) for task in tasks]
    return staged.stages[tasks[0].stage].like, tuple(sizes)


def joined_as_named(staged: StagedStep, names: Sequence[tuple[str, ...]], step_name: str) -> StagedStep:
    """A step with the chains that a plan names.

    Raises: PlanMismatchError for a chain that the step does not have.
    """
    if not names:
        return staged
    chains = {chain_name(staged, chain): chain for chain in joinable(staged.simulated.pipeline, staged.schedule)}
    unknown = [name for name in names if tuple(name) not in chains]
    if unknown:
        raise PlanMismatchError(
            where=f"$.plan.pipeline.joined of the plan of {step_name}",
            expected=f"tasks that can be one program: {sorted(chains)}",
            got=str(unknown[0]),
            hint="plan again, or leave the field out: nothing is then run as one program",
        )
    return with_joined(staged, [joined_task(staged, chain) for name, chain in chains.items() if name in set(names)])


def chain_name(staged: StagedStep, chain: Sequence[Node]) -> tuple[str, ...]:
    return tuple(staged.staged.tasks[number].name for number, _ in chain)


def joined_task(staged: StagedStep, chain: tuple[Node, ...]) -> JoinedTask:
    """What a chain costs as one program."""
    tasks = [staged.staged.tasks[number] for number, _ in chain]
    planned = staged.stages[tasks[0].stage]
    model, ran = planned.model, timed_chain(staged, chain)
    memory = peak_memory.estimate(joined_memory(staged, chain)[0], model.compiler)
    return JoinedTask(
        parts=chain,
        seconds=ran.end_s,
        hidden_s=ran.hidden_s,
        nbytes=memory.temporary_bytes,
        lost_bytes=memory.lost_bytes,
    )


def timed_chain(staged: StagedStep, chain: Sequence[Node]) -> Ran:
    """A chain as one program, on the clock of one device of its mesh."""
    tasks = [staged.staged.tasks[number] for number, _ in chain]
    planned = staged.stages[tasks[0].stage]
    graph = planned.stage.graph
    parts = [(task.instructions, graph.num_microbatches if task.kind.repeats else 1) for task in tasks]
    return timed_together(graph, parts, _places(staged, chain)[1], planned.model, planned.costs)


def joined_memory(staged: StagedStep, chain: Sequence[Node]) -> tuple[peak_memory.MemoryProgram, dict[int, Key]]:
    """A chain as the prediction of memory reads it, see `task_program`. New state lies where old state did."""
    tasks = [staged.staged.tasks[number] for number, _ in chain]
    planned = staged.stages[tasks[0].stage]
    graph, block = planned.stage.graph, planned.lowered.lowered
    inputs, outputs = _places(staged, chain)
    arguments = list(zip(block.block.inputs, block.entries(), strict=True))
    results = list(zip(block.block.outputs, block.outputs, strict=True))
    pairs = ((arguments[old], *results[new]) for old, new in graph.tied)
    return task_program(
        graph,
        [i for task in tasks for i in task.instructions],
        inputs,
        outputs,
        planned.model,
        zeros=[key for task in tasks for key in task.zeros],
        tied={old: (v, place) for old, v, place in pairs if isinstance(v, int) and place is not None},
    )


def _places(staged: StagedStep, chain: Sequence[Node]) -> tuple[tuple[Key, ...], tuple[Key, ...]]:
    """The places that a chain reads, and those that it fills and that are read afterwards."""
    pipeline, inside = staged.staged.pipeline, {number for number, _ in chain}
    wanted = {t.source for t in pipeline.transfers} | set(pipeline.outputs)
    wanted |= {b for number, task in enumerate(pipeline.tasks) if number not in inside for b in task.inputs}
    inputs: dict[Key, None] = {}
    made: dict[Key, bool] = {}
    for number, _ in chain:
        task, linked = staged.staged.tasks[number], pipeline.tasks[number]
        inputs |= dict.fromkeys(key for key in task.inputs if key not in made)
        for key, b in zip(task.outputs, linked.outputs, strict=True):
            made[key] = b in wanted or key in inputs
    return tuple(inputs), tuple(key for key, is_kept in made.items() if is_kept)


def with_joined(staged: StagedStep, joined: Sequence[JoinedTask]) -> StagedStep:
    """A step with chains as one program each, simulated anew."""
    smaller, sent_s = merged(staged.staged.pipeline, staged.transfer_s)
    program = emit(smaller, staged.schedule, joined=[task.parts for task in joined])
    task_s = (*staged.task_s, *(task.seconds for task in joined))
    task_bytes = (*staged.task_bytes, *(task.nbytes for task in joined))
    simulation = simulate(program, task_s, sent_s, task_bytes)
    simulation = with_waits(simulation, program, staged.stages, staged.submeshes, staged.cluster)
    return dataclasses.replace(staged, joined=tuple(joined), simulated=program, simulation=simulation)
