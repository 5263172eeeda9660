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
from autopar.inter_op.layer_decisions import Decisions, LayerDecider
from autopar.inter_op.mesh_screen import MeshScreen
from autopar.inter_op.search_space import meshes_inside
from autopar.inter_op.stage_costs import PricedOption, remat_ops, stage_options
from autopar.inter_op.submeshes import part_of
from autopar.intra_op.spmd_candidate import TimedSharding, timed_sharding
from autopar.ir.graph import OpGraph
from autopar.ir.mesh import LogicalMesh
from autopar.microbatch.smaller_step import num_examples
from autopar.passes.fold_layers import fold_layers

# The key of decisions: mesh, operations and values, devices over which examples split, and, where saved values have a
# price, the examples and the micro-batches in flight; then the part of the cluster.
DecidedFor = tuple[LogicalMesh, int, int, int, int, int]


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
    decided: dict[DecidedFor, Decisions],
    *,
    prices_saved: bool = True,
    number: int = WHOLE,
    screen: MeshScreen | None = None,
) -> tuple[PricedOption, ...]:
    """The options of every submesh of these sizes, in the part of the cluster with this number, but for those that the
    screen leaves out. Adds new decisions to `decided`, and to the screen what meshes take.

    `decided` holds the decisions for smaller micro-batches. They are reused, and only priced again, where operations
    and values have the same numbers and connections, examples split over as many of the devices, and saved values have
    no price that depends on the number of examples (`prices_saved`, which is off for long steps).
    """
    folded = fold_layers(microbatched.graph, microbatched.assignment, len(microbatched.layers))
    wiring, remat = hash(wiring_of(folded.graph)), remat_ops(folded)
    at = cluster if number == WHOLE else cluster.parts[number]
    room = limits.limit_bytes * (1.0 if number == WHOLE else memory_shares(cluster)[number])
    examples = num_examples(microbatched.step.traced) // microbatched.graph.num_microbatches
    # Some boundary lies between hosts, and the slowest stage sets the pace.
    link = at.between_hosts if at.num_domains > 1 else at.inside_host

    def on(model: CostModel) -> _OnMesh:
        mesh = model.links.mesh
        stages = cluster.num_devices / mesh.num_devices
        in_flight = min(math.ceil(stages), microbatched.graph.num_microbatches) if prices_saved else 0
        key = mesh, wiring, math.gcd(examples, mesh.num_devices), in_flight and examples, in_flight, number
        decider = None
        if (known := decided.get(key)) is None:
            # A stage on this mesh holds about its share of the layers.
            room_bytes, equal = room * stages, microbatched.step.parts > 1
            decider = LayerDecider(folded, model, room_bytes, in_flight, equal, limits.time_limit_s)
        first = decider.fastest if decider is not None else next(iter(known or ()), None)
        fastest = None
        if first is not None:
            costs = decider.intra_op.costs if decider is not None else None
            fastest = timed_sharding(folded.graph, model, first.sharding, costs)
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
            options += stage_options(folded, remat, microbatched.layers, each.model, link, found, each.fastest)
    return tuple(options)


def wiring_of(graph: OpGraph) -> tuple:
    """The operations and values of a graph by number, without sizes: the key of decisions that apply to it."""
    return tuple(
        (op.id, op.kind, op.section, op.primitive, tuple(a for a in op.inputs if isinstance(a, int)), op.outputs)
        for op in graph.ops()
    )
