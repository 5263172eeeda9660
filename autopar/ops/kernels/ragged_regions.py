"""Finds mixtures of experts with ragged products in a graph: rows sorted by their expert, multiplied, and sent back.

A layer sorts the rows of all tokens by the number of their expert, so that the rows of one expert lie side by side, and
undoes it after the products. The order of all rows depends on all tokens, what comes out for a token on its own rows
alone. So any part of the tokens, sorted by itself, gives that part of the result: devices and micro-batches sort their
own tokens, and nothing is gathered.

A *region* is what lies between a sort and its undoing. Its values have a dimension of sorted rows. It is entered where
rows are taken in sorted order (a gather, or the gradient of one that undoes the sort) and left where they are brought
back (a gather by the inverse of the order, a scatter) or summed over (gradients of matrices). In between each row is
computed of itself and of its expert's matrix alone. Each of these is proven of the operations, whatever their spelling:

- The order is that of a sort by the expert's number; indices into it are functions of its places, known by their values
  (`index_functions`).
- The sizes of groups are how often each expert is chosen, of as many experts as there are matrices.
- An operation on rows has their dimension as a factor of its own, in its operands and results.

What is found becomes one operation for each pass: what the forward pass makes of tokens, and what the backward pass
makes of them and of the gradients that reach it. A backward pass computes the rows of the forward pass again, as that
of attention does, so that no sorted rows are kept: they would be those of other devices under another plan.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from autopar.common import jax_compat
from autopar.ir.graph import Atom, Block, Constant, FactorKind, Op, OpKind, read_by
from autopar.ir.primitives import RAGGED_PRODUCT, is_inexact
from autopar.ir.rewrite import Fresh, makers
from autopar.ops.kernels.grouped import dims_of, is_grouped_product
from autopar.ops.kernels.index_functions import Known, compressed, constant, known_of

_ONE_OPERAND = frozenset({"reshape", "squeeze", "expand_dims", "transpose", "convert_element_type", "copy", "name"})


class NotUnderstood(Exception):
    """An operation on sorted rows that is not understood. Internal."""

    def __init__(self, op: Op, why: str = "") -> None:
        super().__init__(why)
        self.op, self.why = op, why

    @property
    def text(self) -> str:
        return (
            f"rows of all examples are sorted together: {self.op.primitive} at {jax_compat.source_line(self.op.eqn)} "
            f"takes {self.why or 'rows in sorted order'}"
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Order:
    """The sorted order of one sort: of `num_rows` places, of which each has a number from 0 on (its *choice*: that of
    an expert for a token).

    `experts`: the values that are sorted, the expert of each choice.
    """

    sort: Op
    experts: int
    num_rows: int

    @property
    def places(self) -> np.ndarray:
        return np.arange(self.num_rows)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inverse:
    """The place in the sorted order of each choice."""

    order: Order


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """A value with a dimension of sorted rows."""

    order: Order
    dim: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Rows in sorted order: of values that have one for each choice, or for each token (`per_token`: how many choices a
    token has; 1 where rows are those of choices). `sources`: one for each result.
    """

    sources: tuple[Atom, ...]
    per_token: int = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """Rows brought back to the order of choices, or added up for each token, onto `base` if it is no zeros.

    `summed`: an operation that sums over the rows instead, whose result is no row of any.
    """

    rows: int
    per_token: int
    base: int | None = None
    summed: bool = False


Role = Entry | Exit | None


@dataclasses.dataclass(slots=True, eq=False)
class Region:
    """The operations of one order in a block: by id, what they are (None: on rows as they lie). `spread`: values that
    are the same for all rows, and the dimension of rows. `by_choice`: the first choices of all tokens come before all
    second ones, rather than the choices of a token one after the other.
    """

    order: Order
    num_tokens: int = 0
    by_choice: bool = False
    roles: dict[int, Role] = dataclasses.field(default_factory=dict)
    products: list[Op] = dataclasses.field(default_factory=list)
    spread: dict[int, int] = dataclasses.field(default_factory=dict)
    obstacle: NotUnderstood | None = None


class RegionReader:
    """Reads the equations of a block in order."""

    def __init__(self, block: Block, fresh: Fresh, constants: Mapping[int, Known]) -> None:
        """`constants`: known values around the block, or among its inputs."""
        self.block, self.fresh = block, fresh
        self.maker = makers(block.ops)
        self.known: dict[int, Known] = dict(constants)
        self.rows: dict[int, Rows] = {}
        self.regions: dict[int, Region] = {}  # by the sorted values
        self.bounds: dict[int, tuple[float, float]] = {}  # the least and the largest number of a value
        self.same: dict[int, int] = {}  # what a barrier hands on: the value before it

    def run(self) -> list[Region]:
        for op in self.block.ops:
            if op.kind is OpKind.BARRIER:
                for a, v in zip(op.inputs, op.outputs, strict=True):
                    if isinstance(a, int):
                        self.same[v] = self.front(a)
            elif op.kind is OpKind.EQUATION:
                self.read(op)
            else:
                for a in read_by(op):
                    if (rows := self.rows_of(a)) is not None:
                        self.refused(rows.order, op, "a loop over sorted rows")
        for a in self.block.outputs:
            if isinstance(a, int) and (rows := self.rows_of(a)) is not None:
                self.refused(rows.order, self.maker[self.front(a)], "rows that leave a loop in sorted order")
        found = (r for r in self.regions.values() if r.products)
        return [r for r in found if any(isinstance(role, Exit) for role in r.roles.values()) or r.obstacle]

    def front(self, atom: int) -> int:
        return self.same.get(atom, atom)

    def rows_of(self, atom: Atom) -> Rows | None:
        return self.rows.get(self.front(atom)) if isinstance(atom, int) else None

    def known_of(self, atom: Atom) -> Known | None:
        return constant(atom) if isinstance(atom, Constant) else self.known.get(self.front(atom))

    def is_inside(self, region: Region, atom: Atom) -> bool:
        """Whether a value is one of a region's own."""
        rows = self.rows_of(atom)
        return (rows is not None and rows.order is region.order) or (
            isinstance(atom, int) and self.front(atom) in region.spread
        )

    def shape(self, atom: Atom) -> tuple[int, ...]:
        return atom.shape if isinstance(atom, Constant) else self.fresh.values[atom].shape

    def refused(self, order: Order, op: Op, why: str) -> None:
        region = self.regions[order.experts]
        region.obstacle = region.obstacle or NotUnderstood(op, why)

    # One equation

    def read(self, op: Op) -> None:
        known = [self.known_of(a) for a in op.inputs]
        if op.primitive == "sort" and self.sort(op, known):
            return
        orders = {rows.order for a in op.inputs if (rows := self.rows_of(a)) is not None}
        orders |= {o for k in known if k is not None and (o := _order_of(k)) is not None}
        if not orders:
            if len(op.outputs) == 1 and (found := known_of(op, known, self.shape(op.outputs[0]))) is not None:
                self.known[op.outputs[0]] = found
            elif op.primitive == "sub":
                self.repeated(op)
            elif op.primitive == "reduce_sum" and len(self.shape(op.inputs[0])) == 1:
                self.total(op)
            return
        if len(orders) > 1:
            for order in orders:
                self.refused(order, op, "rows of two sorts")
            return
        (order,) = orders
        try:
            self.on_rows(order, op, known)
        except NotUnderstood as error:
            self.refused(order, op, error.why)
            if op.primitive == "gather" and not self.regions[order.experts].products:  # its products say why
                self.rows[op.outputs[0]] = Rows(order=order, dim=0)

    def sort(self, op: Op, known: Sequence[Known | None]) -> bool:
        """Whether it is a sort by experts, or one that inverts the order of such a sort, or its inverse again."""
        first, params = op.inputs[0], op.eqn.params
        if params["num_keys"] != 1 or len(self.shape(first)) != 1 or not isinstance(first, int):
            return False
        (num_rows,) = self.shape(first)
        if (key := known[0]) is not None:
            of_order = isinstance(key.source, Order | Inverse) and key.is_same(np.arange(num_rows))
            counting = [
                k is not None and k.source is None and np.array_equal(k.table, np.arange(num_rows)) for k in known[1:]
            ]
            if of_order and all(counting):
                undone = Inverse(order=key.source) if isinstance(key.source, Order) else key.source.order
                inverse = Known(source=undone, table=np.arange(num_rows))
                self.known.update(dict.fromkeys(op.outputs[1:], inverse))
                self.known[op.outputs[0]] = Known(source=None, table=np.arange(num_rows))
            return of_order and all(counting)
        experts = self.front(first)
        if experts in self.regions:
            order = self.regions[experts].order
        else:
            order = Order(sort=op, experts=experts, num_rows=num_rows)
            self.regions[experts] = Region(order=order)
        region = self.regions[experts]
        region.roles[op.id] = Entry(sources=op.inputs, per_token=1)
        for a, v, k in zip(op.inputs, op.outputs, known, strict=True):
            if k is not None and k.source is None:
                self.known[v] = Known(source=order, table=np.ascontiguousarray(k.table))
            elif self.rows_of(a) is not None:
                self.refused(order, op, "rows sorted again")
            else:
                self.rows[v] = Rows(order=order, dim=0)
        return True

    def on_rows(self, order: Order, op: Op, known: Sequence[Known | None]) -> None:
        """Raises: NotUnderstood."""
        if all(k is not None for k in known) and len(op.outputs) == 1:
            found = known_of(op, known, self.shape(op.outputs[0]))
            if found is not None:
                self.known[op.outputs[0]] = found
                return
        if op.primitive == "gather" and (place := known[1]) is not None and place.source is not None:
            self.gather(order, op, place)
        elif (
            op.primitive in ("scatter", "scatter-add") and (place := known[1]) is not None and place.source is not None
        ):
            self.scatter(order, op, place)
        elif any(k is not None and k.source is not None for k in known):
            raise NotUnderstood(op, "places in the sorted order as numbers")
        elif op.primitive == RAGGED_PRODUCT or is_grouped_product(op.eqn):
            self.product(order, op)
        else:
            self.other(order, op)

    def repeated(self, op: Op) -> None:
        """Enters the number of each sorted row's expert, as `jnp.repeat` computes it of the sizes of groups."""
        for region in self.regions.values():
            order, shape = region.order, self.shape(op.outputs[0])
            if shape == (order.num_rows,) and repeats_experts(self, op, order):
                self.enters(order, op, Entry(sources=(order.experts,), per_token=1))
                return

    def total(self, op: Op) -> None:
        """Enters the sum of the sizes of groups: as many as there are choices."""
        if np.dtype(op.eqn.outvars[0].aval.dtype).kind not in "iu":  # sums of gradients, which come of the whole model
            return
        for region in self.regions.values():
            if counts_choices(self, op.inputs[0], region.order):
                number = np.asarray(region.order.num_rows, op.eqn.outvars[0].aval.dtype)
                self.known[op.outputs[0]] = Known(source=None, table=number)
                return

    def enters(self, order: Order, op: Op, role: Entry) -> None:
        self.regions[order.experts].roles[op.id] = role
        self.rows[op.outputs[0]] = Rows(order=order, dim=0)

    def gather(self, order: Order, op: Op, place: Known) -> None:
        source, index = op.inputs
        numbers, shape, out = op.eqn.params["dimension_numbers"], self.shape(source), self.shape(op.outputs[0])
        of_index = self.shape(index)[:-1]
        plain = numbers.start_index_map == numbers.collapsed_slice_dims == (0,) and not numbers.operand_batching_dims
        offsets = tuple(range(len(of_index), len(out)))
        if not plain or tuple(numbers.offset_dims) != offsets or out != (*of_index, *shape[1:]):
            raise NotUnderstood(op, "rows that are gathered in another way")
        if isinstance(place.source, Inverse):
            rows = self.rows_of(source)
            if rows is None or rows.dim != 0 or not place.is_same(order.places):
                raise NotUnderstood(op, "rows that are gathered by other places")
            assert isinstance(source, int), "rows are a value"
            self.regions[order.experts].roles[op.id] = Exit(rows=source, per_token=1)
            return
        if self.rows_of(source) is not None or len(of_index) != 1 or not isinstance(source, int):
            raise NotUnderstood(op, "sorted rows in the order of others")
        numbers_of = self.known_of(source)
        is_inside = bool(place.table.size) and place.table.min() >= 0 and place.table.max() < shape[0]
        if numbers_of is not None and numbers_of.source is None and len(shape) == 1 and is_inside:
            self.known[op.outputs[0]] = Known(source=order, table=numbers_of.table[place.table])
            return
        if self.are_experts(order, source):
            source = order.experts
        self.enters(order, op, Entry(sources=(source,), per_token=self.per_token(order, op, place, shape[0])))

    def are_experts(self, order: Order, value: int) -> bool:
        """Whether values are the experts of an order, read once more."""
        one, other = (self.fresh.values[v] for v in (order.experts, value))
        same = (one.shape, one.dtype) == (other.shape, other.dtype)
        return same and _root(self, value, _IN_ORDER) == _root(self, order.experts, _IN_ORDER)

    def per_token(self, order: Order, op: Op, place: Known, count: int) -> int:
        """How many choices each of `count` tokens has by the index of tokens that a place has."""
        if count and order.num_rows % count == 0:
            times = order.num_rows // count
            for by_choice, token in enumerate((order.places // times, order.places % count)):
                if place.is_same(token):
                    return self.checked_tokens(order, op, times, bool(by_choice))
        times = max(order.num_rows // max(count, 1), 1)
        raise NotUnderstood(op, f"an index of {count} tokens other than choice // {times} or choice % {count}")

    def checked_tokens(self, order: Order, op: Op, times: int, by_choice: bool) -> int:
        region, tokens = self.regions[order.experts], order.num_rows // times
        if times > 1 and region.num_tokens and (region.num_tokens, region.by_choice) != (tokens, by_choice):
            raise NotUnderstood(op, "rows of other tokens")
        if times > 1:
            region.num_tokens, region.by_choice = tokens, by_choice
        return times

    def scatter(self, order: Order, op: Op, place: Known) -> None:
        base, _, updates = op.inputs
        numbers, shape, of_updates = op.eqn.params["dimension_numbers"], self.shape(base), self.shape(updates)
        plain = numbers.inserted_window_dims == numbers.scatter_dims_to_operand_dims == (0,)
        index_rank = len(of_updates) - len(numbers.update_window_dims)
        windows = tuple(numbers.update_window_dims) == tuple(range(index_rank, len(of_updates)))
        if not plain or not windows or numbers.operand_batching_dims or of_updates[index_rank:] != shape[1:]:
            raise NotUnderstood(op, "rows that are scattered in another way")
        is_sum = op.primitive == "scatter-add"
        if self.inverts(order, op, place):
            self.known[op.outputs[0]] = Known(source=Inverse(order=order), table=order.places)
            return
        kept = base if is_sum and isinstance(base, int) and not self.is_zero(base) else None
        if isinstance(place.source, Inverse):
            if not place.is_same(order.places) or shape[0] != order.num_rows or self.rows_of(updates) is not None:
                raise NotUnderstood(op, "rows that are scattered by other places")
            if kept is not None or not isinstance(updates, int):
                raise NotUnderstood(op, "rows that are added to others")
            self.enters(order, op, Entry(sources=(updates,), per_token=1))
            return
        rows = self.rows_of(updates)
        on_rows = self.rows_of(base) is not None or isinstance(base, Constant)
        if rows is None or rows.dim != 0 or index_rank != 1 or on_rows:
            raise NotUnderstood(op, "rows that are scattered among others")
        times = self.per_token(order, op, place, shape[0])
        if not is_sum and times > 1:
            raise NotUnderstood(op, "rows that replace one another")
        assert isinstance(updates, int), "rows are a value"
        self.regions[order.experts].roles[op.id] = Exit(rows=updates, per_token=times, base=kept)

    def inverts(self, order: Order, op: Op, place: Known) -> bool:
        """Whether numbers from 0 on are written at the places of a sorted order."""
        if place.source is not order or not place.is_same(order.places) or op.primitive != "scatter":
            return False
        if self.shape(op.inputs[0]) != (order.num_rows,):
            return False
        numbers = self.known_of(op.inputs[2])
        return numbers is not None and numbers.source is None and np.array_equal(numbers.table, order.places)

    def is_zero(self, atom: Atom) -> bool:
        known = self.known_of(atom)
        return known is not None and known.source is None and not compressed(known.table).any()

    # Operations on rows

    def product(self, order: Order, op: Op) -> None:
        dims = dims_of(op.eqn) if is_grouped_product(op.eqn) else None
        if dims is None:
            self.regions[order.experts].products.append(op)
            raise NotUnderstood(op, "a ragged product of other dimensions")
        lhs, rhs, sizes = (self.rows_of(a) for a in op.inputs)
        region = self.regions[order.experts]
        region.products.append(op)
        if lhs is None or lhs.dim != dims.rows or sizes is not None:
            raise NotUnderstood(op, "a ragged product of other rows")
        if self.shape(op.inputs[2]) != self.shape(region.products[0].inputs[2]):
            raise NotUnderstood(op, "another number of groups than the products before it")
        if not are_numbered(self, order, groups := self.shape(op.inputs[2])[0]):
            raise NotUnderstood(op, f"experts whose numbers may be others than 0 to {groups - 1}")
        if not counts_choices(self, op.inputs[2], order):
            raise NotUnderstood(op, "groups whose sizes are not how often each expert is chosen")
        if not dims.sums_rows:
            if rhs is not None:
                raise NotUnderstood(op, "matrices that are rows")
            region.roles[op.id] = None
            self.rows[op.outputs[0]] = Rows(order=order, dim=0)
            return
        over = op.eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers[0][1][0]
        if rhs is None or rhs.dim != over:
            raise NotUnderstood(op, "a ragged product of other rows")
        assert isinstance(op.inputs[0], int), "rows are a value"
        region.roles[op.id] = Exit(rows=op.inputs[0], per_token=1, summed=True)

    def other(self, order: Order, op: Op) -> None:
        rule = op.rule
        if rule is None or op.eqn.effects:
            raise NotUnderstood(op)
        factors = set()
        for a, dims in zip(op.inputs, rule.operands, strict=True):
            if (rows := self.rows_of(a)) is not None:
                if len(dims[rows.dim]) != 1:
                    raise NotUnderstood(op)
                factors.add(dims[rows.dim][0])
        if len(factors) != 1:
            raise NotUnderstood(op)
        (f,) = factors
        for a, dims in zip(op.inputs, rule.operands, strict=True):
            rows, has = self.rows_of(a), any(f in dim for dim in dims)
            if has and rows is None and not self.spread_over(order, a, [f in dim for dim in dims].index(True)):
                raise NotUnderstood(op, "rows beside others")
        places = [[d for d, dim in enumerate(dims) if f in dim] for dims in rule.results]
        if rule.factors[f].kind is FactorKind.SUM and not any(places) and len(op.outputs) == 1:
            row = next(a for a in op.inputs if isinstance(a, int) and self.rows_of(a) is not None)
            if op.primitive == "gather":
                raise NotUnderstood(op, "single rows that are taken by their place")
            if op.primitive == "scatter-add" and not self.is_zero(op.inputs[0]):
                raise NotUnderstood(op, "rows that are added to others")
            self.regions[order.experts].roles[op.id] = Exit(rows=row, per_token=1, summed=True)
            return
        alone = all(
            len(at) == 1 and dims[at[0]] == (f,) and self.shape(v)[at[0]] == order.num_rows
            for at, dims, v in zip(places, rule.results, op.outputs, strict=True)
        )
        if rule.factors[f].kind is not FactorKind.PASS or not alone:
            raise NotUnderstood(op)
        self.regions[order.experts].roles[op.id] = None
        for v, (dim,) in zip(op.outputs, places, strict=True):
            self.rows[v] = Rows(order=order, dim=dim)

    def spread_over(self, order: Order, atom: Atom, dim: int) -> bool:
        """Whether an array is the same for all rows: what a constant or another array is spread to."""
        if isinstance(atom, Constant):
            return atom.shape[dim] == 1
        known = self.known_of(atom)
        if known is not None and known.source is None:
            table = compressed(known.table)
            first = table.take([0], dim)
            if np.array_equal(table, np.broadcast_to(first, table.shape)):
                same = np.broadcast_to(first, known.table.shape)
                self.known[self.front(atom)] = dataclasses.replace(known, table=same)
                self.regions[order.experts].spread[self.front(atom)] = dim
                return True
        op = self.maker.get(self.front(atom))
        if op is None or op.primitive != "broadcast_in_dim":
            return False
        sources = dict(zip(op.eqn.params["broadcast_dimensions"], self.shape(op.inputs[0]), strict=True))
        if sources.get(dim, 1) != 1:
            return False
        self.regions[order.experts].roles[op.id] = None
        self.regions[order.experts].spread[op.outputs[0]] = dim
        return True


def _order_of(known: Known) -> Order | None:
    source = known.source
    return source.order if isinstance(source, Inverse) else source if isinstance(source, Order) else None


def constants_of(block: Block, fresh: Fresh, around: Mapping[int, Known]) -> dict[int, Known]:
    """The constants that a block computes, and those around it."""
    found = dict(around)
    for op in block.ops:
        if op.kind is OpKind.EQUATION and len(op.outputs) == 1:
            reads = [constant(a) if isinstance(a, Constant) else found.get(a) for a in op.inputs]
            if (known := known_of(op, reads, fresh.values[op.outputs[0]].shape)) is not None:
                found[op.outputs[0]] = known
        elif op.kind is OpKind.BARRIER:
            pairs = zip(op.inputs, op.outputs, strict=True)
            found |= {v: found[a] for a, v in pairs if isinstance(a, int) and a in found}
    return found


def constants_inside(op: Op, constants: Mapping[int, Known]) -> dict[int, Known]:
    """What is known of the inputs of an operation's blocks beside constants around it."""
    found = dict(constants)
    for block in op.blocks:
        given = (
            op.inputs[: op.num_consts] if op.kind is OpKind.SCAN else op.inputs[1:] if op.kind is OpKind.COND else ()
        )
        for a, v in zip(given, block.inputs, strict=False):
            known = constant(a) if isinstance(a, Constant) else constants.get(a)
            if known is not None:
                found[v] = known
    return found


# How often each expert is chosen


def counts_choices(reader: RegionReader, sizes: Atom, order: Order) -> bool:
    """Whether numbers are how often each of as many experts is chosen among all choices, of experts that there are."""
    if not isinstance(sizes, int):
        return False
    (groups,) = reader.shape(sizes)
    if not are_numbered(reader, order, groups):
        return False
    found = _Counts(reader, _root(reader, order.experts), groups).of(sizes)
    return found is not None and found.source == _COUNTS


def are_numbered(reader: RegionReader, order: Order, groups: int) -> bool:
    """Whether the numbers of the experts of an order are surely those of so many groups."""
    lowest, highest = _bounds(reader, _root(reader, order.experts), 0)
    return lowest >= 0 and highest < groups


def _root(reader: RegionReader, value: int, through: frozenset[str] = _ONE_OPERAND) -> int:
    """The value of which another is the same numbers, in another shape or type, and in another order too by default."""
    value = reader.front(value)
    op = reader.maker.get(value)
    while op is not None and op.primitive in through and isinstance(op.inputs[0], int):
        made, read = (np.dtype(of[0].aval.dtype) for of in (op.eqn.outvars, op.eqn.invars))
        if made.kind not in "iu" or made.itemsize < read.itemsize:  # numbers may wrap around
            break
        value = reader.front(op.inputs[0])
        op = reader.maker.get(value)
    return value


Bounds = tuple[float, float]
_NO_BOUNDS: Bounds = (-np.inf, np.inf)
_DEEPEST = 32
_OF_FIRST = _ONE_OPERAND | {"slice", "broadcast_in_dim", "dynamic_slice", "rev"}
_OF_ALL = frozenset({"concatenate", "max", "min", "clamp", "rem"})


def _bounds(reader: RegionReader, atom: Atom, depth: int) -> Bounds:
    """The least and the largest number that an array of integers may have."""
    if isinstance(atom, Constant):
        values = np.asarray(atom.literal.val)
        return (float(values.min()), float(values.max())) if values.size and values.dtype.kind in "iu" else _NO_BOUNDS
    value = reader.front(atom)
    if value not in reader.bounds:
        op = reader.maker.get(value)
        known = op is not None and op.kind is OpKind.EQUATION and depth <= _DEEPEST
        reader.bounds[value] = _bounds_of(reader, op, value, depth) if known and op is not None else _NO_BOUNDS
    return reader.bounds[value]


def _bounds_of(reader: RegionReader, op: Op, value: int, depth: int) -> Bounds:
    name, params = op.primitive, op.eqn.params
    if name in ("top_k", "approx_top_k"):
        axis = params["axis" if name == "top_k" else "reduction_dimension"]
        return (0, reader.shape(op.inputs[0])[axis] - 1) if value == op.outputs[1] else _NO_BOUNDS
    if name in ("argmax", "argmin"):
        return 0, reader.shape(op.inputs[0])[params["axes"][0]] - 1
    if name == "iota":
        return 0, reader.shape(value)[params["dimension"]] - 1
    if name == "sort":
        return _bounds(reader, op.inputs[op.outputs.index(value)], depth + 1)
    read = op.inputs[:1] if name in _OF_FIRST else op.inputs[1:] if name == "select_n" else op.inputs
    if name not in _OF_FIRST | _OF_ALL | {"select_n"}:
        return _NO_BOUNDS
    of = [_bounds(reader, a, depth + 1) for a in read]
    least, largest = ([ends[i] for ends in of] for i in range(2))
    if name in _OF_FIRST:
        dtype = np.dtype(op.eqn.outvars[0].aval.dtype)
        fits = dtype.kind in "iu" and np.iinfo(dtype).min <= least[0] and largest[0] <= np.iinfo(dtype).max
        return of[0] if fits else _NO_BOUNDS
    if name in ("select_n", "concatenate"):
        return min(least), max(largest)
    if name == "max":
        return max(least), max(largest)
    if name == "min":
        return min(least), min(largest)
    if name == "clamp":  # of the lower limit, the number and the upper limit
        return min(max(least[:2]), least[2]), min(max(largest[:2]), largest[2])
    return (0, min(largest[0], largest[1] - 1)) if least[0] >= 0 and least[1] > 0 else _NO_BOUNDS


def repeats_experts(reader: RegionReader, op: Op, order: Order) -> bool:
    """Whether numbers are those of experts, each as often as it is chosen: one less than the number of groups that
    begin at a place or before it, a group beginning after those before it.
    """

    def maker(atom: Atom, primitive: str) -> Op | None:
        found = reader.maker.get(reader.front(atom)) if isinstance(atom, int) else None
        return found if found is not None and found.primitive == primitive else None

    def sums(atom: Atom) -> Op | None:
        found = maker(atom, "cumsum")
        return found if found is not None and not found.eqn.params["reverse"] else None

    def is_number(atom: Atom, number: int) -> bool:
        known = reader.known_of(atom)
        return known is not None and known.source is None and bool((compressed(known.table) == number).all())

    if not is_number(op.inputs[1], 1) or (begun := sums(op.inputs[0])) is None:
        return False
    marks = maker(begun.inputs[0], "scatter-add")
    if marks is None or not is_number(marks.inputs[0], 0) or not is_number(marks.inputs[2], 1):
        return False
    index = marks.inputs[1]
    if (column := maker(index, "broadcast_in_dim")) is not None:
        index = column.inputs[0]
    if (wrapped := maker(index, "select_n")) is not None:  # another number where it is less than zero, which it is not
        index, is_less = wrapped.inputs[1], maker(wrapped.inputs[0], "lt")
        if is_less is None or is_less.inputs[0] != index or not is_number(is_less.inputs[1], 0):
            return False
    if (before := sums(index)) is None or (shifted := maker(before.inputs[0], "scatter")) is None:
        return False
    if not is_number(shifted.inputs[1], 0) or not is_number(shifted.inputs[2], 0):
        return False
    rolled = maker(shifted.inputs[0], "concatenate")
    found = (maker(a, "slice") for a in rolled.inputs) if rolled is not None else ()
    pieces = [piece for piece in found if piece is not None]
    if len(pieces) != 2 or pieces[0].inputs != pieces[1].inputs or len(rolled.inputs if rolled else ()) != 2:
        return False
    sizes = pieces[0].inputs[0]
    (groups,) = reader.shape(sizes)
    at = [tuple(int(piece.eqn.params[n][0]) for n in ("start_indices", "limit_indices")) for piece in pieces]
    return at == [(groups - 1, groups), (0, groups - 1)] and counts_choices(reader, sizes, order)


_COUNTS, _PARTIAL = "counts", "partial"  # sources: sums over all choices, and over some of them
_IN_ORDER = _ONE_OPERAND - {"transpose"}


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Experts:
    """Source: the experts of all choices, in the order of their elements in one value."""


def _counts_to(dtype: Any, number: int) -> bool:
    """Whether a type has every whole number up to this one."""
    dtype = np.dtype(dtype)
    if dtype.kind in "iu":
        return bool(np.iinfo(dtype).max >= number)
    return is_inexact(dtype) and number <= 2 ** (jnp.finfo(dtype).nmant + 1)


class _Counts:
    """Reads what is computed of the experts of all choices, back from what is asked for."""

    def __init__(self, reader: RegionReader, root: int, groups: int) -> None:
        self.reader, self.root, self.groups = reader, root, groups
        self.choices = int(np.prod(reader.shape(root)))
        self.found: dict[int, Known | None] = {}
        self.orders: dict[int, _Experts] = {}

    def of(self, atom: Atom) -> Known | None:
        if isinstance(atom, Constant):
            return constant(atom)
        asked = self.reader.front(atom)
        waiting = [(asked, False)]  # values, and whether their operands have been read: there may be thousands
        while waiting:
            value, is_next = waiting.pop()
            if is_next:
                self.found[value] = self.read(value)
            elif value not in self.found:
                self.found[value] = None  # of a value that depends on itself nothing is known
                waiting += [(value, True), *((v, False) for v in self.operands(value))]
        return self.found[asked]

    def operands(self, value: int) -> list[int]:
        """The values to read before this one."""
        op = self.reader.maker.get(value)
        if op is None or op.kind is not OpKind.EQUATION or len(op.outputs) != 1 or self.is_experts(value):
            return []
        return [self.reader.front(a) for a in op.inputs if isinstance(a, int)]

    def is_experts(self, value: int) -> bool:
        return _root(self.reader, value) == self.root or self.sorted_experts(value)

    def read(self, value: int) -> Known | None:
        reader = self.reader
        if self.is_experts(value):
            source = self.orders.setdefault(_root(reader, value, _IN_ORDER), _Experts())
            return Known(source=source, table=np.arange(self.groups))
        op = reader.maker.get(value)
        if op is None and (known := reader.known.get(value)) is not None and known.source is None:
            return known
        if op is None or op.kind is not OpKind.EQUATION or len(op.outputs) != 1:
            return None
        reads = [self.of(a) for a in op.inputs]
        if op.primitive == "scatter-add":
            return self.scattered(op, reads)
        if op.primitive == "reduce_sum":
            return self.summed(op, reads[0])
        sums = {r.source for r in reads if r is not None and r.source in (_COUNTS, _PARTIAL)}
        if sums and (op.primitive not in _IN_ORDER or not _counts_to(op.eqn.outvars[0].aval.dtype, self.choices)):
            return None
        if _COUNTS in sums:
            return reads[0]
        return known_of(op, reads, reader.shape(value))

    def sorted_experts(self, value: int) -> bool:
        rows = self.reader.rows_of(value)
        if rows is None or _root(self.reader, rows.order.experts) != self.root:
            return False
        maker = self.reader.maker[value]
        role = self.reader.regions[rows.order.experts].roles.get(maker.id)
        if not isinstance(role, Entry) or role.per_token != 1:
            return False
        source = role.sources[maker.outputs.index(value)]
        return isinstance(source, int) and _root(self.reader, source) == self.root

    def scattered(self, op: Op, reads: Sequence[Known | None]) -> Known | None:
        """Ones added up at the number of each expert."""
        base, index, ones = reads
        numbers = op.eqn.params["dimension_numbers"]
        plain = numbers.inserted_window_dims == numbers.scatter_dims_to_operand_dims == (0,)
        if not plain or numbers.update_window_dims or base is None or index is None or ones is None:
            return None
        is_count = (
            base.source is None and not base.table.any() and ones.source is None and bool((ones.table == 1).all())
        )
        same = isinstance(index.source, _Experts) and index.is_same(np.arange(self.groups))
        once = int(np.prod(self.reader.shape(op.inputs[2]))) == self.choices
        return Known(source=_COUNTS, table=np.zeros(0)) if is_count and same and once else None

    def summed(self, op: Op, read: Known | None) -> Known | None:
        """A one for each expert and its own number, added up over all choices."""
        if read is None or read.wide is None or read.spread:
            return None
        if not (isinstance(read.source, _Experts) or read.source == _PARTIAL):
            return None
        if not _counts_to(op.eqn.outvars[0].aval.dtype, self.choices):
            return None
        shape = self.reader.shape(op.inputs[0])
        axes, wide = set(op.eqn.params["axes"]), read.wide
        left = [d for d in range(len(shape)) if d not in axes and d != wide and shape[d] > 1]
        if wide in axes:
            return None
        if left:  # more sums follow
            return Known(source=_PARTIAL, table=read.table, wide=wide - sum(d < wide for d in axes))
        is_one = np.array_equal(read.table.astype(np.float64), np.eye(self.groups))
        return Known(source=_COUNTS, table=np.zeros(0)) if is_one else None


# Passes: what is computed of what reaches a region from outside, one after another


def passes_of(block: Block, region: Region, groups: Mapping[int, Any]) -> Iterator[tuple[int, list[Op]]]:
    """The operations by which a region is left, those together that one operation can stand for.

    An operation that reads, on a way outside of the region, what another one of them made comes later. `groups`: of
    operations by id, what else is kept apart. Yields how many passes came before, and the operations.
    """
    read = collections.Counter(v for op in block.ops for v in read_by(op))
    read.update(a for a in block.outputs if isinstance(a, int))
    read.subtract(a for op in region.products if isinstance(a := op.inputs[2], int))  # sizes are counted anew
    level: dict[int, int] = {}
    exits: dict[Any, list[Op]] = {}
    for op in block.ops:
        reached = max((level.get(v, 0) for v in read_by(op)), default=0)
        is_exit = isinstance(region.roles.get(op.id), Exit)
        if is_exit and read[op.outputs[0]] and is_inexact(op.eqn.outvars[0].aval.dtype):
            exits.setdefault((reached, groups[op.id]), []).append(op)
        if op.kind is OpKind.BARRIER:
            pairs = zip(op.inputs, op.outputs, strict=True)
            level.update((v, level.get(a, 0) if isinstance(a, int) else 0) for a, v in pairs)
        else:
            level.update(dict.fromkeys(op.outputs, reached + is_exit))
    for (reached, _), ops in sorted(exits.items(), key=lambda item: item[0][0]):
        yield reached, ops


def slice_of(region: Region, reader: RegionReader, exits: Sequence[Op]) -> list[Op]:
    """The operations of a region that some of those that leave it need, in order."""
    wanted = {op.id for op in exits}
    read: set[int] = set()
    ops: list[Op] = []
    for op in reversed(reader.block.ops):
        if op.id not in region.roles or (op.id not in wanted and read.isdisjoint(op.outputs)):
            continue
        ops.append(op)
        match region.roles[op.id]:
            case Entry():
                pass
            case Exit(rows=rows, summed=False):
                read.add(reader.front(rows))
            case _:
                read |= {reader.front(a) for a in op.inputs if isinstance(a, int) and reader.is_inside(region, a)}
    return ops[::-1]
