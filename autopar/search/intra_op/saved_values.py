"""The values of layers that the backward pass reads, fetches from the hosts, or computes again, by value.

Each value that is made in the forward pass of a layer is kept on the devices, waits in the memory of the hosts, or is
computed again of others. An integer program takes the least time in given bytes: what is kept is written and read,
what waits crosses the link to the host while the devices compute, what is computed again takes the time of its
operations. Elementwise operations take none, as compilers fuse them into those that read them. Source of the form: Jain
et al., "Checkmate: Breaking the memory wall with optimal tensor rematerialization", MLSys 2020, without the order.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
from scipy import sparse

from autopar.common import jax_compat
from autopar.common.text import text_of_bytes
from autopar.cost.cost_model import NodeCosts, cost_model, in_turn_s
from autopar.cost.roofline import is_fusible
from autopar.frontend.recompute_in_scans import (
    is_never_again,
    name_of,
    places_of,
    recompute_in_scans,
    text_of_saved,
)
from autopar.hardware.cluster import Cluster
from autopar.hardware.kinds import Platform
from autopar.ir.graph import Op, OpGraph, OpKind, Value, read_by
from autopar.ir.layout import LogicalMesh
from autopar.ir.scan_pairs import JoinedBodies
from autopar.passes.fold_layers import FoldedGraph
from autopar.passes.layers import Layers
from autopar.passes.remat import LayerForward

# Of the bytes that layers of a scan save where memory is ample, those that are tried.
SHARES = (1.0, 0.7, 0.5, 0.4, 0.3, 0.22, 0.16, 0.1, 0.05, 0.0)
# Of the bytes that cross the link to the host during the forward pass, those that scans send. In all of them a backward
# pass waits: a 1.3-billion decoder on an H100, predicted, takes 1,410 ms with half of them and 1,616 with all (37 GiB).
SENT_SHARE = 0.5
SHOWN = 3  # of the largest values
# Values of fewer bytes are not sent to a host: each copy is a transfer of its own.
SENT_FROM_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SavedChoice:
    """What is saved of all layers.

    Attributes:
        text: As a step has it (`TracedStep.scan_recompute`).
        kept_bytes: On all devices.
        largest: The largest of these values, to be read.
    """

    text: str
    kept_bytes: float = 0.0
    largest: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SavingLayer:
    """The forward pass of a layer, as what is saved of it is decided.

    Attributes:
        name: That of layers that save the same.
        forward: Its operations, which may run again but for those that never do (`is_never_again`).
        places: The values that may be saved, by their places.
        read: Those that the backward pass reads, or that something else reads.
        there: Results of its operations that are there anyway.
        times: The layers that it stands for, all of which are saved at once.
        turns: Of loops around the layers: in each of them all is written, read and sent once more.
    """

    name: str
    forward: Sequence[Op]
    places: Mapping[str, int]
    read: Collection[int]
    times: float
    turns: float = 1.0
    there: Collection[int] = ()


def layer_of_scan(joined: JoinedBodies) -> SavingLayer:
    """The layers of a scan and of one that goes back over it."""
    ends = joined.block.outputs[len(joined.block.outputs) - joined.num_ends :]
    backward = [op for op in joined.block.ops if op.id not in joined.first]
    return SavingLayer(
        name=name_of(joined),
        forward=joined.forward,
        places=places_of(joined),
        read={v for op in backward for v in read_by(op)} | {a for a in ends if isinstance(a, int)},
        times=joined.trips,
        turns=joined.forward[0].count / joined.trips if joined.forward else 1.0,
    )


class LayerValues:
    """The values that layers may save for their backward passes, on a cluster. `fuses`: whether operations that may be
    fused into those that read them take no time where they run again, as in layers that are written out.
    """

    def __init__(self, layers: Sequence[SavingLayer], graph: OpGraph, cluster: Cluster, *, fuses: bool) -> None:
        self.layers = [layer for layer in layers if not {*layer.read}.isdisjoint(layer.places.values())]
        self.cluster, self.values, self.fuses = cluster, graph.values, fuses
        self._costs = NodeCosts(graph, cost_model(cluster, LogicalMesh(axis_sizes=(cluster.num_devices,))))

    @classmethod
    def of_written_out(
        cls, folded: FoldedGraph, forward: Mapping[int, LayerForward], layers: Layers, cluster: Cluster
    ) -> LayerValues:
        """Those of layers that are written out, of which the forward passes are given by layer, but for the last one,
        whose backward pass follows at once. Equal layers save the same.
        """
        graph = folded.graph
        found = [
            SavingLayer(
                name=str(layers.kind_of[layer]),
                forward=of_layer.ops,
                places=of_layer.places,
                read=of_layer.read,
                there=of_layer.there,
                times=folded.weight[layer],
                turns=graph.num_microbatches,
            )
            for layer, of_layer in forward.items()
            if layer != len(layers) - 1
        ]
        return cls(found, graph, cluster, fuses=True)

    @classmethod
    def of_scans(cls, graph: OpGraph, cluster: Cluster) -> LayerValues:
        """Those of scans over layers."""
        found: list[SavingLayer] = []
        values: list[Value] = []

        def record(joined: JoinedBodies, known: Sequence[Value]) -> None:
            found.append(layer_of_scan(joined))
            values[:] = known

        recompute_in_scans(graph, record)
        return cls(found, dataclasses.replace(graph, values=tuple(values)), cluster, fuses=False)

    def seconds(self, op: Op) -> float:
        """Of all runs of an operation of the forward pass, shared by all devices."""
        if self.fuses and op.kind is OpKind.EQUATION and is_fusible(op.primitive):
            return 0.0
        return in_turn_s([op], lambda inner: self._costs.compute_s(inner, None)) / self.cluster.num_devices

    def saved_places(self, most: int) -> Iterator[Mapping[str, tuple[Sequence[str], Sequence[str]]]]:
        """The places of values that layers keep, and of those in the memory of the hosts, by the names of layers: in
        fewer and fewer bytes, `most` choices; then as many of those with some there, where the link is known.
        """
        if self.layers:
            program = SavingProgram(self)
            for most_sent_bytes in self.sent_bytes():
                yield from map(program.places, program.frontier(most_sent_bytes, most))

    def sent_bytes(self) -> list[float]:
        """The most bytes that cross the link to the host in a step: none, and where the link is known as many as hide
        behind the forward pass. Layers that are written out send none on TPU (`check_passes_apart`).
        """
        device = self.cluster.device
        without = (Platform.CPU, Platform.TPU) if self.fuses else (Platform.CPU,)
        if device.host_link_bytes_per_s is None or device.platform in without:
            return [0.0]
        forward_s = sum(self.seconds(op) for layer in self.layers for op in layer.forward)
        share = 1.0 if self.fuses else SENT_SHARE
        return [0.0, share * forward_s * device.host_link_bytes_per_s * self.cluster.num_devices]

    def choices(self) -> Iterator[SavedChoice]:
        """What to save in fewer and fewer bytes; then the same with some of it in the memory of the hosts, where the
        link to it is known.
        """
        if not self.layers:
            return
        program = SavingProgram(self)
        for most_sent_bytes in self.sent_bytes():
            yield from map(program.choice, program.in_shares(most_sent_bytes, SHARES))

    def choice_within(self, most_bytes: float, *, sends: bool) -> SavedChoice:
        """What to save in so many bytes at most, which are enough for some choice; where it `sends`, with some of it in
        the memory of the hosts.
        """
        program = SavingProgram(self)
        return program.choice(program.within(most_bytes, self.sent_bytes()[sends]))


class SavingProgram:
    """The integer program: a variable for each value that is kept, for each in the memory of the hosts, and for each
    operation that runs again. Layers of one name save the same.
    """

    def __init__(self, layers: LayerValues) -> None:
        self.layers = layers
        self.columns: dict[tuple[str, str, str], int] = {}  # (kind, name of the layer, place or number of operation)
        self.made_by: dict[tuple[str, str], str] = {}  # of (name of the layer, place)
        self.costs: list[np.ndarray] = []  # (seconds, bytes kept, bytes sent, most) of each column
        self.rows: list[dict[int, float]] = []
        self.needed: list[float] = []
        for layer in layers.layers:
            self._enter(layer)
        entries = [(i, j, x) for i, row in enumerate(self.rows) for j, x in row.items()]
        i, j, x = zip(*entries, strict=True)
        self.matrix = sparse.csr_array((x, (i, j)), shape=(len(self.rows), len(self.costs)))

    def _enter(self, layer: SavingLayer) -> None:
        device, num_devices = self.layers.cluster.device, self.layers.cluster.num_devices
        name, places = layer.name, {v: place for place, v in layer.places.items()}
        kept, sent = {}, {}  # columns of values
        again: dict[int, int] = {}  # those of the operations that make them
        for v, place in places.items():
            nbytes = self.layers.values[v].nbytes
            all_bytes = layer.times * nbytes
            moved_s = layer.turns * device.memory_s(2 * all_bytes) / num_devices
            sent_bytes = layer.turns * all_bytes
            # What layers that are written out keep is not copied anywhere.
            kept[v] = self._column(("kept", name, place), (0.0 if self.layers.fuses else moved_s, all_bytes, 0, 1))
            self.made_by[name, place] = "the input of layers"
            sent[v] = self._column(("host", name, place), (moved_s, 0, sent_bytes, nbytes >= SENT_FROM_BYTES))
        for i, op in enumerate(layer.forward):
            column = self._column(("again", name, str(i)), (self.layers.seconds(op), 0, 0, not is_never_again(op)))
            again.update((v, column) for v in op.outputs if v not in layer.there)
            text = f"{op.primitive} at {jax_compat.source_line(op.eqn)}" if op.eqn is not None else op.primitive
            self.made_by.update({(name, places[v]): text for v in op.outputs if v in places})
        # What the backward pass reads is there, or made again, and so is what an operation reads that runs again.
        # Constants and slices of a layer are there.
        readers: list[tuple[int, int | None]] = [(v, None) for v in layer.read]
        for i, op in enumerate(layer.forward):
            readers += [(v, self.columns["again", name, str(i)]) for v in read_by(op)]
        for v, reader in readers:
            if v in places or v in again:
                there = {kept[v]: 1.0, sent[v]: 1.0} if v in places else {}
                made = {again[v]: 1.0} if v in again else {}
                self.rows.append({**there, **made, **({} if reader is None else {reader: -1.0})})
                self.needed.append(float(reader is None))

    def _column(self, key: tuple[str, str, str], costs: tuple[float, ...]) -> int:
        """Of a key; costs of layers of one name add up."""
        if key in self.columns:
            known = self.costs[self.columns[key]]
            known[:3] += costs[:3]
            known[3] = min(known[3], costs[3])
        else:
            self.columns[key] = len(self.costs)
            self.costs.append(np.array(costs, float))
        return self.columns[key]

    def in_shares(self, most_sent_bytes: float, shares: Sequence[float]) -> Iterator[np.ndarray]:
        """The columns that are taken in the least time, in these shares of the bytes that are kept where memory is
        ample, with so many bytes sent at most.
        """
        seconds, size, sent, _ = np.array(self.costs).T
        least = float(size @ self._solution(size, ((sent, 0.0),)))
        most = float(size @ self._solution(seconds, ((sent, 0.0),)))
        for share in shares:
            yield self.within(least + share * (most - least), most_sent_bytes)

    def within(self, most_bytes: float, most_sent_bytes: float) -> np.ndarray:
        """The columns that are taken in the least time, with so many bytes kept, and sent, at most."""
        seconds, size, sent, _ = np.array(self.costs).T
        return self._solution(seconds, ((size, most_bytes), (sent, most_sent_bytes)))

    def frontier(self, most_sent_bytes: float, most: int) -> list[np.ndarray]:
        """The columns that are taken in choices that are best for some price of a byte, and in the bytes midway between
        those that lie far apart; from the most bytes to the least, `most` of them, in about equal steps of bytes.
        """
        seconds, size, sent, _ = np.array(self.costs).T
        limits = ((sent, most_sent_bytes),)
        # The bytes of each operation that runs again, and the time of each byte, break ties.
        fastest = self._solution(seconds + 1e-6 * _unit(seconds) * size / _unit(size), limits)
        leanest = self._solution(size + 1e-6 * _unit(size) * seconds / _unit(seconds), limits)
        step = (size @ fastest - size @ leanest) / max(1, most - 1)

        def priced(more: np.ndarray, less: np.ndarray) -> list[np.ndarray]:
            """Those between two, with the latter."""
            saved_bytes, added_s = size @ more - size @ less, seconds @ less - seconds @ more
            if min(saved_bytes / _unit(size), added_s / _unit(seconds)) <= 1e-3:
                return [less]
            costs = seconds + added_s / saved_bytes * size
            at = self._solution(costs, limits)
            better = costs @ at < (1 - 1e-3) * (costs @ more)
            return [*priced(more, at), *priced(at, less)] if better else midway(more, less)

        def midway(more: np.ndarray, less: np.ndarray) -> list[np.ndarray]:
            if size @ more - size @ less <= 2 * step:
                return [less]
            at = self._solution(seconds, (*limits, (size, (size @ more + size @ less) / 2)))
            return [*midway(more, at), *midway(at, less)] if size @ less < size @ at < size @ more else [less]

        found = [fastest, *priced(fastest, leanest)]
        steps = {round((size @ taken) / step) if step else 0: taken for taken in found[::-1]}
        return list(steps.values())[::-1]

    def places(self, taken: np.ndarray) -> dict[str, tuple[list[str], list[str]]]:
        """The places of values that are kept, and of those in the memory of the hosts, by the names of layers."""
        found: dict[str, tuple[list[str], list[str]]] = {layer.name: ([], []) for layer in self.layers.layers}
        for (kind, name, place), column in self.columns.items():
            if kind != "again" and taken[column]:
                found[name][kind == "host"].append(place)
        return found

    def choice(self, taken: np.ndarray) -> SavedChoice:
        """What is saved where these columns are taken."""
        _, size, sent, _ = np.array(self.costs).T
        found: dict[str, float] = collections.defaultdict(float)  # bytes by what makes them, in all layers together
        for (kind, name, place), column in self.columns.items():
            if kind != "again" and taken[column]:
                found[self.made_by[name, place]] += size[column] + sent[column]
        largest = sorted(found.items(), key=lambda row: -row[1])[:SHOWN]
        return SavedChoice(
            text=text_of_saved(self.places(taken)),
            kept_bytes=float(size @ taken),
            largest=tuple(f"{made_by} {text_of_bytes(n)}" for made_by, n in largest if n),
        )

    def _solution(self, costs: np.ndarray, limits: Sequence[tuple[np.ndarray, float]]) -> np.ndarray:
        """Which columns are taken at least cost. `limits`: (what each column counts for, the most of it)."""
        from scipy.optimize import Bounds, LinearConstraint, milp  # takes a third of a second to import

        most = np.array(self.costs)[:, 3]
        rows = [LinearConstraint(self.matrix, self.needed, np.inf)]
        for counted, limit in limits:
            unit = max(1.0, counted.max())
            rows.append(LinearConstraint(counted[None] / unit, -np.inf, (limit + 1) / unit))
        found = milp(
            costs / max(costs.max(), 1e-30), constraints=rows, integrality=np.ones(len(costs)), bounds=Bounds(0, most),
            options={"mip_rel_gap": 1e-3},
        )  # fmt: skip
        assert found.x is not None, "all that is read may be kept, or made again"
        return np.asarray(found.x > 0.5)


def _unit(costs: np.ndarray) -> float:
    """The largest of costs, to compare with."""
    return float(costs.max(initial=0.0)) or 1.0
