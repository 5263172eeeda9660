"""The devices of stages: submeshes of a cluster, and those of each of its parts."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from autopar.cost.cost_model import CostModel, cost_model
from autopar.errors import InvalidArgumentError, UnsupportedError
from autopar.hardware.cluster import WHOLE, Cluster, first_devices, memory_shares, part_number
from autopar.hardware.collective_cost import Link
from autopar.inter_op.stage_costs import PricedOption, send_seconds
from autopar.ir.mesh import LogicalMesh
from autopar.passes.layers import Layers
from autopar.passes.split_scan import SplitStep
from autopar.solver import Placement


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Submesh:
    """The devices of one stage, neighbours from `first_device` on, and their logical mesh."""

    first_device: int
    mesh: LogicalMesh


def place(
    group_meshes: Sequence[LogicalMesh], mesh_of_stage: Sequence[int], cluster: Cluster, group_parts: Sequence[int] = ()
) -> list[Submesh]:
    """The devices of each stage: within each part of the cluster, larger groups first, so that no group lies across
    hosts that it does not fill. `group_parts`: the part that each group lies on, where a cluster has several.
    """
    parts = list(group_parts) or [WHOLE] * len(group_meshes)
    first_of: dict[int, int] = {}
    for part in dict.fromkeys(parts):
        order = sorted((g for g, at in enumerate(parts) if at == part), key=lambda g: -group_meshes[g].num_devices)
        sizes = itertools.accumulate((group_meshes[g].num_devices for g in order), initial=first_devices(cluster)[part])
        first_of |= dict(zip(order, sizes, strict=False))
    groups = [Submesh(first_device=first_of[g], mesh=mesh) for g, mesh in enumerate(group_meshes)]
    return [groups[g] for g in mesh_of_stage]


def part_of(cluster: Cluster, num_devices: int, first_device: int = 0) -> Cluster:
    """Whole hosts of a cluster, or a part of one; of a cluster of several parts from `first_device` on.

    Raises: InvalidArgumentError for a number that is neither, and for devices of several parts.
    """
    number = part_number(cluster, first_device, num_devices)
    if number != WHOLE:
        return part_of(cluster.parts[number], num_devices)
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
    """The cost model of a stage's devices: their kind, and their links."""
    return cost_model(part_of(cluster, submesh.mesh.num_devices, submesh.first_device), submesh.mesh)


def link_between(source: Submesh, target: Submesh, cluster: Cluster) -> Link:
    """The link between neighbouring submeshes: that inside a host where one host has both, that between parts of the
    cluster where these differ.
    """
    ends = [(s.first_device, s.first_device + s.mesh.num_devices - 1) for s in (source, target)]
    if cluster.parts:
        numbers = {part_number(cluster, first, last - first + 1) for first, last in ends}
        if len(numbers) > 1:
            assert cluster.between_parts is not None, "parts are joined by a link"
            return cluster.between_parts
        (number,) = numbers
        start, cluster = first_devices(cluster)[number], cluster.parts[number]
        ends = [(first - start, last - start) for first, last in ends]
    hosts = {device // cluster.domain_devices for end in ends for device in end}
    return cluster.inside_host if len(hosts) == 1 else cluster.between_hosts


def orders(cluster: Cluster) -> list[tuple[int, ...]]:
    """The orders of a cluster's parts along a pipeline, equal parts counting as one; of one kind the empty order."""
    found: dict[tuple[Cluster, ...], tuple[int, ...]] = {}
    for order in itertools.permutations(range(len(cluster.parts))):
        found.setdefault(tuple(cluster.parts[number] for number in order), order)
    return list(found.values())


def placements(options: Sequence[PricedOption], cluster: Cluster, order: Sequence[int]) -> tuple[Placement, ...]:
    """Where each option lies in a pipeline over the parts in this order; none on a cluster of one kind."""
    if not cluster.parts:
        return ()
    sizes = [cluster.parts[number].num_devices for number in reversed(order)]
    begins = dict(zip(reversed(order), itertools.accumulate(sizes, initial=0), strict=False))
    shares = memory_shares(cluster)
    whole = Placement(begin=0, end=cluster.num_devices, host_devices=cluster.domain_devices)
    of_part = {
        number: Placement(
            begin=begins[number],
            end=begins[number] + cluster.parts[number].num_devices,
            host_devices=cluster.parts[number].domain_devices,
            memory_share=shares[number],
        )
        for number in order
    }
    return tuple(whole if o.part == WHOLE else dataclasses.replace(of_part[o.part], is_last=o.is_last) for o in options)


def on_part(options: Sequence[PricedOption], number: int, cluster: Cluster, layers: Layers) -> tuple[PricedOption, ...]:
    """The options of one part of a cluster, for its last stage, which sends to another part, and for others."""
    assert cluster.between_parts is not None, "parts are joined by a link"
    inside = [dataclasses.replace(o, part=number, is_last=False) for o in options]
    leaving = [
        dataclasses.replace(
            o,
            option=dataclasses.replace(
                o.option, send_s=send_seconds(layers, o.option.num_devices, cluster.between_parts)
            ),
            part=number,
            is_last=True,
        )
        for o in options
    ]
    return (*inside, *leaving)


def check_parts(cluster: Cluster, step: SplitStep) -> None:
    """Raises: UnsupportedError for a scan over layers on a cluster of several parts, whose stages get unequal parts."""
    if cluster.parts and step.parts > 1:
        raise UnsupportedError(
            where=f"stages of {step.traced.name} on cluster {cluster.name}",
            expected="layers that are written out, so that faster devices can get more of them",
            got=f"a scan over {step.trips} layers, of which each stage has as many",
            hint="write the layers out in a Python loop, or ask for equal stages: plan=autopar.recipes.pipeline(4)",
        )
