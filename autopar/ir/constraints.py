"""Constraints on a plan: which mesh axis may split what, and what it must split.

The search chooses among what is allowed. A recipe is little more than this: data parallelism is a mesh axis that may
split examples and nothing else, ZeRO lets it split state too, tensor parallelism is an axis that must split matrices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from autopar.ir.graph import Dimension, OpGraph, Purpose, Side, Value, read_by
from autopar.ir.layout import Layout, LogicalMesh, replicated

LARGEST_NAMED = 3  # of the matrices that an error names
# What inner widths count.
_WIDTHS = frozenset({Dimension.HEAD})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AxisUse:
    """What one mesh axis is for.

    Attributes:
        name: What people call it: data, model, sequence, expert.
        dimensions: It may shard dimensions that count these, of any value.
        unnamed: It may shard dimensions that count heads, or none of `Dimension` (inner widths), of any value.
        may_shard: It may shard values of these purposes along any dimension.
        side: Of matrices and the values that belong to them, it may shard dimensions of this side only.
        must_shard: It must shard values of these purposes, where they lie, if it may and one of their dimensions
            divides.
        must_read_sharded: Operations must read values of these purposes sharded over it, if they can.
        minor: Of a dimension of values of these purposes, where they hold no examples, it splits what other axes leave.
        may_slice: Activations may be sliced over it, and sums over it be reduce-scattered, along dimensions that count
            these only.
        may_slice_unnamed: And along dimensions that count none.
        keeps_copies: What several passes read may be kept as they read it, although it must lie sharded over the axis:
            it is sent once instead of once for each pass, and takes the memory.
        owned_dimensions: Values that count one of these and no examples (weights, their gradients) are sharded along
            that dimension only. The step has such matrices, and the size of the axis divides that dimension.
        may_be_partial_sum: Whether values that count examples may be partial sums over it.
        exchanges: Activations that it shards may be sharded along dimensions that count these instead (an all-to-all).
            Values that have such dimensions and count positions twice (scores of attention, masks) are sharded along
            these only.
        ring_attention: Attention is sharded by positions too: keys and values go round it. An axis that `exchanges`
            too becomes two: one among whose devices heads are exchanged, and a ring of such groups.
        collective_matmul: Products gather their operands over it, and scatter their results, piece by piece while they
            run.
    """

    name: str
    dimensions: tuple[Dimension, ...] = ()
    unnamed: bool = False
    may_shard: tuple[Purpose, ...] = ()
    side: Side | None = None
    must_shard: tuple[Purpose, ...] = ()
    must_read_sharded: tuple[Purpose, ...] = ()
    minor: tuple[Purpose, ...] = ()
    may_slice: tuple[Dimension, ...] = ()
    may_slice_unnamed: bool = False
    keeps_copies: bool = False
    owned_dimensions: tuple[Dimension, ...] = ()
    may_be_partial_sum: bool = True
    exchanges: tuple[Dimension, ...] = ()
    ring_attention: bool = False
    collective_matmul: bool = False

    @property
    def shares_state(self) -> bool:
        """Whether it holds copies of the model, of examples of their own, that share out the optimiser's state."""
        return self.dimensions == (Dimension.EXAMPLE,) and Purpose.OPTIMIZER in self.must_shard

    @property
    def splits_heads(self) -> bool:
        """Whether attention is shared by heads among its devices: beside its matrices, or in exchange for positions."""
        if Dimension.HEAD in self.exchanges:
            return True
        is_plain = self.unnamed and self.side is None and Dimension.EXAMPLE not in self.dimensions
        return is_plain and Purpose.MATRIX in self.must_shard


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """The use of each axis of a mesh, in its order; and whether the optimiser's state, and what is saved for the
    backward pass, are in the memory of the host.
    """

    axes: tuple[AxisUse, ...]
    offloads_optimizer: bool = False
    offloads_activations: bool = False

    @property
    def overlapped_axes(self) -> tuple[int, ...]:
        """The axes over which products send while they run."""
        return tuple(a for a, use in enumerate(self.axes) if use.collective_matmul)

    def in_host(self, graph: OpGraph) -> frozenset[int]:
        """The arguments of a described graph, or of a stage of one, that are kept in the memory of the host."""
        return optimizer_state(graph) if self.offloads_optimizer else frozenset()

    def parts_of_heads(self, mesh: LogicalMesh) -> int:
        """Among how many devices the heads of each attention must be shared, as they are exchanged for positions."""
        if not any(Dimension.HEAD in use.exchanges for use in self.axes):
            return 1
        return mesh.size(a for a, use in enumerate(self.axes) if use.unnamed or Dimension.HEAD in use.exchanges)

    def parts_of_rings(self, mesh: LogicalMesh) -> int:
        """Among how many devices the positions of each attention must be shared."""
        return mesh.size(a for a, use in enumerate(self.axes) if use.ring_attention)

    def allowed(self, value: Value, layouts: Sequence[Layout]) -> np.ndarray:
        """Which of the layouts the axes allow for a value; partial ones as the split beside the sum."""
        dims, counts_examples, closed = range(len(value.shape)), _counts_examples(value), 0
        for axis, use in enumerate(self.axes):
            closed |= self._splits(axis, [d for d in dims if not self.may_split(use, value, d)])
            if counts_examples and not use.may_be_partial_sum:
                closed |= self._splits(axis, [len(dims)])
        return (self._bits(value, layouts) & closed) == 0

    def allows(self, value: Value, layout: Layout) -> bool:
        return bool(self.allowed(value, [layout])[0])

    def _splits(self, axis: int, dims: Iterable[int]) -> int:
        """The bits of a layout that say that an axis splits dimensions, or for one behind them all that the value is
        partial over it.
        """
        return sum(1 << (d * len(self.axes) + axis) for d in dims)

    def _bits(self, value: Value, layouts: Sequence[Layout]) -> np.ndarray:
        """Each layout of a value as a number, a bit for each axis on each dimension and for each partial one: thousands
        are compared at once.
        """
        rank, n, known = len(value.shape), len(self.axes), dict[Layout, int]()
        for at in layouts:
            if at not in known:
                bits = 0
                for d, axes in enumerate(at.dims):
                    for axis in axes:
                        bits |= 1 << (d * n + axis)
                for axis in at.partial:
                    bits |= 1 << (rank * n + axis)
                known[at] = bits
        return self._array(value, [known[at] for at in layouts])

    def _array(self, value: Value, bits: Sequence[int]) -> np.ndarray:
        num_bits = (len(value.shape) + 1) * len(self.axes)
        return np.array(bits, np.int64 if num_bits < 63 else object)

    def may_exchange(self, axes: Iterable[int]) -> bool:
        """Whether rows may be sent to their experts over mesh axes."""
        return all(Dimension.EXPERT in self.axes[a].dimensions for a in axes)

    def may_split(self, use: AxisUse, value: Value, d: int) -> bool:
        """Whether an axis may split a dimension of a value."""
        if use.side is not None and any(value.sides):
            return use.side in value.sides[d]
        names = value.dimensions[d] if value.dimensions else frozenset()
        if (
            use.owned_dimensions
            and not _counts_examples(value)
            and any(n.intersection(use.owned_dimensions) for n in value.dimensions)
        ):
            return bool(names.intersection(use.owned_dimensions))
        if value.purpose in use.may_shard:
            return True
        is_score = _is_score(value, use.exchanges)
        if is_score or (value.purpose is Purpose.ACTIVATION and names.intersection(use.exchanges)):
            return bool(names.intersection(use.exchanges))
        return bool(names.intersection(use.dimensions)) or (use.unnamed and names <= _WIDTHS)

    def natural(self, value: Value, mesh: LogicalMesh) -> Layout:
        """A value split by each axis along the first dimension that counts what the axis is for, if one divides."""
        layout = replicated(len(value.shape))
        for axis, use in enumerate(self.axes):
            if mesh.axis_sizes[axis] == 1:
                continue
            for d, names in enumerate(value.dimensions):
                dims = tuple((*on, axis) if e == d else on for e, on in enumerate(layout.dims))
                if names.intersection(use.dimensions) and Layout(dims).fits(value.split_shape, mesh):
                    layout = Layout(dims)
                    break
        return layout

    @property
    def minors(self) -> tuple[tuple[Purpose, ...], ...]:
        """For each axis the purposes of values in which it is a minor one: equal ones, equal orders of every value."""
        return tuple(use.minor for use in self.axes)

    def order_of(self, value: Value) -> tuple[int, ...]:
        """The mesh axes, major ones first, in the order in which they split one dimension of a value.

        A gather along the minor one leaves the parts of the others as they are.
        """
        # A constant that is spread over examples lies as the activations do that it is combined with.
        purpose = None if any(Dimension.EXAMPLE in names for names in value.dimensions) else value.purpose
        return tuple(sorted(range(len(self.axes)), key=lambda axis: purpose in self.axes[axis].minor))

    def must_lie_split(self, value: Value) -> list[bool]:
        """Which axes a value must be split over where it lies."""
        return [value.purpose in use.must_shard for use in self.axes]

    def must_be_copied_split(self, value: Value) -> list[bool]:
        """Which axes a copy, kept for several passes, of a value must be split over."""
        return [value.purpose in use.must_shard and not use.keeps_copies for use in self.axes]

    def must_be_read_split(self, value: Value) -> list[bool]:
        """Which axes a value must be split over where operations read it."""
        return [value.purpose in use.must_read_sharded for use in self.axes]

    def split(self, value: Value, layouts: Sequence[Layout], wanted: Sequence[bool]) -> list[tuple[int, np.ndarray]]:
        """Of the wanted axes those over which the axes before them leave a value split, and the layouts that are so."""
        if not any(wanted):
            return []
        good, bits, found = self.allowed(value, layouts), self._bits(value, layouts), []
        # A sum that is still to be reduced is in parts too; one over micro-batches must not wait for its end.
        waits = value.purpose is not Purpose.ACCUMULATOR
        for axis, is_wanted in enumerate(wanted):
            if is_wanted:
                split = (bits & self._splits(axis, range(len(value.shape) + waits))) != 0
                if (good & split).any():
                    good = good & split
                    found.append((axis, split))
        return found

    def meets_activations(self, value: Value, layouts: Sequence[Layout]) -> np.ndarray:
        """Which layouts of an operand may meet activations in one operation: where positions are exchanged for heads,
        only activations are split so, for weights come behind the way back.
        """
        if value.purpose is Purpose.ACTIVATION or not any(use.exchanges for use in self.axes):
            return np.ones(len(layouts), bool)
        exchanged = 0
        for axis, use in enumerate(self.axes):
            if not _is_score(value, use.exchanges):
                dims = [d for d, names in enumerate(value.dimensions) if names.intersection(use.exchanges)]
                exchanged |= self._splits(axis, dims)
        return (self._bits(value, layouts) & exchanged) == 0

    def gathers_weights(self, value: Value, sources: Sequence[Layout], targets: Sequence[Layout]) -> np.ndarray:
        """Whether weights are gathered over an axis in whose parts operations must read them: a row for each layout
        that they lie in, a column for each that they are laid in.
        """
        rank, found = len(value.shape), np.zeros((len(sources), len(targets)), bool)
        if value.purpose in (Purpose.BATCH, Purpose.ACTIVATION):
            return found
        rows, columns = self._bits(value, sources)[:, None], self._bits(value, targets)[None, :]
        for axis, use in enumerate(self.axes):
            if value.purpose in use.must_shard and value.purpose in use.must_read_sharded:
                is_split = (rows & self._splits(axis, range(rank))) != 0
                found |= is_split & ((columns & self._splits(axis, range(rank + 1))) == 0)
        return found

    def may_become(self, value: Value, sources: Sequence[Layout], targets: Sequence[Layout]) -> np.ndarray:
        """Whether a value that lies in one layout may be laid in another, a row for each source and a column for each
        target: what its axes may newly split.

        A sum that is reduced comes to lie whole, and no activation is cut, but where `AxisUse.may_slice` says so.
        """
        closed = {source: self._may_not_cut(value, source) for source in dict.fromkeys(sources)}
        rows = self._array(value, [closed[source] for source in sources])
        return (rows[:, None] & self._bits(value, targets)[None, :]) == 0

    def _may_not_cut(self, value: Value, source: Layout) -> int:
        """The splits, as bits, that a value which lies in a layout may not have in another one."""
        closed, dims = 0, value.dimensions or (frozenset(),) * len(value.shape)
        for axis, use in enumerate(self.axes):
            sums = axis in source.partial and value.purpose not in use.may_shard
            if not sums and value.purpose is not Purpose.ACTIVATION:
                continue
            is_split = axis in source.sharded_axes
            for d, names in enumerate(dims):
                may_slice = names.intersection(use.may_slice) or (use.may_slice_unnamed and names <= _WIDTHS)
                exchanged = is_split and names.intersection(use.exchanges)
                if axis not in source.dims[d] and not may_slice and not exchanged:
                    closed |= self._splits(axis, [d])
        return closed


# What to do where decisions under pins contradict each other: recipes are relaxed then.
TOO_TIGHT = (
    "no layout of all operations obeys the pins, or the search found none: pin less, or raise time_limit_s where it is "
    "set"
)
# The same where the search ended without any decisions, and without a proof that there are none.
NO_SOLUTION = "raise time_limit_s where it is set, or bind less: a recipe, pins or a memory limit"


def optimizer_state(graph: OpGraph) -> frozenset[int]:
    """What a step replaces and only its update reads: moments, master weights. Of a step that replaces nothing, what it
    is handed and does not read.

    Numbers (counts of steps) are left out: they cost more to copy than to keep.
    """
    inputs, outputs = graph.block.inputs, graph.block.outputs
    read = {v for op in graph.block.ops for v in read_by(op)}
    replaced = {inputs[i] for i, o in graph.tied if isinstance(outputs[o], int)}
    results = {o: a for o, a in enumerate(outputs) if isinstance(a, int)}  # the others are literals
    handed = {v for i, v in enumerate(inputs) if i >= len(graph.constants)} - read - set(results.values())
    tied_results = {o for _, o in graph.tied}
    returned = {a for o, a in results.items() if o not in tied_results}
    found = (replaced - returned) or (set() if graph.tied else handed)
    return frozenset(v for v in found if graph.values[v].purpose is Purpose.OPTIMIZER and graph.values[v].shape)


def _counts_examples(value: Value) -> bool:
    return any(Dimension.EXAMPLE in names for names in value.dimensions)


def _is_score(value: Value, exchanges: tuple[Dimension, ...]) -> bool:
    """Whether a value counts positions twice, for each of what can be exchanged for them."""
    twice = sum(Dimension.SEQUENCE in names for names in value.dimensions) > 1
    return twice and any(names.intersection(exchanges) for names in value.dimensions)
