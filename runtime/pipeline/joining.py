"""Runs that one program can do together: the first micro-batch with what precedes the loop, the last with what follows.

What a program sends between its devices, another program cannot compute beside: gradients that are exchanged behind
the last micro-batch, and parameters that are gathered ahead of the first one, hide behind nothing. As one program with
that micro-batch they hide behind its passes.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.runtime.pipeline.dataflow import Dataflow, Node, dataflow
from autopar.runtime.pipeline.program import Pipeline, TaskKind
from autopar.runtime.pipeline.schedule import PipelineSchedule
from autopar.runtime.pipeline.total_order import order_of_runs


def joinable(pipeline: Pipeline, schedule: PipelineSchedule) -> tuple[tuple[Node, ...], ...]:
    """The chains of runs that may be one program each, at most two of a mesh, in the order of the program.

    Of a mesh its first run of a micro-batch with the BEFORE task in front of it, and its last one with the AFTER task
    behind it, both of the same stage; with a single run of a micro-batch all three. All that a later run of a chain
    reads is there when its first run begins.
    """
    flow = dataflow(pipeline, schedule.num_microbatches)
    order = order_of_runs(flow, schedule)
    position = {node: at for at, node in enumerate(order)}
    of_mesh: dict[int, list[Node]] = {}
    for node in order:
        of_mesh.setdefault(pipeline.tasks[node[0]].mesh, []).append(node)
    found: list[tuple[Node, ...]] = []
    for nodes in of_mesh.values():
        repeating = [i for i, (task, _) in enumerate(nodes) if pipeline.tasks[task].kind.repeats]
        if not repeating:
            continue
        first, last = repeating[0], repeating[-1]
        begins = first > 0 and _follows(flow, position, nodes[first - 1 : first], nodes[first])
        ends = last + 1 < len(nodes) and _follows(flow, position, nodes[last : last + 1], nodes[last + 1])
        if (
            first == last
            and begins
            and ends
            and _follows(flow, position, nodes[first - 1 : first + 1], nodes[first + 1])
        ):
            found.append(tuple(nodes[first - 1 : first + 2]))
            continue
        if begins:
            found.append(tuple(nodes[first - 1 : first + 1]))
        if ends and not (begins and first == last):
            found.append(tuple(nodes[last : last + 2]))
    return tuple(sorted(found, key=lambda chain: position[chain[0]]))


def _follows(flow: Dataflow, position: dict[Node, int], chain: Sequence[Node], node: Node) -> bool:
    """Whether a run can be in one program with those in front of it on its mesh, all of one stage."""
    tasks = flow.pipeline.tasks
    task, begin = tasks[node[0]], position[chain[0]]
    if task.stage != tasks[chain[0][0]].stage:
        return False
    inside = set(chain)
    for b in dict.fromkeys(task.inputs):
        source, copies = flow.source_of(b)
        if copies and source in flow.pipeline.inputs and task.kind is TaskKind.AFTER:
            return False  # may be sent as late as the AFTER tasks begin
        if flow.donor.get(b) == node[0] and b in flow.copies:
            return False
        for _, i in flow.instances(b, task, node[1]):
            makers = [(flow.maker[source], i)] if source in flow.maker else []
            if makers and not tasks[makers[0][0]].kind.repeats:
                makers = [(makers[0][0], 0)]
            if source in flow.updaters and node[0] not in flow.updaters[source]:
                makers += [run for t in flow.updaters[source] for run in flow.runs(t)]
            if any(maker not in inside and position[maker] > begin for maker in makers):
                return False
    return True
