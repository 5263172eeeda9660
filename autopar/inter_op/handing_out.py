"""What handing out the tasks of a pipeline takes the processes that do it: devices get them no faster."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping

from autopar.hardware.cluster import Cluster
from autopar.inter_op.submeshes import Submesh
from autopar.runtime.program import Program, runs_of

# Of the thread that walks the instruction list: a run of a task, with what is sent and freed behind it.
HAND_OUT_S = 1e-4
SLICE_HOST_DEVICES = 4  # of one host of a TPU slice, which has a process of its own


def process_devices(cluster: Cluster) -> int:
    """The devices that one process has: those of a host."""
    return min(SLICE_HOST_DEVICES, cluster.devices_per_host) if cluster.torus else cluster.devices_per_host


def handed_out_s(program: Program, groups: Mapping[int, Submesh], cluster: Cluster) -> float:
    """Seconds that a step takes at least because one process hands out one task after the other, on the process that
    has most of them. `groups`: the devices of each mesh of the program.
    """
    devices = process_devices(cluster)
    runs: collections.Counter[int] = collections.Counter()
    for instruction in program.instructions:
        if parts := runs_of(instruction):
            runs.update(_processes(groups[program.pipeline.tasks[parts[0][0]].mesh], devices))
    return HAND_OUT_S * max(runs.values(), default=0)


def _processes(group: Submesh, devices: int) -> Iterable[int]:
    last = group.first_device + group.mesh.num_devices - 1
    return range(group.first_device // devices, last // devices + 1)


def least_handed_out_s(cluster: Cluster, num_stages: int, num_microbatches: int, *, has_backward: bool) -> float:
    """The same of any pipeline of so many stages, two or more: each has a forward task in every micro-batch, and a
    backward task where the step has a backward pass.
    """
    runs = num_stages * num_microbatches * (2 if has_backward else 1)
    num_processes = -(-cluster.num_devices // process_devices(cluster))
    return HAND_OUT_S * runs / min(num_processes, num_stages)
