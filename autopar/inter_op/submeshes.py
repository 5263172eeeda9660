"""The devices of stages: submeshes of a cluster."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from autopar.cost.cost_model import CostModel, cost_model
from autopar.errors import InvalidArgumentError
from autopar.hardware.cluster import Cluster
from autopar.hardware.collective_cost import Link
from autopar.ir.mesh import LogicalMesh


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Submesh:
    """The devices of one stage, neighbours from `first_device` on, and their logical mesh."""

    first_device: int
    mesh: LogicalMesh


def place(group_meshes: Sequence[LogicalMesh], mesh_of_stage: Sequence[int]) -> list[Submesh]:
    """The devices of each stage: larger groups first, so that no group lies across hosts that it does not fill."""
    order = sorted(range(len(group_meshes)), key=lambda g: -group_meshes[g].num_devices)
    sizes = itertools.accumulate((group_meshes[g].num_devices for g in order), initial=0)
    first_of = dict(zip(order, sizes, strict=False))
    return [Submesh(first_device=first_of[g], mesh=group_meshes[g]) for g in mesh_of_stage]


def part_of(cluster: Cluster, num_devices: int) -> Cluster:
    """Whole hosts of a cluster, or a part of one. Raises: InvalidArgumentError for a number that is neither."""
    n = cluster.domain_devices
    if num_devices % n and n % num_devices:
        raise InvalidArgumentError(
            where=f"a stage on cluster {cluster.name}",
            expected=f"whole hosts of {n} devices, or a number that divides a host",
            got=f"{num_devices} devices",
            hint="choose a number of stages that cuts the cluster so",
        )
    if num_devices >= n:
        return cluster.submesh(num_devices // n, n)
    return cluster.submesh(1, num_devices)


def model_of(cluster: Cluster, submesh: Submesh) -> CostModel:
    """The cost model of a stage's devices, with their links."""
    return cost_model(part_of(cluster, submesh.mesh.num_devices), submesh.mesh)


def link_between(source: Submesh, target: Submesh, cluster: Cluster) -> Link:
    """The link between neighbouring submeshes: that inside a host where one host has both."""
    ends = [(s.first_device, s.first_device + s.mesh.num_devices - 1) for s in (source, target)]
    hosts = {device // cluster.domain_devices for end in ends for device in end}
    return cluster.inside_host if len(hosts) == 1 else cluster.between_hosts
