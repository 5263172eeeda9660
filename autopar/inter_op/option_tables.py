"""The table of a step's options: the decisions of its layers on every submesh, priced."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from autopar.cost.cost_model import CostModel, cost_model
from autopar.hardware.cluster import Cluster
from autopar.hardware.cluster_parts import WHOLE, memory_shares
from autopar.inter_op.build_stages import MicrobatchedStep
from autopar.inter_op.fit_stages import BuildLimits
from autopar.inter_op.layer_decisions import SAVED_SHARE, Decisions, LayerDecider
from autopar.inter_op.mesh_screen import MeshScreen
from autopar.inter_op.search_space import meshes_inside
from autopar.inter_op.stage_costs import PricedOption, remat_ops, stage_options
from autopar.inter_op.submeshes import part_of
from autopar.intra_op.memory_prices import saved_values
from autopar.intra_op.spmd_candidate import TimedSharding, timed_sharding
from autopar.ir.graph import OpGraph
from autopar.ir.mesh import LogicalMesh
from autopar.microbatch.smaller_step import num_examples
from autopar.passes.fold_layers import FoldedGraph, fold_layers

# The key of decisions: mesh, operations and values, devices over which examples split, the examples (0: any number),
# the micro-batches in flight of which saved values have a price (1: several); then the part of the cluster.
DecidedFor = tuple[LogicalMesh, int, int, int, int, int]


class DecidedOptions(dict[DecidedFor, Decisions]):
    """Decisions by what they are for. `read`: the keys of those that were priced, since somebody emptied it."""

    def __init__(self) -> None:
        super().__init__()
        self.read: set[DecidedFor] = set()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _OnMesh:
    """Layers on one mesh: their decisions, where they are known from smaller micro-batches, or who makes them; the
    fastest of them on the clock, where there are any.
    """

    model: CostModel
    key: DecidedFor
    known: Decisions | None
    decider: LayerDecider | None
    fastest: TimedSharding | None


def _fastest(
    folded: FoldedGraph, model: CostModel, known: Decisions | None, decider: LayerDecider | None
) -> TimedSharding | None:
    """The fastest of the decisions on the clock; None where there are none."""
    first = decider.fastest if decider is not None else next(iter(known or ()), None)
    if first is None:
        return None
    costs = decider.intra_op.costs if decider is not None else None
    return timed_sharding(folded.graph, model, first.sharding, costs)


def _paying(meshes: Sequence[_OnMesh], screen: MeshScreen) -> list[_OnMesh]:
    """Those of meshes of one size that the screen leaves in; it is told how long all layers take on the fastest."""
    timed = [(each, each.fastest.ran) for each in meshes if each.fastest is not None]
    if not timed:
        return list(meshes)
    fastest_s, part = min(ran.end_s for _, ran in timed), meshes[0].key[-1]
    num_devices = meshes[0].model.links.mesh.num_devices
    paying = [each for each, ran in timed if screen.pays(part, num_devices, ran, fastest_s)]
    screen.saw(part, num_devices, fastest_s)
    return paying


def tables(
    microbatched: MicrobatchedStep,
    cluster: Cluster,
    sizes: Sequence[int],
    limits: BuildLimits,
    decided: DecidedOptions,
    *,
    is_long: bool = False,
    number: int = WHOLE,
    screen: MeshScreen | None = None,
) -> tuple[PricedOption, ...]:
    """The options of every submesh of these sizes, in the part of the cluster with this number, but for those that the
    screen leaves out. Adds new decisions to `decided`, and to the screen what meshes take.

    `decided` holds the decisions for smaller micro-batches. In long steps they are reused, and only priced again, where
    operations and values have the same numbers and connections, examples split over as many of the devices, and saved
    values need a price in both: where they crowd the memory though they are split over all devices.
    """
    folded = fold_layers(microbatched.graph, microbatched.assignment, len(microbatched.layers))
    wiring, remat = hash(wiring_of(folded.graph)), remat_ops(folded)
    saved_bytes = _saved_bytes(folded) if is_long else 0.0
    at = cluster if number == WHOLE else cluster.parts[number]
    room = limits.limit_bytes * (1.0 if number == WHOLE else memory_shares(cluster)[number])
    examples = num_examples(microbatched.step.traced) // microbatched.graph.num_microbatches
    # Some boundary lies between hosts, and the slowest stage sets the pace.
    link = at.between_hosts if at.num_domains > 1 else at.inside_host

    def on(model: CostModel) -> _OnMesh:
        mesh = model.links.mesh
        stages = cluster.num_devices / mesh.num_devices
        # A stage on this mesh holds about its share of the layers.
        room_bytes, equal = room * stages, microbatched.step.parts > 1
        in_flight = min(math.ceil(stages), microbatched.graph.num_microbatches)
        if is_long and in_flight * saved_bytes / mesh.num_devices <= SAVED_SHARE * room_bytes:
            in_flight = 0
        counts = (0, min(in_flight, 1)) if is_long else (examples, in_flight)
        key = mesh, wiring, math.gcd(examples, mesh.num_devices), *counts, number
        decider = None
        if (known := decided.get(key)) is None:
            decider = LayerDecider(folded, model, room_bytes, in_flight, equal, limits.time_limit_s)
        fastest = _fastest(folded, model, known, decider)
        return _OnMesh(model=model, key=key, known=known, decider=decider, fastest=fastest)

    options: list[PricedOption] = []
    too_large: list[int] = []  # on several times as many devices layers take even more seconds of a device
    for size in sizes:
        if size != cluster.num_devices and any(size % n == 0 for n in too_large):
            continue
        part = part_of(at, size)
        meshes = [on(cost_model(part, mesh)) for mesh in meshes_inside(part)]
        paying = _paying(meshes, screen) if screen is not None else meshes
        if screen is not None and screen.knows_pipeline and not paying:
            too_large.append(size)
        for each in paying:
            if each.decider is not None:
                decided[each.key] = each.decider.decisions()
            found = decided[each.key]
            decided.read.add(each.key)
            options += stage_options(folded, remat, microbatched.layers, each.model, link, found, each.fastest)
    return tuple(options)


def _saved_bytes(folded: FoldedGraph) -> float:
    """What all layers save of a micro-batch for its backward pass, on all devices together, each value once."""
    values, copies = {v for v, _ in saved_values(folded.graph)}, folded.copies()
    return sum(folded.graph.values[v].nbytes * copies.get(v, 1.0) for v in sorted(values))


def wiring_of(graph: OpGraph) -> tuple:
    """The operations and values of a graph by number, without sizes: the key of decisions that apply to it."""
    return tuple(
        (op.id, op.kind, op.section, op.primitive, tuple(a for a in op.inputs if isinstance(a, int)), op.outputs)
        for op in graph.ops()
    )
