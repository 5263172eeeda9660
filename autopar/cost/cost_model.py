"""The cost model of one mesh (device, links, compiler), and the seconds of each strategy of an operation.

`CostsOnMeshes` makes the costs of one graph once for all of its programs. `least_time_s` is the least time of a step on
a cluster, whatever its plan: computation alone, shared out evenly.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from autopar.common.jax_compat import jax_version
from autopar.cost.inner_collectives import island_collectives, parts_of_operands, ring_permutes
from autopar.cost.kernel_traffic import NO_TRAFFIC, Traffic, is_in_kernels, kernel_traffic
from autopar.cost.roofline import (
    OrderCopy,
    ProductRate,
    Work,
    attention_s,
    flops_of,
    is_fusible,
    kernel_under,
    launches_of,
    local_s,
    moved_times,
    multiplied_share,
    product_rate,
    rounding,
    time_s,
    times_s,
)
from autopar.cost.stream_simulator import KeptWork, Overlap, overlap_of
from autopar.cost.xla_program import Compiler, compiler_for
from autopar.hardware.cluster import Cluster, DeviceKind
from autopar.hardware.collective_cost import CollectiveKind
from autopar.hardware.kinds import SECTOR_BYTES, Platform
from autopar.ir.graph import SUMMED_PRODUCT, Atom, Op, OpGraph, OpKind, OrderCost, scaled_by_one_number
from autopar.ir.layout import Layout, LogicalMesh
from autopar.ir.primitives import MATRIX_PRODUCTS, is_inexact
from autopar.ir.resharding import MeshLinks, StepKind
from autopar.ir.strategies import Strategy, replicated_strategy
from autopar.lowering.collective_matmul import Along
from autopar.lowering.instructions import Key, Pieces
from autopar.lowering.lower import LoweredEquations
from autopar.ops.attention import ring
from autopar.ops.kernels.local import busiest_of, runs_locally
from autopar.ops.kernels.operation import NAME as KERNEL
from autopar.ops.kernels.operation import is_in_blocks, is_kernel

# What counts of a send, for as long as there is computing to hide it: all that is sent shares the links. For the layers
# of GPT 15B on four and eight V100 0.2 to 0.4 give the best decisions.
EXPOSED_FRACTION = 0.3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """What times and bytes are computed from: the device, the mesh with its links, and what XLA's compiler does."""

    device: DeviceKind
    links: MeshLinks
    compiler: Compiler
    overlap: Overlap

    @property
    def exposed_fraction(self) -> float:
        """What counts of a send that computing can hide, where stages are decided without a recipe."""
        return EXPOSED_FRACTION if self.overlap.kinds else 1.0

    def widening(self, dtype: str) -> float:
        """Bytes sent for each byte stored of a value of this type."""
        return self.device.widening(dtype)

    def order_cost(self, op: Op) -> OrderCost:
        """What the order of dimensions adds to an operation on scores of attention."""
        return op.order_cost if op.order_cost is not None and self.compiler.keeps_product_order else OrderCost()


def cost_model(cluster: Cluster, mesh: LogicalMesh) -> CostModel:
    """The costs of a logical mesh laid over a cluster."""
    platform = cluster.device.platform
    return CostModel(
        device=cluster.device,
        links=MeshLinks(
            mesh=mesh,
            links=cluster.axis_links(mesh.axis_sizes),
            as_all_reduce=_as_all_reduce(cluster),
            joint=cluster.joint_links(mesh.axis_sizes),
        ),
        compiler=dataclasses.replace(
            compiler_for(platform, jax_version()), vector_memory_bytes=cluster.device.vector_memory_bytes
        ),
        overlap=overlap_of(platform, max(mesh.axis_sizes)),
    )


_CLOSED = 4  # chips of a dimension, from which on a TPU's torus is one: shorter ones are lines


def _as_all_reduce(cluster: Cluster) -> frozenset[CollectiveKind]:
    """What XLA makes an all-reduce of where it is over all devices (`MeshLinks.as_all_reduce`)."""
    sizes = [n for n in cluster.torus if n > 1]
    if len(sizes) < 3:
        return frozenset()
    is_closed = min(sizes) >= _CLOSED and cluster.num_devices == cluster.domain_devices
    gathers = {CollectiveKind.ALL_GATHER} if cluster.device.gathers_by_all_reduce and is_closed else set()
    return frozenset({CollectiveKind.REDUCE_SCATTER, *gathers})


def copied_s(graph: OpGraph, op: Op, layout: Layout, model: CostModel) -> float:
    """Seconds of one run of what cuts, adds up or joins micro-batches, whose result lies in a layout: reads and writes
    of memory, but for sums that products add up themselves.
    """
    if op.primitive == SUMMED_PRODUCT:
        return 0.0
    passes = 3 if op.kind is OpKind.ACCUMULATE else 2 * graph.num_microbatches
    nbytes = graph.values[op.outputs[0]].nbytes / layout.shards(model.links.mesh)
    return model.device.memory_s(passes * nbytes)


# The parameters by which an operation runs differently at the same sizes: a product forward, and backward by each
# operand; a kernel of one name forward, and computed again or differentiated in the backward pass.
_FORMS = {
    "dot_general": ("dimension_numbers",),
    "conv_general_dilated": ("dimension_numbers", "lhs_dilation", "rhs_dilation"),
    KERNEL: ("rule",),
}


def timed_kinds(op: Op) -> tuple[str, ...]:
    """The kinds of operations with which one is timed together, where a step is (`OperationTimes.kind`), the narrowest
    first: products of one form, kernels of one rule; operations of one primitive on operands of one type, kernels of
    one name in one pass; of the parts of XLA's kernels, all of a pass.
    """
    if is_in_kernels(op):
        return (f"elementwise operations and reductions, {op.role.value}",)
    dtypes = [v.aval.dtype for v in (*op.eqn.invars, *op.eqn.outvars)]
    if is_kernel(op.eqn):
        dtype = next(filter(is_inexact, dtypes), dtypes[0])
        kind = f"{op.eqn.params['function'].name} of {dtype}, {op.role.value}"
    else:
        kind = f"{op.primitive} of {dtypes[0]}" if dtypes else op.primitive
    form = " ".join(str(op.eqn.params[name]) for name in _FORMS.get(op.primitive, ()))
    return (f"{kind}, {form}", kind) if form else (kind,)


class NodeCosts:
    """Seconds of each strategy of a node, cached by what its operations are.

    One object serves all programs of a graph and model, and the same graph with other counts of its operations. It also
    keeps what such programs have in common once they are lowered: `equations`, the `works` of their instructions on the
    streams, and `numbers` of the places of values.
    """

    def __init__(self, graph: OpGraph, model: CostModel) -> None:
        self.graph, self.model = graph, model
        self.is_gpu = model.device.platform is Platform.GPU
        # With the strategies by whose ids they are known, so that the ids stay theirs.
        self._known: dict[tuple, tuple[tuple[Strategy, ...], np.ndarray]] = {}
        self._works: dict[tuple, Work] = {}
        self._seconds: dict[tuple, tuple[Strategy | None, float]] = {}
        self._alone: dict[tuple[int, int], float] = {}  # without sends, of the strategies in `_known`
        self._shared: dict[tuple[int, int], float] = {}  # of one run, by the works in `_works`
        self._counted: dict[int, tuple[tuple[Strategy, ...], _Counts]] = {}
        self.equations = LoweredEquations()
        self.works: dict[tuple[int, float], KeptWork] = {}
        self.numbers: dict[Key, int] = {}

    def of_members(self, members: Sequence[tuple[Op, tuple[Strategy, ...]]], size: int) -> tuple[np.ndarray, tuple]:
        """(cost of each of `size` strategies, key) of operations that choose together: equal keys, equal costs."""
        total = np.zeros(size)
        key: list[tuple] = []
        for op, strategies in members:
            work = self._work(op)
            member = (id(work), id(strategies), op.count)
            if member not in self._known:
                alone_s = self._alone_s(op, work, strategies)
                self._known[member] = strategies, op.count * self._with_sends_s(op, strategies, alone_s)
                self._alone.update(zip([(id(work), id(s)) for s in strategies], alone_s.tolist(), strict=True))
            total = total + self._known[member][1]
            key.append((op.primitive, *member))
        return total, tuple(key)

    def least_s(self, op: Op, strategies: tuple[Strategy, ...]) -> float:
        """Seconds of an operation in a step under the fastest of strategies that `of_members` has seen."""
        return float(self._known[id(self._work(op)), id(strategies), op.count][1].min())

    def compute_s(self, op: Op, strategy: Strategy | None) -> float:
        """Seconds of an operation in a step, without the collectives it makes; None: every device does all of it."""
        key = (*self._work_key(op), op.count, id(strategy))
        if key not in self._seconds:
            split = strategy or replicated_strategy(map(self._shape, op.inputs), map(self._shape, op.outputs))
            self._seconds[key] = strategy, op.count * self._strategy_s(op, split)
        return self._seconds[key][1]

    def shared_s(self, op: Op, num_devices: int) -> float:
        """Seconds of an operation in a step at least, where so many devices share it: its kernels take their time
        however small their part is.
        """
        if op.primitive in ring.PRIMITIVES or (runs_locally(op.eqn) and op.primitive not in MATRIX_PRODUCTS):
            return self.even_s(op, num_devices)
        work = self._work(op)
        key = id(work), num_devices
        if key not in self._shared:
            parts = ((num_devices,) * len(work.operand_bytes), (num_devices,) * len(work.result_bytes))
            self._shared[key] = self._corrected_s(op, time_s(work, num_devices, parts, self.model.device))
        return op.count * self._shared[key]

    def even_s(self, op: Op, num_devices: int) -> float:
        """Seconds of an operation in a step where so many devices do an equal part of it each, as if kernels took no
        time of their own. By the times of a step that was timed a part may take more than its share of the whole, or
        less.
        """
        if not self.model.device.operation_times:
            return self.compute_s(op, None) / num_devices
        replicated = replicated_strategy(map(self._shape, op.inputs), map(self._shape, op.outputs))
        alone_s = float(self._by_constants_s(op, self._work(op), (replicated,))[0])
        return op.count * self._corrected_s(op, alone_s / num_devices)

    def piece_s(self, op: Op, strategy: Strategy, pieces: Pieces) -> float:
        """Seconds, in a step, of one piece of a product that runs in pieces, without what it sends: its arithmetic, and
        the copies by which pieces are cut out of operands, added up and put together. Of a sum of pieces each is 32
        bits wide. A compiler whose products absorb what they read makes no copies of what it cuts. Sums, and what is
        put in its place in an array that is filled before, are kernels of their own for all. Where pieces are sent in
        place, each piece of a sum that is sent is read once more, and a product that sums over pieces runs once over
        all of them, which stand side by side.
        """
        work, mesh = self._work(op), self.model.links.mesh
        n, along = mesh.size(pieces.axes), Along.of(op.eqn, pieces.operand, pieces.dim)
        parts = tuple(at.shards(mesh) * (n if i in along.operands else 1) for i, at in enumerate(strategy.operands))
        result_parts = strategy.results[0].shards(mesh) * (1 if along.result is None else n)
        in_place = self.model.links.link(pieces.axes).sends_in_place
        if along.result is None:
            wider = max(1, 4 // self.graph.values[op.outputs[0]].itemsize)
            work = dataclasses.replace(work, result_bytes=tuple(wider * nbytes for nbytes in work.result_bytes))
        result_bytes = work.result_bytes[0] / result_parts
        if in_place and along.result is None:
            return op.count * self._strategy_s(op, strategy) / n
        seconds = self._corrected_s(op, time_s(work, strategy.split * n, (parts, (result_parts,)), self.model.device))
        copied_bytes = 0.0
        if in_place and pieces.operand is None:
            copied_bytes = result_bytes
        elif not in_place:
            is_added = pieces.operand is None or along.result is None
            copied_bytes = 3.0 * result_bytes * ((n - 1) / n if is_added else 1.0)
            if pieces.operand is not None and pieces.is_read_again:
                copied_bytes += 3.0 * work.operand_bytes[pieces.operand] / parts[pieces.operand]
            if not self.model.compiler.products_absorb:
                cut = (work.operand_bytes[i] / parts[i] for i in along.operands if i != pieces.operand)
                copied_bytes += 2.0 * sum(cut)
        return op.count * (seconds + self.model.device.memory_s(copied_bytes))

    def _shape(self, atom: Atom) -> tuple[int, ...]:
        return self.graph.values[atom].split_shape if isinstance(atom, int) else atom.shape

    def _work(self, op: Op) -> Work:
        key = self._work_key(op)
        if key not in self._works:
            self._works[key] = self._new_work(op)
        return self._works[key]

    def _work_key(self, op: Op) -> tuple:
        role = op.role if self.model.device.operation_times else None  # of parts of kernels
        return (op.key, op.kernel_bytes, op.order_cost, self._adds_up(op), *self._kernels(op), role)

    def _new_work(self, op: Op) -> Work:
        rate = ProductRate(self.graph.values[op.outputs[0]].dtype if op.outputs else "float32")
        if op.primitive in MATRIX_PRODUCTS:
            rate = product_rate(op.eqn, self.model.device.platform)
        order = self.model.order_cost(op)
        kernel_bytes, small_kernels = self._kernels(op)
        moved = moved_times(op, self.model.device)
        return Work(
            # Elementwise arithmetic is no product's: kernels hide it behind what they read and write.
            flops=0.0
            if op.kernel_bytes is None and kernel_bytes is not None
            else flops_of(op) * rounding(op) * rate.passes * multiplied_share(op, rate.dtype, self.model.device),
            dtype=rate.dtype,
            operand_bytes=tuple(self._nbytes(a) * n for a, n in zip(op.inputs, moved, strict=True)),
            result_bytes=tuple(self._nbytes(v) * (2 if self._adds_up(op) else 1) for v in op.outputs),
            fusible=is_fusible(op.primitive),
            multiplies=op.primitive in MATRIX_PRODUCTS,
            is_convolution=op.primitive == "conv_general_dilated",
            kernel_bytes=None if kernel_bytes is None else kernel_bytes + order.more_bytes,
            order_copy=self._order_copy(op, order),
            small_kernels=small_kernels,
            launches=launches_of(op),
        )

    def _kernels(self, op: Op) -> tuple[float | None, int]:
        """(what an operation adds to the traffic of kernels of which it is a part, None of one that is priced by
        itself; how many kernels end with it, where its own is not counted anyhow)
        """
        if op.kernel_bytes is not None:
            return op.kernel_bytes, 1 if op.kernel_bytes else 0
        if not self.is_gpu:
            return None, 0
        traffic = self._traffic.get(op.id, NO_TRAFFIC)
        is_known = self.model.device.least_kernel_s is not None
        if not is_in_kernels(op):
            return None, traffic.ended if is_known else 0
        return traffic.nbytes, traffic.ended if is_known or not is_fusible(op.primitive) else 0

    @functools.cached_property
    def _traffic(self) -> Mapping[int, Traffic]:
        return kernel_traffic(self.graph, self.model.compiler)

    def _order_copy(self, op: Op, order: OrderCost) -> OrderCopy | None:
        if not order.copied_itemsize:
            return None
        result = self.graph.values[op.outputs[0]]
        read = result.nbytes if order.in_tiles else SECTOR_BYTES * result.size
        return OrderCopy(read_bytes=read, written_bytes=order.copied_itemsize * result.size, in_tiles=order.in_tiles)

    def _adds_up(self, op: Op) -> bool:
        """Whether a product reads and writes the sum over micro-batches of what it makes."""
        return bool(self._summed) and not self._summed.isdisjoint(op.outputs)

    @functools.cached_property
    def _summed(self) -> frozenset[int]:
        """The products that sums of micro-batches are added up within, also where a number or a shape is in between."""
        found: set[int] = set()
        for op in reversed(self.graph.block.ops):
            if op.primitive == SUMMED_PRODUCT:
                found.update(a for a in op.inputs if isinstance(a, int))
            elif not found.isdisjoint(op.outputs) and op.primitive in ("mul", "reshape"):
                made_of = op.inputs[0] if op.primitive == "reshape" else scaled_by_one_number(op, self.graph.values)
                found.difference_update(op.outputs)
                if isinstance(made_of, int):
                    found.add(made_of)
        return frozenset(found)

    def _nbytes(self, atom: Atom) -> int:
        return self.graph.values[atom].nbytes if isinstance(atom, int) else 0

    def _strategy_s(self, op: Op, strategy: Strategy) -> float:
        """Seconds of one run, without what the operation sends itself."""
        work = self._work(op)
        known = self._alone.get((id(work), id(strategy)))
        return float(self._alone_s(op, work, (strategy,))[0]) if known is None else known

    def _alone_s(self, op: Op, work: Work, strategies: tuple[Strategy, ...]) -> np.ndarray:
        """Seconds of one run under each strategy, without what the operation sends itself."""
        seconds, device = self._by_constants_s(op, work, strategies), self.model.device
        return device.corrected_s(timed_kinds(op), seconds) if device.operation_times else seconds

    def _by_constants_s(self, op: Op, work: Work, strategies: tuple[Strategy, ...]) -> np.ndarray:
        """The same by the device's constants, whatever a step took that was timed."""
        device, counts = self.model.device, self._counts(strategies)
        is_ring = op.primitive in ring.PRIMITIVES
        is_alone = op.primitive in MATRIX_PRODUCTS and not is_in_blocks(op.eqn)
        if is_ring or (runs_locally(op.eqn) and not is_alone):
            moved = zip((*work.operand_bytes, *work.result_bytes), (*counts.operands, *counts.results), strict=True)
            moved_bytes = sum((n / parts for n, parts in moved), np.zeros(len(strategies)))
            one_s = self._attention_s if is_ring else self._local_s
            seconds = np.array([one_s(op, s, n) for s, n in zip(strategies, moved_bytes.tolist(), strict=True)])
        else:
            seconds = times_s(work, counts.split, counts.operands, counts.results, device)
        return seconds

    def _corrected_s(self, op: Op, seconds: float) -> float:
        """Seconds of one run as a step had them that was timed, given those by the device's constants."""
        device = self.model.device
        return float(device.corrected_s(timed_kinds(op), np.float64(seconds))) if device.operation_times else seconds

    def _with_sends_s(self, op: Op, strategies: tuple[Strategy, ...], alone_s: np.ndarray) -> np.ndarray:
        """Seconds of one run under each strategy, with those of what the operation sends itself."""
        seconds, is_local = alone_s.copy(), runs_locally(op.eqn)
        for i, strategy in enumerate(strategies):
            if strategy.combined or strategy.ring or is_local:
                seconds[i] = self._with_own_sends_s(op, strategy, float(seconds[i]))
        return seconds

    def _counts(self, strategies: tuple[Strategy, ...]) -> _Counts:
        if id(strategies) in self._counted:
            return self._counted[id(strategies)][1]
        counts = _Counts.of(strategies, self.model.links.mesh)
        if len(strategies) > 1:
            self._counted[id(strategies)] = strategies, counts
        return counts

    def _attention_s(self, op: Op, strategy: Strategy, moved_bytes: float) -> float:
        turns = self.model.links.mesh.size(strategy.ring)
        kernel = kernel_under(op, self.model.device, turns)
        exchanges = turns > 1 and not self.model.links.link(strategy.ring).has_ring_order
        return attention_s(op, strategy, moved_bytes, self.model.device, kernel, turns, exchanges=exchanges)

    def _local_s(self, op: Op, strategy: Strategy, moved_bytes: float) -> float:
        mesh, device, in_turn = self.model.links.mesh, self.model.device, None
        count = mesh.size(strategy.ring)
        if count > 1 and is_kernel(op.eqn):
            function, avals = op.eqn.params["function"], parts_of_operands(op, strategy, mesh)
            in_turn = function.work_in_turn(avals, count, device.platform.value)
        return local_s(op, strategy, moved_bytes, device, busiest_of(op.eqn, count), in_turn)

    def _with_own_sends_s(self, op: Op, strategy: Strategy, seconds: float) -> float:
        mesh, links = self.model.links.mesh, self.model.links
        if strategy.combined:
            for v, layout in zip(op.outputs, strategy.results, strict=True):
                widening = self.model.widening(self.graph.values[v].dtype)
                nbytes = self.graph.values[v].nbytes / layout.shards(mesh) * widening
                seconds += links.time_s(StepKind.ALL_REDUCE.value, nbytes, strategy.combined)
        for sent in island_collectives(op, strategy, mesh, self.model.device.platform.value):
            nbytes = sent.result_bytes * self.model.widening(sent.dtype)
            seconds += sent.count * links.time_s(sent.kind, nbytes * sent.busiest, sent.axes)
        if strategy.ring:
            seconds += sum(permute.time_s for permute in ring_permutes(op, strategy, self.model.device, links))
        return seconds


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Counts:
    """Of each strategy of a list: the devices that share the work, the parts of each operand and of each result."""

    split: np.ndarray
    operands: tuple[np.ndarray, ...]
    results: tuple[np.ndarray, ...]

    @staticmethod
    def of(strategies: Sequence[Strategy], mesh: LogicalMesh) -> _Counts:
        def counts(layouts: Iterable[tuple[Layout, ...]]) -> tuple[np.ndarray, ...]:
            known: dict[Layout, int] = {}
            each = zip(*layouts, strict=True)
            return tuple(
                np.array([known.get(at) or known.setdefault(at, at.shards(mesh)) for at in of], np.float64)
                for of in each
            )

        return _Counts(
            split=np.array([strategy.split for strategy in strategies], np.float64),
            operands=counts(strategy.operands for strategy in strategies),
            results=counts(strategy.results for strategy in strategies),
        )


class CostsOnMeshes:
    """`NodeCosts` of a graph by the model of a mesh. What programs of the graph have in common on a mesh, their lowered
    equations and work, is kept with these (`NodeCosts`).
    """

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self.known: dict[CostModel, NodeCosts] = {}

    def on(self, model: CostModel) -> NodeCosts:
        if model not in self.known:
            self.known[model] = NodeCosts(self.graph, model)
        return self.known[model]


def least_time_s(graph: OpGraph, cluster: Cluster) -> float:
    """Seconds of all operations, each shared by all devices of a cluster, without communication, waiting or work done
    twice.
    """
    costs = NodeCosts(graph, cost_model(cluster, LogicalMesh(axis_sizes=(cluster.num_devices,))))
    return in_turn_s(graph.block.ops, lambda op: costs.even_s(op, cluster.num_devices))


def in_turn_s(ops: Iterable[Op], seconds_of: Callable[[Op], float]) -> float:
    """Seconds of operations and of those in their bodies, one after the other; of branches, the one that takes longest,
    as `compute_times_s` counts them.
    """
    total_s = 0.0
    for op in ops:
        if op.blocks:
            of_blocks = [in_turn_s(block.ops, seconds_of) for block in op.blocks]
            total_s += max(of_blocks) if op.kind is OpKind.COND else sum(of_blocks)
        elif op.kind is OpKind.EQUATION:
            total_s += seconds_of(op)
    return total_s
