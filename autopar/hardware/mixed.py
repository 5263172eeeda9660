"""Devices and links of several kinds as one: as slow, and as small, as the slowest and the smallest of them.

A program on all devices waits for its slowest device in every collective, and the smallest memory bounds the parts of
its arrays, which are equal.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Protocol

from autopar.errors import InvalidArgumentError
from autopar.hardware.collective_cost import Link
from autopar.hardware.kinds import DeviceKind

MOST_PARTS = 4  # every order of them along a pipeline is searched


def slowest_kind(kinds: Sequence[DeviceKind]) -> DeviceKind:
    """A device with the lowest rates, the least memory and the longest overheads of these.

    Raises: InvalidArgumentError for devices of several platforms: no program of JAX runs on them.
    """
    names = tuple(dict.fromkeys(kind.name for kind in kinds))
    if len({kind.platform for kind in kinds}) > 1:
        raise InvalidArgumentError(
            where="Cluster.joined",
            expected="devices of one platform (CPU, GPU or TPU)",
            got=" and ".join(names),
            hint="plan for each platform alone: a JAX program runs on the devices of one",
        )
    slowest = min(kinds, key=lambda kind: kind.memory_bytes_per_s)
    if len(names) == 1 and len(set(kinds)) == 1:
        return slowest
    dtypes = tuple(dict.fromkeys(dtype for kind in kinds for dtype, _ in kind.peak_flops))
    apart = tuple(dict.fromkeys(dtype for kind in kinds for dtype, _ in kind.flops_efficiency))
    return dataclasses.replace(
        slowest,
        name=" and ".join(names),
        source="; ".join(dict.fromkeys(f"{kind.name}: {kind.source}" for kind in kinds)),
        peak_flops=tuple((dtype, min(kind.peak_flops_per_s(dtype) for kind in kinds)) for dtype in dtypes),
        flops_efficiency=tuple((dtype, min(kind.flops_share(dtype) for kind in kinds)) for dtype in apart),
        sustained_share=min(kind.sustained_share for kind in kinds),
        convolution_share=min(kind.convolution_share for kind in kinds),
        reorders_convolutions=any(kind.reorders_convolutions for kind in kinds),
        attention_shares=_least_shares(kinds),
        memory_bytes=min(kind.memory_bytes for kind in kinds),
        launch_overhead_s=max(kind.launch_overhead_s for kind in kinds),
        least_kernel_s=_slowest_kernel_s(kinds),
        float32_fill_s=max(kind.float32_fill_s for kind in kinds),
        host_link_bytes_per_s=_host_link(kinds),
        operation_times=(),  # those of one device are beside its own constants
    )


def _slowest_kernel_s(kinds: Sequence[DeviceKind]) -> float | None:
    """Of kernels that are no products, where it is known of each."""
    known = [kind.least_kernel_s for kind in kinds if kind.least_kernel_s is not None]
    return max(known) if len(known) == len(kinds) else None


def _host_link(kinds: Sequence[DeviceKind]) -> float | None:
    """Where one device cannot keep arrays in its host's memory, a program on all of them cannot."""
    rates = [kind.host_link_bytes_per_s for kind in kinds if kind.host_link_bytes_per_s is not None]
    return min(rates) if len(rates) == len(kinds) else None


def _least_shares(kinds: Sequence[DeviceKind]) -> tuple[tuple[int, float, float], ...] | None:
    """For each width of a head, the smallest shares that a kernel of attention reaches on one of the devices; None
    where one of them has no such kernel.
    """
    tables = [kind.attention_shares for kind in kinds if kind.attention_shares is not None]
    if len(tables) < len(kinds):
        return None
    widths = sorted({width for table in tables for width, _, _ in table})
    rows = []
    for width in widths:
        reached = []
        for table in tables:
            above = [row for row in table if row[0] >= width] or list(table[-1:])
            reached += [above[0][1:]] if above else []
        rows.append((width, min(share for share, _ in reached), min(share for _, share in reached)))
    return tuple(rows)


def slowest_link(links: Sequence[Link]) -> Link:
    """The link with the lowest rate, with the longest latency and overhead of all."""
    slowest = min(links, key=lambda link: link.bytes_per_s)
    kinds = {kind: rate for link in links for kind, rate in link.kind_bytes_per_s}
    lowest = tuple((kind, min(link.rate_of(kind) for link in links)) for kind in kinds)
    return dataclasses.replace(
        slowest,
        latency_s=max(link.latency_s for link in links),
        overhead_s=max(link.overhead_s for link in links),
        kind_bytes_per_s=lowest,
        is_asynchronous=all(link.is_asynchronous for link in links),
        sends_in_place=all(link.sends_in_place for link in links),
        has_ring_order=all(link.has_ring_order for link in links),
    )


class Part(Protocol):
    """What is read of an `autopar.hardware.cluster.Cluster` that is joined with others."""

    @property
    def name(self) -> str: ...
    @property
    def device(self) -> DeviceKind: ...
    @property
    def num_devices(self) -> int: ...
    @property
    def domain_devices(self) -> int: ...
    @property
    def inside_host(self) -> Link: ...
    @property
    def between_hosts(self) -> Link: ...
    @property
    def torus(self) -> tuple[int, ...]: ...
    @property
    def axis_override(self) -> tuple[Link, ...]: ...


def joined_fields(parts: Sequence[Part], between: Link | None) -> dict[str, Any]:
    """The fields of the cluster that parts make up, but for these. Raises: as `Cluster.joined`.

    A domain is the largest group of devices that lies inside one domain wherever it begins.
    """
    if not 2 <= len(parts) <= MOST_PARTS or any(part.torus or part.axis_override for part in parts):
        raise InvalidArgumentError(
            where="Cluster.joined",
            expected=f"2 to {MOST_PARTS} clusters of hosts with a switch, without links for single mesh axes",
            got=", ".join(part.name + (" (a torus)" if part.torus else "") for part in parts) or "none",
            hint="hosts of equal devices are one cluster; TPU slices of two generations run no common program",
        )
    link = between or slowest_link([part.between_hosts for part in parts])
    num_devices = sum(part.num_devices for part in parts)
    domain = math.gcd(*(part.domain_devices for part in parts))
    return {
        "name": "+".join(part.name for part in parts),
        "device": slowest_kind([part.device for part in parts]),
        "num_hosts": num_devices // domain,
        "devices_per_host": domain,
        "inside_host": slowest_link([part.inside_host for part in parts]),
        "between_hosts": slowest_link([link, *(part.between_hosts for part in parts if part.num_devices > domain)]),
        "between_parts": link,
    }
