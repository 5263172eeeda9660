"""The values of layers in scans that the backward pass reads, fetches from the hosts, or computes again, by value.

Each value that is made in the forward pass of a layer is kept on the devices, waits in the memory of the hosts, or is
computed again of others. An integer program takes the least time in given bytes: what is kept is written and read,
what waits crosses the link to the host while the devices compute, what is computed again takes the time of its
operations. Elementwise operations take none, as compilers fuse them into those that read them. Source of the form: Jain
et al., "Checkmate: Breaking the memory wall with optimal tensor rematerialization", MLSys 2020, without the order.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np
from scipy import sparse

from autopar.common import jax_compat
from autopar.common.text import text_of_bytes
from autopar.cost.cost_model import NodeCosts, cost_model, in_turn_s
from autopar.frontend.recompute_in_scans import (
    is_never_again,
    name_of,
    places_of,
    recompute_in_scans,
    text_of_saved,
)
from autopar.hardware.cluster import Cluster
from autopar.hardware.kinds import Platform
from autopar.ir.graph import Op, OpGraph, Value, read_by
from autopar.ir.mesh import LogicalMesh
from autopar.ir.scan_pairs import JoinedBodies

# Of the bytes that a layer saves where memory is ample, those that are tried.
SHARES = (1.0, 0.7, 0.5, 0.4, 0.3, 0.22, 0.16, 0.1, 0.05, 0.0)
# Of the bytes that cross the link to the host during the forward pass, those that are sent. In all of them a backward
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


class LayerValues:
    """The values that scans over layers may save for the scans that go back over them, on a cluster."""

    def __init__(self, graph: OpGraph, cluster: Cluster) -> None:
        self.bodies: list[JoinedBodies] = []
        values: list[Value] = []

        def record(joined: JoinedBodies, known: Sequence[Value]) -> None:
            self.bodies.append(joined)
            values[:] = known

        recompute_in_scans(graph, record)
        self.cluster, self.values = cluster, values
        mesh = LogicalMesh(axis_sizes=(cluster.num_devices,))
        self._costs = NodeCosts(dataclasses.replace(graph, values=tuple(values)), cost_model(cluster, mesh))

    def seconds(self, op: Op) -> float:
        """Of all runs of an operation of the forward pass, shared by all devices."""
        return in_turn_s([op], lambda inner: self._costs.compute_s(inner, None)) / self.cluster.num_devices

    def choices(self) -> Iterator[SavedChoice]:
        """What to save in fewer and fewer bytes; then the same with some of it in the memory of the hosts, where the
        link to it is known.
        """
        if not self.bodies:
            return
        program, device = SavingProgram(self), self.cluster.device
        least_bytes, most_bytes = program.least_bytes(), program.solved(math.inf, 0.0).kept_bytes
        sent_bytes = [0.0]
        if device.host_link_bytes_per_s is not None and device.platform is not Platform.CPU:
            forward_s = sum(self.seconds(op) for joined in self.bodies for op in joined.forward)
            sent_bytes.append(SENT_SHARE * forward_s * device.host_link_bytes_per_s * self.cluster.num_devices)
        for most_sent_bytes in sent_bytes:
            for share in SHARES:
                yield program.solved(least_bytes + share * (most_bytes - least_bytes), most_sent_bytes)


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
        for joined in layers.bodies:
            self._enter(joined)
        entries = [(i, j, x) for i, row in enumerate(self.rows) for j, x in row.items()]
        i, j, x = zip(*entries, strict=True)
        self.matrix = sparse.csr_array((x, (i, j)), shape=(len(self.rows), len(self.costs)))

    def _enter(self, joined: JoinedBodies) -> None:
        device, num_devices = self.layers.cluster.device, self.layers.cluster.num_devices
        name, places = name_of(joined), {v: place for place, v in places_of(joined).items()}
        # The turns of loops around the layers: in each of them all is written, read and sent once more.
        turns = joined.forward[0].count / joined.trips if joined.forward else 1.0
        kept, sent, again = {}, {}, {}  # columns of values, and of the operations that make them
        for v, place in places.items():
            nbytes = self.layers.values[v].nbytes
            all_bytes = joined.trips * nbytes
            moved_s = turns * device.memory_s(2 * all_bytes) / num_devices
            kept[v] = self._column(("kept", name, place), (moved_s, all_bytes, 0, 1))
            self.made_by[name, place] = "the input of layers"
            sent[v] = self._column(("host", name, place), (moved_s, 0, turns * all_bytes, nbytes >= SENT_FROM_BYTES))
        for i, op in enumerate(joined.forward):
            column = self._column(("again", name, str(i)), (self.layers.seconds(op), 0, 0, not is_never_again(op)))
            again.update(dict.fromkeys(op.outputs, column))
            text = f"{op.primitive} at {jax_compat.source_line(op.eqn)}" if op.eqn is not None else op.primitive
            self.made_by.update({(name, places[v]): text for v in op.outputs})
        ends = joined.block.outputs[len(joined.block.outputs) - joined.num_ends :]
        backward = [op for op in joined.block.ops if op.id not in joined.first]
        read = {v for op in backward for v in read_by(op)} | {a for a in ends if isinstance(a, int)}
        # What the backward pass reads is there, or made again, and so is what an operation reads that runs again.
        # Constants and slices of a layer are there.
        readers: list[tuple[int, int | None]] = [(v, None) for v in read]
        readers += [(v, again[op.outputs[0]]) for op in joined.forward if op.outputs for v in read_by(op)]
        for v, reader in readers:
            if v in places:
                made = {again[v]: 1.0} if v in again else {}
                self.rows.append({kept[v]: 1.0, sent[v]: 1.0, **made, **({} if reader is None else {reader: -1.0})})
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

    def least_bytes(self) -> float:
        """Bytes that are kept at least, where nothing is sent to the hosts."""
        _, size, sent, _ = np.array(self.costs).T
        return float(size @ self._solution(size, ((sent, 0.0),)))

    def solved(self, most_bytes: float, most_sent_bytes: float) -> SavedChoice:
        """The least time in so many bytes on the devices, and in the memory of the hosts."""
        _, size, sent, _ = np.array(self.costs).T
        taken = self.taken(most_bytes, most_sent_bytes)
        chosen: dict[str, tuple[list[str], list[str]]] = {name_of(joined): ([], []) for joined in self.layers.bodies}
        for (kind, name, place), column in self.columns.items():
            if kind != "again" and taken[column]:
                chosen[name][kind == "host"].append(place)
        found = [(size[c] + sent[c], name, place) for (kind, name, place), c in self.columns.items() if taken[c]]
        largest = sorted((row for row in found if row[0]), key=lambda row: -row[0])[:SHOWN]
        return SavedChoice(
            text=text_of_saved(chosen),
            kept_bytes=float(size @ taken),
            largest=tuple(f"{self.made_by[name, place]} {text_of_bytes(n)}" for n, name, place in largest),
        )

    def taken(self, most_bytes: float, most_sent_bytes: float) -> np.ndarray:
        """The columns of that solution."""
        seconds, size, sent, _ = np.array(self.costs).T
        return self._solution(seconds, ((size, most_bytes), (sent, most_sent_bytes)))

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
