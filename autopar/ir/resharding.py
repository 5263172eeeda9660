"""Resharding: the cheapest sequence of collectives from one layout of a value to another.

A step does exactly one collective, so that what is emitted, what is predicted and what the compiled program does are
the same. Cheapest paths are found once for each (rank, mesh): a path's time is affine in the value's bytes, so two
tables (constant part, part per byte) serve values of every size. Of paths for small values, where latency decides (a
tree's all-reduce and a slice before a ring's reduce-scatter), for large ones, and for those where bytes alone decide, a
value takes the cheapest.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import msgspec
import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import dijkstra

from autopar.common.enums import HashedById
from autopar.hardware.collective_cost import CollectiveKind, Link, time_s
from autopar.ir.layout import Layout, LogicalMesh

# The values for which paths are found, whole. Latency decides between those of the first on slow links, and bytes
# between those of the second on few devices. In rings over hundreds of devices latency still has a part in its parts;
# of the last it has hardly any.
SIZES_BYTES = (float(1 << 20), float(1 << 28), float(1 << 40))


class StepKind(HashedById):
    """What one step does. SLICE and MASK stay on the device: each takes its part, or device 0 keeps the summand."""

    ALL_REDUCE = CollectiveKind.ALL_REDUCE
    REDUCE_SCATTER = CollectiveKind.REDUCE_SCATTER
    ALL_GATHER = CollectiveKind.ALL_GATHER
    ALL_TO_ALL = CollectiveKind.ALL_TO_ALL
    COLLECTIVE_PERMUTE = CollectiveKind.COLLECTIVE_PERMUTE
    SLICE = "slice"
    MASK = "mask"

    @property
    def collective(self) -> CollectiveKind | None:
        return self.value if isinstance(self.value, CollectiveKind) else None

    @property
    def reduces(self) -> bool:
        return self in (StepKind.ALL_REDUCE, StepKind.REDUCE_SCATTER)


class ReshardStep(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One step of a path: `axes` are the mesh axes it communicates over."""

    kind: StepKind
    axes: tuple[int, ...]
    before: Layout
    after: Layout


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MeshLinks:
    """A logical mesh and the link that each of its axes runs on.

    `as_all_reduce`: what the backend's compiler makes an all-reduce of, where it is over all devices: a reduce-scatter
    with a slice behind it, an all-gather with zeros and each device's own part before it. XLA does the first on a torus
    of three dimensions (seen in programs for v5p; over a part of the devices, and on v5e's torus of two dimensions, it
    stays what it is), the second on v5p where it is closed (`DeviceKind.gathers_by_all_reduce`).
    `joint`: (axes in ascending order, link) of collectives over several axes at once (`Cluster.joint_links`).
    """

    mesh: LogicalMesh
    links: tuple[Link, ...]
    as_all_reduce: frozenset[CollectiveKind] = frozenset()
    joint: tuple[tuple[tuple[int, ...], Link], ...] = ()

    def link(self, axes: tuple[int, ...]) -> Link:
        """The link of a collective over several axes at once; where none is given, the slowest of theirs."""
        over = tuple(a for a in sorted(axes) if self.mesh.axis_sizes[a] > 1)
        if len(over) > 1 and self.joint:
            return dict(self.joint)[over]
        return max((self.links[a] for a in axes), key=lambda link: 1.0 / link.bytes_per_s)

    def time_s(self, kind: CollectiveKind, result_bytes: float, axes: tuple[int, ...]) -> float:
        return _time_s(kind, result_bytes, self.mesh.size(axes), self.link(axes))

    def as_compiled(self, step: ReshardStep, nbytes: float) -> tuple[CollectiveKind, float] | None:
        """(kind, bytes of the result on one device) of a step's collective, for a value of `nbytes` in all.

        None for a step that stays on the device. An all-to-all keeps the local size; its ring formula counts that.
        """
        kind = step.kind.collective
        if kind is None:
            return None
        result_bytes = nbytes / step.after.shards(self.mesh)
        over_all = self.mesh.size(step.axes) == self.mesh.num_devices
        if kind in self.as_all_reduce and over_all:
            parts = self.mesh.size(step.axes) if kind is CollectiveKind.REDUCE_SCATTER else 1
            return CollectiveKind.ALL_REDUCE, result_bytes * parts
        return kind, result_bytes


@functools.lru_cache(maxsize=1 << 16)  # few sizes and links, asked for at every send of every plan
def _time_s(kind: CollectiveKind, result_bytes: float, n: int, link: Link) -> float:
    return float(time_s(kind, result_bytes, n, link))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Paths:
    """Cheapest paths between all layouts of one rank. `index` numbers the layouts; row is source, column target.

    Time of a path = `fixed_s` + bytes of the whole value * `s_per_byte`.
    """

    layouts: tuple[Layout, ...]
    index: dict[Layout, int]
    fixed_s: np.ndarray
    s_per_byte: np.ndarray
    _predecessor: np.ndarray
    _step: dict[tuple[int, int], ReshardStep]

    def steps(self, source: Layout, target: Layout) -> tuple[ReshardStep, ...]:
        """The steps of the cheapest path; empty when the layouts are equal."""
        i, j = self.index[source], self.index[target]
        found: list[ReshardStep] = []
        while j != i:
            before = int(self._predecessor[i, j])
            assert before >= 0, f"no path from {source} to {target}"
            found.append(self._step[before, j])
            j = before
        return tuple(reversed(found))


@dataclasses.dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PathsBySize:
    """Paths for values of several sizes, of which each value takes the cheapest one."""

    tables: tuple[Paths, ...]

    @property
    def index(self) -> dict[Layout, int]:
        return self.tables[0].index

    def seconds(
        self,
        rows: np.ndarray,
        columns: np.ndarray,
        nbytes: float,
        widening: float,
        latency_share: np.ndarray | float = 1.0,
    ) -> np.ndarray:
        """Seconds from the layouts `rows` to the layouts `columns` of a value that is sent `widening` times as wide,
        with a share of the latencies, where other values have the rest of them.
        """
        alone_s = sent_s = None
        for at in self.tables:
            fixed_s, moved_s = at.fixed_s[rows, columns], nbytes * at.s_per_byte[rows, columns]
            of_path_s, with_others_s = fixed_s + moved_s, latency_share * fixed_s + widening * moved_s
            if alone_s is None:
                alone_s, sent_s = of_path_s, with_others_s
            else:
                sent_s = np.where(of_path_s < alone_s, with_others_s, sent_s)
                alone_s = np.minimum(alone_s, of_path_s)
        assert sent_s is not None, "there is a table"
        return sent_s

    def steps(self, source: Layout, target: Layout, nbytes: float) -> tuple[ReshardStep, ...]:
        """The steps of the cheapest path of a value; empty when the layouts are equal."""
        i, j = self.index[source], self.index[target]
        table = min(self.tables, key=lambda at: float(at.fixed_s[i, j] + nbytes * at.s_per_byte[i, j]))
        return table.steps(source, target)


def _subsets(axes: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [s for n in range(1, len(axes) + 1) for s in itertools.combinations(axes, n)]


def _all_layouts(rank: int, axes: tuple[int, ...]) -> list[Layout]:
    """Every layout of a rank, with every order of axes within a dimension and every set of partial axes."""
    found: list[Layout] = []
    for places in itertools.product((None, "partial", *range(rank)), repeat=len(axes)):
        on = {p: tuple(a for a, q in zip(axes, places, strict=True) if q == p) for p in set(places)}
        orders = [list(itertools.permutations(on.get(d, ()))) for d in range(rank)]
        found += [Layout(dims, on.get("partial", ())) for dims in itertools.product(*orders)]
    return found


def _with(layout: Layout, dims: dict[int, tuple[int, ...]], partial: tuple[int, ...] | None = None) -> Layout:
    new = tuple(dims.get(d, axes) for d, axes in enumerate(layout.dims))
    return Layout(new, layout.partial if partial is None else tuple(sorted(partial)))


def _moves(layout: Layout, axes: tuple[int, ...]) -> list[ReshardStep]:
    """All single steps out of a layout."""
    moves: list[ReshardStep] = []

    def add(kind: StepKind, over: tuple[int, ...], after: Layout) -> None:
        moves.append(ReshardStep(kind=kind, axes=tuple(sorted(over)), before=layout, after=after))

    rank = len(layout.dims)
    free = tuple(a for a in axes if a not in layout.sharded_axes and a not in layout.partial)
    for over in _subsets(layout.partial):
        rest = tuple(a for a in layout.partial if a not in over)
        add(StepKind.ALL_REDUCE, over, _with(layout, {}, rest))
        for d in range(rank):
            add(StepKind.REDUCE_SCATTER, over, _with(layout, {d: (*layout.dims[d], *over)}, rest))
    for a in free:
        for d in range(rank):
            add(StepKind.SLICE, (a,), _with(layout, {d: (*layout.dims[d], a)}))
        add(StepKind.MASK, (a,), _with(layout, {}, (*layout.partial, a)))
    for d, on in enumerate(layout.dims):
        for n in range(1, len(on) + 1):
            stay, go = on[:-n], on[-n:]
            add(StepKind.ALL_GATHER, go, _with(layout, {d: stay}))
            for e in range(rank):
                if e != d:
                    add(StepKind.ALL_TO_ALL, go, _with(layout, {d: stay, e: (*layout.dims[e], *go)}))
        for order in itertools.permutations(on):
            if order != on:
                add(StepKind.COLLECTIVE_PERMUTE, on, _with(layout, {d: order}))
    return moves


@functools.cache
def paths_by_size(rank: int, mesh_links: MeshLinks) -> PathsBySize:
    """The cheapest of the paths found for values of several sizes."""
    return PathsBySize(tables=tuple(paths(rank, mesh_links, size) for size in SIZES_BYTES))


@dataclasses.dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _SingleSteps:
    """All layouts of one rank, and the single steps between them with their (seconds, seconds per byte)."""

    layouts: tuple[Layout, ...]
    index: dict[Layout, int]
    step_of: dict[tuple[int, int], ReshardStep]
    cost_of: dict[tuple[int, int], tuple[float, float]]


@functools.cache
def _single_steps(rank: int, mesh_links: MeshLinks) -> _SingleSteps:
    mesh = mesh_links.mesh
    axes = tuple(a for a, n in enumerate(mesh.axis_sizes) if n > 1)
    layouts = _all_layouts(rank, axes)
    index = {layout: i for i, layout in enumerate(layouts)}
    step_of: dict[tuple[int, int], ReshardStep] = {}
    cost_of: dict[tuple[int, int], tuple[float, float]] = {}
    known: dict[tuple[StepKind, tuple[int, ...], int], tuple[float, float]] = {}
    for i, layout in enumerate(layouts):
        for step in _moves(layout, axes):
            j = index[step.after]
            if (i, j) in step_of:
                continue
            key = (step.kind, step.axes, step.after.shards(mesh))
            if key not in known:
                known[key] = _affine(step, mesh_links)
            step_of[i, j], cost_of[i, j] = step, known[key]
    return _SingleSteps(layouts=tuple(layouts), index=index, step_of=step_of, cost_of=cost_of)


@functools.cache
def paths(rank: int, mesh_links: MeshLinks, typical_bytes: float = SIZES_BYTES[0]) -> Paths:
    """Cheapest paths between all layouts of values of `rank` dimensions, for a value of a typical size."""
    single = _single_steps(rank, mesh_links)
    rows, columns = [i for i, _ in single.cost_of], [j for _, j in single.cost_of]
    # A free step is still a step: fewer are better.
    weights = [fixed_s + typical_bytes * s_per_byte + 1e-12 for fixed_s, s_per_byte in single.cost_of.values()]
    n = len(single.layouts)
    graph = csr_array((weights, (rows, columns)), shape=(n, n))
    _, predecessor = dijkstra(graph, return_predecessors=True)
    totals = _path_sums(predecessor, single.cost_of)
    return Paths(single.layouts, single.index, totals[0], totals[1], predecessor, single.step_of)


def _affine(step: ReshardStep, mesh_links: MeshLinks) -> tuple[float, float]:
    """(seconds, seconds per byte of the whole value) of one step."""
    probe_bytes = float(1 << 30)
    collective = mesh_links.as_compiled(step, probe_bytes)
    if collective is None:
        return 0.0, 0.0
    kind, result_bytes = collective
    at_zero = mesh_links.time_s(kind, 0.0, step.axes)
    s_per_byte = (mesh_links.time_s(kind, result_bytes, step.axes) - at_zero) / probe_bytes
    return at_zero, s_per_byte


def _path_sums(predecessor: np.ndarray, cost_of: dict[tuple[int, int], tuple[float, float]]) -> list[np.ndarray]:
    """Sums of step costs along the shortest-path trees: two (n, n) arrays."""
    n = predecessor.shape[0]
    step_cost = np.zeros((2, n, n))
    for (i, j), cost in cost_of.items():
        step_cost[:, i, j] = cost
    totals = np.zeros((2, n, n))
    source = np.arange(n)[:, None]
    node = np.broadcast_to(np.arange(n), (n, n)).copy()
    while True:
        before = predecessor[source, node]
        alive = before >= 0
        if not alive.any():
            return [np.where(np.isin(predecessor, -9999) & ~np.eye(n, dtype=bool), np.inf, t) for t in totals]
        safe = np.where(alive, before, node)
        totals += np.where(alive, step_cost[:, safe, node], 0.0)
        node = safe


def fits(steps: tuple[ReshardStep, ...], shape: tuple[int, ...], mesh: LogicalMesh) -> bool:
    """Whether every layout on the way divides the value's dimensions evenly."""
    return all(step.after.fits(shape, mesh) for step in steps)


def gather_and_slice(source: Layout, target: Layout) -> tuple[ReshardStep, ...]:
    """The path that always exists: make the value whole, then let each device take its part. Summands stay summands
    where the target has them, and become such by masks.
    """
    steps: list[ReshardStep] = []
    at = source
    kept = tuple(a for a in source.partial if a in target.partial)
    if summed := tuple(a for a in source.partial if a not in kept):
        after = _with(at, {}, kept)
        steps.append(ReshardStep(kind=StepKind.ALL_REDUCE, axes=summed, before=at, after=after))
        at = after
    for d, axes in enumerate(at.dims):
        if axes:
            after = _with(at, {d: ()})
            steps.append(ReshardStep(kind=StepKind.ALL_GATHER, axes=tuple(sorted(axes)), before=at, after=after))
            at = after
    for a in target.partial:
        if a not in kept:
            after = _with(at, {}, (*at.partial, a))
            steps.append(ReshardStep(kind=StepKind.MASK, axes=(a,), before=at, after=after))
            at = after
    for d, axes in enumerate(target.dims):
        if axes:
            after = _with(at, {d: axes})
            steps.append(ReshardStep(kind=StepKind.SLICE, axes=tuple(sorted(axes)), before=at, after=after))
            at = after
    return tuple(steps)
