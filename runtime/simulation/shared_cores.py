"""Simulated programs on devices that share cores: while some devices idle, the others run faster."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from autopar.runtime.pipeline.program import Program, Run
from autopar.runtime.simulation.simulator import Simulation, Steps

# Of the processors, where fewer devices work than share them: a device that waits for another finds none that would
# fill in. Small models in 2 stages without micro-batches, half of whose time is a bubble, use about so much of 2 cores
# (benchmarks/results/fresh_memory.md).
USED = 0.95


def on_shared_processors(
    simulation: Simulation, program: Program, mesh_devices: Sequence[int], used: float = USED
) -> Simulation:
    """The same order of events, at the speed that devices have who get the part of those that idle.

    All that run at one moment run faster by the same factor, so that nothing changes but the clock: a moment in which a
    half of the devices works takes half as long, but for what of the processors nobody has. While nothing but
    transfers is under way the clock goes on as it was.

    Args:
        simulation: Of `program`, with times as they are when all devices work.
        mesh_devices: How many devices each mesh has; together they have the processors.
        used: What part of the processors has work while some devices idle.
    """
    runs = [
        (program.pipeline.tasks[step.task], start_s, end_s)
        for step, start_s, end_s in zip(program.instructions, simulation.starts_s, simulation.ends_s, strict=True)
        if isinstance(step, Run)
    ]
    changes: dict[float, int] = {0.0: 0}
    for task, start_s, end_s in runs:
        changes[start_s] = changes.get(start_s, 0) + mesh_devices[task.mesh]
        changes[end_s] = changes.get(end_s, 0) - mesh_devices[task.mesh]
    moments = sorted(changes)
    working = np.cumsum([changes[moment] for moment in moments])
    total = sum(mesh_devices)
    speed = np.where((working > 0) & (working < total), np.maximum(used * total / np.maximum(working, 1), 1.0), 1.0)
    then_s = np.concatenate([[0.0], np.cumsum(np.diff(moments) / speed[:-1])])

    def at(seconds: float) -> float:
        beyond = max(0.0, seconds - moments[-1])  # transfers behind the last task
        return float(np.interp(seconds, moments, then_s)) + beyond

    def moved(steps: Steps) -> Steps:
        return tuple((at(when), held) for when, held in steps)

    meshes = range(len(mesh_devices))
    lasted = [(task, at(start_s), at(end_s)) for task, start_s, end_s in runs]
    repeating = [[(a, b) for task, a, b in lasted if task.mesh == mesh and task.kind.repeats] for mesh in meshes]
    return dataclasses.replace(
        simulation,
        starts_s=tuple(map(at, simulation.starts_s)),
        ends_s=tuple(map(at, simulation.ends_s)),
        step_time_s=at(simulation.step_time_s),
        busy_s=tuple(sum(b - a for task, a, b in lasted if task.mesh == mesh) for mesh in meshes),
        repeating_busy_s=tuple(sum(b - a for a, b in spans) for spans in repeating),
        repeating_span_s=tuple(
            max(b for _, b in spans) - min(a for a, _ in spans) if spans else 0.0 for spans in repeating
        ),
        bytes_over_time=tuple(map(moved, simulation.bytes_over_time)),
        in_flight_over_time=tuple(map(moved, simulation.in_flight_over_time)),
    )
