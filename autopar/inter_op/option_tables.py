"""The table of a step's options: the decisions of its layers on every submesh, priced."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from autopar.common.shared_job import shared_job
from autopar.common.worker_processes import worker_processes
from autopar.cost.cost_model import cost_model
from autopar.cost.stream_work import Ran
from autopar.hardware.cluster import Cluster
from autopar.hardware.cluster_parts import WHOLE, memory_shares
from autopar.inter_op.build_stages import MicrobatchedStep
from autopar.inter_op.fit_stages import BuildLimits
from autopar.inter_op.layer_decisions import LARGE_SHARE, Decisions
from autopar.inter_op.mesh_options import LayersOnMesh, MeshOptions
from autopar.inter_op.mesh_screen import MeshScreen
from autopar.inter_op.search_space import meshes_inside
from autopar.inter_op.stage_costs import PricedOption, remat_ops
from autopar.inter_op.submeshes import part_of
from autopar.intra_op.memory_prices import saved_values
from autopar.ir.graph import OpGraph
from autopar.ir.mesh import LogicalMesh
from autopar.kernels.known import has_known_kernels
from autopar.microbatch.smaller_step import num_examples
from autopar.passes.fold_layers import FoldedGraph, fold_layers

# A table is shared with other processes from so much work on, its meshes times the operations of its layers: a process
# takes as long to start as the first 3,000 of them here.
WORTH_PROCESSES = 6_000
# For each process the meshes that are priced at once, so that none waits long for the others.
MESHES_AT_ONCE = 12

# The key of decisions: mesh, operations and values, devices over which examples split, the examples (0: any number),
# the micro-batches in flight of which saved values have a price (1: several); then the part of the cluster.
DecidedFor = tuple[LogicalMesh, int, int, int, int, int]


class DecidedOptions(dict[DecidedFor, Decisions]):
    """Decisions by what they are for. `read`: the keys of those that were priced, since somebody emptied it."""

    def __init__(self) -> None:
        super().__init__()
        self.read: set[DecidedFor] = set()


class _Table:
    """The meshes of submeshes of some sizes, with all that their options depend on.

    Args: as of `tables`.
    """

    def __init__(
        self,
        microbatched: MicrobatchedStep,
        cluster: Cluster,
        sizes: Sequence[int],
        limits: BuildLimits,
        decided: DecidedOptions,
        is_long: bool,
        number: int,
    ) -> None:
        folded = fold_layers(microbatched.graph, microbatched.assignment, len(microbatched.layers))
        at = cluster if number == WHOLE else cluster.parts[number]
        room = limits.limit_bytes * (1.0 if number == WHOLE else memory_shares(cluster)[number])
        wiring, saved_bytes = hash(wiring_of(folded.graph)), _saved_bytes(folded) if is_long else 0.0
        examples = num_examples(microbatched.step.traced) // microbatched.graph.num_microbatches
        self.of_size: dict[int, list[int]] = {}  # the numbers of its meshes
        self.keys: list[DecidedFor] = []
        meshes: list[LayersOnMesh] = []
        for size in sizes:
            part = part_of(at, size)
            models = [cost_model(part, mesh) for mesh in meshes_inside(part)]
            self.of_size[size] = list(range(len(meshes), len(meshes) + len(models)))
            for model in models:
                mesh, stages = model.links.mesh, cluster.num_devices / size
                # A stage on this mesh holds about its share of the layers.
                room_bytes, equal = room * stages, microbatched.step.parts > 1
                in_flight = min(math.ceil(stages), microbatched.graph.num_microbatches)
                if is_long and in_flight * saved_bytes / size <= LARGE_SHARE * room_bytes:
                    in_flight = 0
                counts = (0, min(in_flight, 1)) if is_long else (examples, in_flight)
                key = mesh, wiring, math.gcd(examples, size), *counts, number
                self.keys.append(key)
                meshes.append(
                    LayersOnMesh(
                        model=model, room_bytes=room_bytes, in_flight=in_flight, equal=equal, known=decided.get(key)
                    )
                )
        # Some boundary lies between hosts, and the slowest stage sets the pace.
        link = at.between_hosts if at.num_domains > 1 else at.inside_host
        remat, layers = remat_ops(folded), microbatched.layers
        self.job = MeshOptions(folded, remat, layers, link, limits.time_limit_s, meshes)
        self.work = len(meshes) * len(folded.graph.block.ops)

    def groups(self, least: int) -> Iterator[list[int]]:
        """The sizes in order, in groups of at least so many meshes, but for the last."""
        group: list[int] = []
        for size in self.of_size:
            group.append(size)
            if sum(len(self.of_size[each]) for each in group) >= least:
                yield group
                group = []
        if group:
            yield group


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
    screen leaves out. Adds new decisions to `decided`, and to the screen what meshes take. Much work is shared with
    processes on other processors; what comes of it is the same.

    `decided` holds the decisions for smaller micro-batches. In long steps they are reused, and only priced again, where
    operations and values have the same numbers and connections, examples split over as many of the devices, and saved
    values need a price in both: where they crowd the memory though they are split over all devices.
    """
    table = _Table(microbatched, cluster, sizes, limits, decided, is_long, number)
    options: list[PricedOption] = []
    too_large: list[int] = []  # on several times as many devices layers take even more seconds of a device
    shares = table.work >= WORTH_PROCESSES and not has_known_kernels()
    with shared_job(table.job, worker_processes() if shares else ()) as job:
        for group in table.groups(MESHES_AT_ONCE * job.num_processes if job.num_processes > 1 else 1):
            left = [s for s in group if s == cluster.num_devices or not any(s % n == 0 for n in too_large)]
            meshes = [n for size in left for n in table.of_size[size]]
            ran = dict(zip(meshes, job.run("fastest", meshes), strict=True))
            paying: list[int] = []
            for size in left:
                if size != cluster.num_devices and any(size % n == 0 for n in too_large):
                    continue
                of_size = {n: ran[n] for n in table.of_size[size]}
                pay = _paying(size, number, of_size, screen) if screen is not None else list(of_size)
                if screen is not None and screen.knows_pipeline and not pay:
                    too_large.append(size)
                paying += pay
            job.everywhere("forget", set(meshes) - set(paying))
            for n, (decisions, priced) in zip(paying, job.run("priced", paying), strict=True):
                decided[table.keys[n]] = decisions
                decided.read.add(table.keys[n])
                options += priced
    return tuple(options)


def _paying(num_devices: int, part: int, ran: Mapping[int, Ran | None], screen: MeshScreen) -> list[int]:
    """Those of meshes of one size that the screen leaves in; it is told how long all layers take on the fastest."""
    timed = {n: each for n, each in ran.items() if each is not None}
    if not timed:
        return list(ran)
    fastest_s = min(each.end_s for each in timed.values())
    paying = [n for n, each in timed.items() if screen.pays(part, num_devices, each, fastest_s)]
    screen.saw(part, num_devices, fastest_s)
    return paying


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
