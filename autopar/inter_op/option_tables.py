"""The table of a step's options: the decisions of its layers on every submesh, priced."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.cost.cost_model import cost_model
from autopar.hardware.cluster import Cluster
from autopar.hardware.cluster_parts import WHOLE, memory_shares
from autopar.inter_op.build_stages import MicrobatchedStep
from autopar.inter_op.layer_decisions import Decisions, layer_decisions
from autopar.inter_op.search_space import meshes_inside
from autopar.inter_op.stage_costs import PricedOption, remat_ops, stage_options
from autopar.inter_op.submeshes import part_of
from autopar.ir.graph import OpGraph
from autopar.ir.mesh import LogicalMesh
from autopar.microbatch.smaller_step import num_examples
from autopar.passes.assign_layers import assign_layers
from autopar.passes.fold_layers import fold_layers

# The key of decisions: mesh, operations and values, devices over which examples split, and, where saved values have a
# price, the examples and the micro-batches in flight; then the part of the cluster.
DecidedFor = tuple[LogicalMesh, int, int, int, int, int]


def tables(
    microbatched: MicrobatchedStep,
    cluster: Cluster,
    sizes: Sequence[int],
    limit_bytes: int,
    time_limit_s: float,
    decided: dict[DecidedFor, Decisions],
    *,
    prices_saved: bool = True,
    number: int = WHOLE,
) -> tuple[PricedOption, ...]:
    """The options of every submesh of these sizes, in the part of the cluster with this number. Adds new decisions to
    `decided`.

    `decided` holds the decisions for smaller micro-batches. They are reused, and only priced again, where operations
    and values have the same numbers and connections, examples split over as many of the devices, and saved values have
    no price that depends on the number of examples (`prices_saved`, which is off for long steps).
    """
    assignment = assign_layers(microbatched.graph, microbatched.layers)
    folded = fold_layers(microbatched.graph, assignment, len(microbatched.layers))
    wiring, remat = hash(wiring_of(folded.graph)), remat_ops(folded)
    options: list[PricedOption] = []
    at = cluster if number == WHOLE else cluster.parts[number]
    room = limit_bytes * (1.0 if number == WHOLE else memory_shares(cluster)[number])
    models = [cost_model(part, mesh) for part in (part_of(at, n) for n in sizes) for mesh in meshes_inside(part)]
    examples = num_examples(microbatched.step.traced) // microbatched.graph.num_microbatches
    # Some boundary lies between hosts, and the slowest stage sets the pace.
    link = at.between_hosts if at.num_domains > 1 else at.inside_host
    for model in models:
        mesh = model.links.mesh
        stages = cluster.num_devices / mesh.num_devices
        in_flight = min(math.ceil(stages), microbatched.graph.num_microbatches) if prices_saved else 0
        key = mesh, wiring, math.gcd(examples, mesh.num_devices), in_flight and examples, in_flight, number
        if key not in decided:
            # A stage on this mesh holds about its share of the layers.
            room_bytes, equal = room * stages, microbatched.step.parts > 1
            decided[key] = layer_decisions(folded, model, room_bytes, in_flight, equal, time_limit_s)
        options += stage_options(folded, remat, microbatched.layers, model, link, decided[key])
    return tuple(options)


def wiring_of(graph: OpGraph) -> tuple:
    """The operations and values of a graph by number, without sizes: the key of decisions that apply to it."""
    return tuple(
        (op.id, op.kind, op.section, op.primitive, tuple(a for a in op.inputs if isinstance(a, int)), op.outputs)
        for op in graph.ops()
    )
