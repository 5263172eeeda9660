"""Stages on a cluster of several parts: the options of each part, and the orders of the parts along the pipeline.

All stages on one part follow one another, so that a pipeline crosses the link between two parts once each way. Every
order of the parts is searched: the first stages hold more micro-batches, the last ones the loss.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from autopar.errors import UnsupportedError
from autopar.hardware.cluster import WHOLE, Cluster, memory_shares
from autopar.inter_op.stage_costs import PricedOption, send_seconds
from autopar.passes.layers import Layers
from autopar.passes.split_scan import SplitStep
from autopar.solver import Placement


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
