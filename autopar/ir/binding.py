"""`Binding`: a mesh of some number of devices whose axes are for something, as a recipe says it.

A mesh axis becomes two where arrays of the step divide by one of them only (`with_groups`).

Attention shared by heads among more devices than there are of keys and values: one mesh axis would split such heads
inside (their width, whose products are partial sums of all scores). Two axes split queries by heads over both, and keys
and values over the first: within a group of devices each has the keys and values of the heads that its queries read, as
Megatron copies them. Where heads are exchanged for positions (Ulysses), keys and values are exchanged over the first
axis and gathered over the second, which sends as much as exchanging copies of their heads would. Source: Ainslie et
al., "GQA", 2023, section 2.2.

State shared out by ZeRO among devices that divide none of its dimensions (24 devices, widths of a power of two): over
two axes, each array is split by those that divide it, and each group of devices has a copy of it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from autopar.common import jax_compat
from autopar.errors import InvalidArgumentError
from autopar.ir.constraints import LARGEST_NAMED, AxisUse, Constraints, optimizer_state
from autopar.ir.graph import Dimension, OpGraph, Purpose, Value
from autopar.ir.layout import AXIS_NAMES, LogicalMesh, enumerate_layouts
from autopar.ir.primitives import GROUPED_PRODUCT, RAGGED_PRODUCT

_GROUPED = frozenset({GROUPED_PRODUCT, RAGGED_PRODUCT})
# Operations whose bodies may have products, which the purposes of values do not see.
_WITH_PRODUCTS_INSIDE = frozenset({"shard_map", "kernel", "pallas_call", "ffi_call"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """A mesh whose axes are for something: the size of each, None for all devices that the others leave.

    Several axes without a size are equally large. `offloads_optimizer`: between steps, the optimiser's state is in the
    memory of the host; `offloads_activations`: between the passes, what is saved for the backward pass. `heads`: how
    many devices can share the heads of attention, `state_parts`: how many the state divides among; 0 where that is
    unknown, or all (`autopar.ir.binding`).
    """

    axes: tuple[AxisUse, ...]
    sizes: tuple[int | None, ...]
    offloads_optimizer: bool = False
    offloads_activations: bool = False
    heads: int = 0
    state_parts: int = 0

    @property
    def blockwise_attention(self) -> bool:
        """Whether attention must be done in blocks, as one operation a pass."""
        return any(use.ring_attention and size != 1 for use, size in zip(self.axes, self.sizes, strict=True))

    @property
    def shares_sequences(self) -> bool:
        """Whether the positions of attention are shared, in one way or another."""
        return any(
            (use.ring_attention or use.exchanges) and size != 1 for use, size in zip(self.axes, self.sizes, strict=True)
        )

    def on(self, num_devices: int) -> tuple[LogicalMesh, Constraints]:
        """The mesh on so many devices, without axes of size one where there are others, and what binds it.

        Raises: InvalidArgumentError where the sizes do not make up the devices.
        """
        given = math.prod(n for n in self.sizes if n is not None)
        names = ", ".join(f"{a.name} {n or 'the rest'}" for a, n in zip(self.axes, self.sizes, strict=True))
        if num_devices % given or (None not in self.sizes and given != num_devices):
            raise InvalidArgumentError(
                where="recipe",
                expected=f"sizes that make up the {num_devices} devices of a stage",
                got=f"{names}, where {given} {'does not divide' if num_devices % given else 'is not'} {num_devices}",
                hint="their product, and the number of pipeline stages, must be the number of devices",
            )
        equal = self._equal_size(num_devices // given)
        sizes = [equal if n is None else n for n in self.sizes]
        used = [(a, n) for a, n in zip(self.axes, sizes, strict=True) if n > 1] or [(self.axes[0], 1)]
        used = self._by_state(self._by_heads(used))
        if len(used) > len(AXIS_NAMES):
            raise InvalidArgumentError(
                where="recipe",
                expected=f"at most {len(AXIS_NAMES)} mesh axes of more than one device in a stage",
                got=names,
                hint="leave one of them at 1",
            )
        constraints = Constraints(
            axes=tuple(a for a, _ in used),
            offloads_optimizer=self.offloads_optimizer,
            offloads_activations=self.offloads_activations,
        )
        return LogicalMesh(axis_sizes=tuple(n for _, n in used)), constraints

    def _by_heads(self, used: list[tuple[AxisUse, int]]) -> list[tuple[AxisUse, int]]:
        """With two axes for one that splits attention among more devices than can share its heads, beside those of
        others: tensor groups take heads first, for their matrices have them.
        """
        free, left, shares = len(AXIS_NAMES) - len(used), self.heads, {}
        for use, n in sorted(used, key=lambda axis: bool(axis[0].exchanges)):
            shared = math.gcd(n, left) if use.splits_heads and free else n
            if use.splits_heads:
                left //= math.gcd(n, left) or 1
            if 1 < shared < n or (use.exchanges and use.ring_attention):
                shares[use.name], free = shared, free - (1 < shared < n)
        out = []
        for use, n in used:
            shared = shares.get(use.name, n)
            group = dataclasses.replace(use, name=f"{use.name} group")
            if use.exchanges and use.ring_attention:
                # Groups are neighbours, as in the source of `recipes.sequence_parallel("usp")`.
                ring = dataclasses.replace(use, name=f"{use.name} ring", exchanges=())
                heads = dataclasses.replace(use, ring_attention=False)
                out += [(axis, size) for axis, size in ((ring, n // shared), (heads, shared)) if size > 1]
            else:
                out += [(use, shared)] if shared == n else [(use, shared), (group, n // shared)]
        return out

    def _by_state(self, used: list[tuple[AxisUse, int]]) -> list[tuple[AxisUse, int]]:
        """With two axes for one that shares the state out among more devices than divide it, neighbours in the second,
        beside those of others.
        """
        free, out = len(AXIS_NAMES) - len(used), []
        for use, n in used:
            shared = math.gcd(n, self.state_parts) if free > 0 and use.shares_state else n
            if 1 < shared < n:
                out += [(dataclasses.replace(use, name=f"{use.name} group"), n // shared), (use, shared)]
                free -= 1
            else:
                out.append((use, n))
        return out

    def _equal_size(self, num_devices: int) -> int:
        """Of each axis without a size, that they make up so many devices together.

        Raises: InvalidArgumentError where no whole number does.
        """
        num_axes = max(self.sizes.count(None), 1)
        size = round(num_devices ** (1 / num_axes))
        if size**num_axes != num_devices and None in self.sizes:
            names = ", ".join(use.name for use, n in zip(self.axes, self.sizes, strict=True) if n is None)
            raise InvalidArgumentError(
                where="recipe",
                expected=f"devices for mesh axes of equal size ({names}): n**{num_axes} of them",
                got=f"{num_devices} devices",
                hint="say how many devices hold a model together (size), and the rest is data parallel",
            )
        return size

    def example_parts(self, num_devices: int) -> int:
        """Into how many parts the axes on so many devices cut the examples."""
        mesh, constraints = self.on(num_devices)
        cutting = [a for a, use in enumerate(constraints.axes) if Dimension.EXAMPLE in use.dimensions]
        return mesh.size(cutting)

    def check(self, graph: OpGraph, num_devices: int) -> None:
        """Raises: InvalidArgumentError where a step has no matrices that an axis could split along what it owns, none
        at all that a tensor axis could split, or no state of an optimiser that could be kept in the memory of the host.
        """
        if self.offloads_optimizer and not optimizer_state(graph):
            raise InvalidArgumentError(
                where="recipe, offload='optimizer'",
                expected="a step with arrays among its donated arguments that only the update reads, such as moments",
                got="none",
                hint="leave offload out, or donate the optimiser's state (donate_argnums)",
            )
        mesh, constraints = self.on(num_devices)
        for use, parts in zip(constraints.axes, mesh.axis_sizes, strict=True):
            for what in use.owned_dimensions if parts > 1 else ():
                _check_owned(graph, use.name, parts, what)
            if parts > 1 and use.unnamed and Purpose.MATRIX in use.must_shard:
                _check_matrices(graph, constraints, use, parts)


def _check_matrices(graph: OpGraph, constraints: Constraints, use: AxisUse, parts: int) -> None:
    matrices = [value for value in graph.values if value.purpose is Purpose.MATRIX]
    for value in matrices:
        if any(n % parts == 0 and constraints.may_split(use, value, d) for d, n in enumerate(value.shape)):
            return
    largest = sorted(matrices, key=lambda value: -value.size)[:LARGEST_NAMED]
    inside = "" if matrices else _first(graph, _WITH_PRODUCTS_INSIDE)
    if inside:
        raise InvalidArgumentError(
            where=f"recipe, {use.name} axis of {parts} devices, {inside}",
            expected=f"a step with a product of weights, a width or the heads of which {parts} divides",
            got="products inside of kernels and shard_map islands alone, which a recipe does not split",
            hint="leave the axis out: an island is split over the axes of its own mesh where the plan has such sizes, "
            "a kernel by its rule; autopar.constrain pins their weights",
        )
    raise InvalidArgumentError(
        where=f"recipe, {use.name} axis of {parts} devices",
        expected=f"a step with a product of weights, a width or the heads of which {parts} divides",
        got=", ".join(f"{value.name} {list(value.shape)}" for value in largest) or "no product of weights",
        hint="there is nothing to share: choose a size that divides the widths, or data parallelism",
    )


def _first(graph: OpGraph, primitives: frozenset[str]) -> str:
    """The first operation of some primitives, with its line; empty where there is none."""
    op = next((op for op in graph.ops() if op.primitive in primitives), None)
    return f"{op.primitive} at {jax_compat.source_line(op.eqn)}" if op is not None else ""


def _check_owned(graph: OpGraph, axis: str, parts: int, what: Dimension) -> None:
    sizes = {
        value.name: n
        for value in graph.values
        if value.purpose is Purpose.MATRIX
        for n, names in zip(value.shape, value.dimensions, strict=True)
        if what in names
    }
    odd = next((name for name, n in sizes.items() if n % parts), None)
    if odd is not None:
        raise InvalidArgumentError(
            where=f"recipe, {axis} axis of {parts} devices",
            expected=f"a number of {what.value}s that divides by {parts}",
            got=f"{sizes[odd]} in {odd}",
            hint=f"choose a size that divides the number of {what.value}s",
        )
    grouped = [op for op in graph.ops() if op.primitive in _GROUPED] if what is Dimension.EXPERT else []
    # Some layers may be understood where others are not: a note says of sorted rows what is in the way.
    noted = [op for op in grouped if op.rule is not None and op.rule.note]
    if noted or (grouped and not sizes):
        op = (noted or grouped)[0]
        note = op.rule.note if op.rule is not None else ""
        raise InvalidArgumentError(
            where=f"recipe, {axis} axis of {parts} devices, {op.primitive} at {jax_compat.source_line(op.eqn)}",
            expected="experts in a batched product, (number, rows, width) by (number, width, width), or rows sorted by "
            "their expert, multiplied by jax.lax.ragged_dot, and brought back",
            got=f"experts in a ragged product; {note or 'its rows are not sorted by the number of an expert'}",
            hint=f"leave the {axis} axis out: the search without a recipe may split the groups, and autopar.constrain "
            "pins them",
        )
    if not sizes:
        raise InvalidArgumentError(
            where=f"recipe, {axis} axis of {parts} devices",
            expected=f"a step with matrices of several {what.value}s",
            got="none: no product of weights keeps a dimension apart that counts neither examples nor positions",
            hint=f"leave the {axis} axis out, or write the {what.value}s as one array, (number, ...), in one einsum",
        )


# The least by which two axes make the state of a device smaller, as a share of it: the search goes over more layouts.
LEAST_GAIN = 0.005
_HEADS_ALONE = frozenset({Dimension.HEAD})


def with_groups(binding: Binding, graph: OpGraph, num_devices: int) -> Binding:
    """A binding that knows what divides the heads and the state of a graph with annotated values, on so many devices:
    its axes are then cut as they need it.

    Raises: InvalidArgumentError where the sizes do not make up the devices.
    """
    binding = dataclasses.replace(binding, state_parts=0)  # asked of the axes as they are named
    if any(use.splits_heads and size != 1 for use, size in zip(binding.axes, binding.sizes, strict=True)):
        binding = dataclasses.replace(binding, heads=common_heads(graph))
    return dataclasses.replace(binding, state_parts=_state_parts(binding, graph, num_devices))


def common_heads(graph: OpGraph) -> int:
    """The largest number of devices that can share the heads of queries, keys and values; 0 without any.

    Of queries in groups that share keys, (heads of keys, queries of each), the second dimension counts none of these.
    """
    sizes = [
        [n for n, names in zip(v.shape, v.dimensions, strict=True) if names == _HEADS_ALONE and n > 1]
        for v in graph.values
        if v.dimensions
    ]
    ungrouped = [n for found in sizes if len(found) == 1 for n in found]
    return math.gcd(*(ungrouped or [n for found in sizes for n in found]))


def _state_parts(binding: Binding, graph: OpGraph, num_devices: int) -> int:
    """Among how many devices of an axis the state is shared out with the least of it on each; 0: all that it has."""
    mesh, constraints = binding.on(num_devices)
    axis = next((a for a, use in enumerate(constraints.axes) if use.shares_state), None)
    if axis is None:
        return 0
    values = [graph.values[graph.block.inputs[position]] for position in graph.donated]

    def bytes_on_each(parts: int) -> float:
        sizes = (*mesh.axis_sizes[:axis], parts, *mesh.axis_sizes[axis + 1 :])
        inside = LogicalMesh(axis_sizes=sizes)
        return bytes_on_each_device(values, inside, constraints)

    n = mesh.axis_sizes[axis]
    best = min((parts for parts in range(2, n + 1) if n % parts == 0), key=bytes_on_each, default=n)
    return best if bytes_on_each(best) < (1 - LEAST_GAIN) * bytes_on_each(n) else 0


def bytes_on_each_device(values: Iterable[Value], mesh: LogicalMesh, constraints: Constraints) -> float:
    """The least bytes of values on each device, where each is split over all devices that may split it."""
    return sum(value.nbytes / _most_parts(value, mesh, constraints) for value in values)


def _most_parts(value: Value, mesh: LogicalMesh, constraints: Constraints) -> int:
    """The most parts that allowed layouts split a value into."""
    layouts = list(enumerate_layouts(value.shape, mesh))
    allowed = constraints.allowed(value, layouts)
    return max(at.shards(mesh) for at, is_allowed in zip(layouts, allowed, strict=True) if is_allowed)
