"""Runs of one mesh that are one program: first and last micro-batches with what stands before and behind the loop, and
forward passes with the backward passes of other micro-batches behind them.

Gradients are exchanged once a step, behind the last micro-batch: a program of its own can hide that behind nothing.
Compiled together with the backward pass of that micro-batch, the exchange of each gradient runs beside the backward
passes of the layers in front of it; parameters that are gathered once run beside the first forward pass. What a
forward pass sends within its mesh, such as the rows of experts, hides behind the computation of a backward pass that
stands next to it, and the other way round. Each such program is compiled in addition to those of the other
micro-batches, so it must save a part of the step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence

from autopar.cost import peak_memory
from autopar.cost.memory_program import task_program
from autopar.cost.overlap import timed_beside, works_together
from autopar.cost.stream_simulator import Ran
from autopar.errors import PlanMismatchError
from autopar.inter_op.staged import JoinedTask, StagedStep, with_waits
from autopar.lowering.instructions import Key
from autopar.plan.options import WORTHWHILE
from autopar.runtime.emit import emit, joinable, pairs
from autopar.runtime.program import Node, TaskKind, runs_of
from autopar.runtime.simulator import merged, simulate


def join_where_it_pays(staged: StagedStep, limit_bytes: int) -> StagedStep:
    """A step with those chains of runs, and pairs of neighbours, as one program each that hide what is sent within a
    mesh, and so take at least `WORTHWHILE` of the step off it, within the memory that there is or that the step needs
    anyway.
    """
    if not any(p.model.overlap.kinds for p in staged.stages):
        return staged
    return _with_pairs(_with_chains(staged, limit_bytes), limit_bytes)


def _with_pairs(staged: StagedStep, limit_bytes: int) -> StagedStep:
    """With forward and backward passes that stand next to each other as one program each, all of a pair of tasks."""
    least_s = WORTHWHILE * staged.simulation.step_time_s
    known: dict[Hashable, JoinedTask] = {}
    taken: list[JoinedTask] = []
    for chains in _by_tasks(staged, pairs(staged.simulated.pipeline, staged.schedule)).values():
        if len(chains) * sum(staged.waits_s[n] for n, _ in chains[0]) < least_s:
            continue  # no more than that can hide
        key = _key(staged, chains[0])
        if key not in known:
            known[key] = joined_task(staged, chains[0])
        cost = known[key]
        saved_s = sum(staged.task_s[n] for n, _ in chains[0]) - cost.seconds
        if saved_s * len(chains) >= least_s and cost.hidden_s > sum(staged.hidden_s[n] for n, _ in chains[0]):
            taken += [dataclasses.replace(cost, parts=chain) for chain in chains]
    if not taken:
        return staged
    made = with_joined(staged, [*staged.joined, *taken])
    fits = max(made.peak_bytes) <= max(limit_bytes, *staged.peak_bytes)
    return made if fits and made.simulation.step_time_s + least_s <= staged.simulation.step_time_s else staged


def _by_tasks(staged: StagedStep, chains: Sequence[tuple[Node, ...]]) -> dict[tuple[str, ...], list[tuple[Node, ...]]]:
    """Chains by the names of their tasks."""
    found: dict[tuple[str, ...], list[tuple[Node, ...]]] = {}
    for chain in chains:
        found.setdefault(chain_name(staged, chain), []).append(chain)
    return found


def _with_chains(staged: StagedStep, limit_bytes: int) -> StagedStep:
    """With chains at the beginning and at the end; of these at the end those of meshes that end about last. Chains on
    other meshes would not shorten the step.
    """
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
    likes = tuple(staged.stages[task.stage].like for task in tasks)
    return likes, tuple((t.kind, t.level, len(t.instructions), len(t.inputs), len(t.outputs)) for t in tasks)


def joined_as_named(staged: StagedStep, names: Sequence[tuple[str, ...]], step_name: str) -> StagedStep:
    """A step with the chains that a plan names.

    Raises: PlanMismatchError for a chain that the step does not have.
    """
    if not names:
        return staged
    pipeline, schedule = staged.simulated.pipeline, staged.schedule
    chains = _by_tasks(staged, [*joinable(pipeline, schedule), *pairs(pipeline, schedule)])
    unknown = [name for name in names if tuple(name) not in chains]
    if unknown:
        raise PlanMismatchError(
            where=f"$.plan.pipeline.joined of the plan of {step_name}",
            expected=f"tasks that can be one program: {sorted(chains)}",
            got=str(unknown[0]),
            hint="plan again, or leave the field out: nothing is then run as one program",
        )
    return with_joined(
        staged,
        [
            dataclasses.replace(joined_task(staged, chains[name][0]), parts=chain)
            for name in dict.fromkeys(map(tuple, names))
            for chain in chains[name]
        ],
    )


def chain_name(staged: StagedStep, chain: Sequence[Node]) -> tuple[str, ...]:
    return tuple(staged.staged.tasks[number].name for number, _ in chain)


def joined_task(staged: StagedStep, chain: tuple[Node, ...]) -> JoinedTask:
    """What a chain costs as one program."""
    compiler, ran = staged.stages[staged.staged.tasks[chain[0][0]].stage].model.compiler, timed_chain(staged, chain)
    memory = [peak_memory.estimate(program, compiler) for _, program, _ in joined_memory(staged, chain)]
    return JoinedTask(
        parts=chain,
        seconds=ran.end_s,
        hidden_s=ran.hidden_s,
        nbytes=sum(each.temporary_bytes for each in memory),
        lost_bytes=sum(each.lost_bytes for each in memory),
    )


def _apart(staged: StagedStep, chain: Sequence[Node]) -> list[list[Node]]:
    """The runs of a chain that hand values to each other: all, or of a pair those of either micro-batch."""
    of: dict[int, list[Node]] = {}
    for number, micro_batch in chain:
        repeats = staged.staged.tasks[number].kind.repeats
        of.setdefault(micro_batch if repeats else -1, []).append((number, micro_batch))
    return list(of.values()) if -1 not in of else [list(chain)]


def timed_chain(staged: StagedStep, chain: Sequence[Node]) -> Ran:
    """A chain as one program, on the clock of one device of its mesh."""
    works = []
    for runs in _apart(staged, chain):
        tasks = [staged.staged.tasks[number] for number, _ in runs]
        planned = staged.stages[tasks[0].stage]
        graph = planned.stage.graph
        parts = [(task.instructions, graph.num_microbatches if task.kind.repeats else 1) for task in tasks]
        works.append(works_together(graph, parts, _places(staged, runs)[1], planned.model, planned.costs))
    return timed_beside(works, planned.model)


def joined_memory(
    staged: StagedStep, chain: Sequence[Node]
) -> list[tuple[int, peak_memory.MemoryProgram, dict[int, Key]]]:
    """A chain as the prediction of memory reads it, see `task_program`, behind its stage: a pair as two programs, both
    of whose temporaries are there at once. New state lies where old state did.
    """
    programs = []
    for runs in _apart(staged, chain):
        tasks = [staged.staged.tasks[number] for number, _ in runs]
        planned = staged.stages[tasks[0].stage]
        graph, block = planned.stage.graph, planned.lowered.lowered
        inputs, outputs = _places(staged, runs)
        arguments = list(zip(block.block.inputs, block.entries(), strict=True))
        results = list(zip(block.block.outputs, block.outputs, strict=True))
        tied = ((arguments[old], *results[new]) for old, new in graph.tied)
        program, stands_for = task_program(
            graph,
            [i for task in tasks for i in task.instructions],
            inputs,
            outputs,
            planned.model,
            zeros=[key for task in tasks for key in task.zeros],
            tied={old: (v, place) for old, v, place in tied if isinstance(v, int) and place is not None},
        )
        programs.append((tasks[0].stage, program, stands_for))
    return programs


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
    """A step with chains as one program each, where meshes do not wait for each other by it, simulated anew."""
    smaller, sent_s = merged(staged.staged.pipeline, staged.transfer_s)
    program = emit(smaller, staged.schedule, joined=[task.parts for task in joined])
    task_of = {task.parts: task for task in joined}
    joined = [task_of[each.parts] for each in program.joined]
    task_s = (*staged.task_s, *(task.seconds for task in joined))
    task_bytes = (*staged.task_bytes, *(task.nbytes for task in joined))
    simulation = simulate(program, task_s, sent_s, task_bytes)
    simulation = with_waits(simulation, program, staged.stages, staged.submeshes, staged.cluster)
    return dataclasses.replace(staged, joined=tuple(joined), simulated=program, simulation=simulation)
