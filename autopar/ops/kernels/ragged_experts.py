"""Mixtures of experts with ragged products as operations: written into a graph, and run on one device's own tokens.

A pass of a region (`ragged_regions`) is a kernel with a rule. Of tokens (`t`) each device has some, sorts their rows
and multiplies them with the matrices: whole, or split over a dimension between two products. Gradients of matrices are
summands. Experts (`e`) may be split over axes that split tokens too: rows are then sent to the devices of their experts
and back (`row_exchange`). In all cases the region's own equations run, on the rows that there are.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from msgspec.structs import replace
from scipy.cluster.hierarchy import DisjointSet

from autopar.common import jax_compat
from autopar.common.paths import names_module
from autopar.errors import InvalidArgumentError
from autopar.ir.graph import Atom, Block, Constant, FactorKind, Op, OpGraph, OpKind, Rule, walk
from autopar.ir.primitives import LOCALLY_SUMMING, SCATTERS, linear_operands
from autopar.ir.rewrite import Fresh, in_order, makers, params_of_part, remove_dead, renumbered
from autopar.ir.rules import RuleBook, equation_key, with_rules
from autopar.ir.scan_pairs import JoinedBodies, with_joined_scans
from autopar.ir.traced_step import ExpertLoad
from autopar.ops.kernels import operation
from autopar.ops.kernels.grouped import grouped_admits, grouped_places, grouped_rule, is_grouped_product, with_room
from autopar.ops.kernels.index_functions import Known, compressed
from autopar.ops.kernels.operation import KernelRule, LocalFunction, ragged_work
from autopar.ops.kernels.ragged_regions import (
    Entry,
    Exit,
    Region,
    RegionReader,
    constants_inside,
    constants_of,
    passes_of,
    slice_of,
)
from autopar.ops.kernels.row_exchange import LATER_TURNS, Devices, RowExchange, busiest_share, quota, room_of

TOKENS, CHOICES, ROWS, EXPERTS = "t", "k", "rows", "experts"
EXPERT_FACTOR = "e"
PIECES = operation.UNNAMED
RESULT = -1  # in place of an operand's number
NAME = "ragged experts"


# The dimensions of a pass, and which of them may be split


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """A value that a pass reads or makes: with `lead` dimensions of choices or tokens in front, as `(t, k, ...)` or
    `(t, ...)`; without them where that is None.
    """

    value: int
    lead: int | None
    per_token: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """A dimension that is so many equal pieces: one behind the other, or element by element (`alternate`)."""

    count: int
    alternate: bool = False

    def spelled(self, size: int) -> tuple[int, int]:
        return (size // self.count, self.count) if self.alternate else (self.count, size // self.count)


WHOLE = Pieces(count=1)


class Dims:
    """The dimensions of the values of a pass; those that stand for one factor of an operation are one.

    So are a dimension and pieces of it, as gate and up are of their one product: a part of it is that of each piece.
    """

    def __init__(self, ops: Sequence[Op], region: Region, reader: RegionReader) -> None:
        self.ops, self.region, self.reader = ops, region, reader
        self.sets: DisjointSet = DisjointSet([TOKENS, CHOICES, ROWS, EXPERTS])
        self.whole: set[Any] = set()
        self.pieces: dict[Any, Pieces] = {}  # of dimensions that are several
        self.cuts: list[tuple[Any, Any, Pieces]] = []
        # By operation and operand, the dimensions over which they are added to sums.
        self.shares: dict[tuple[int, int], set[Any]] = {}
        for op in ops:
            self.read(op)
        self.join_pieces()
        for op in ops:  # what tells experts apart beside products needs all of them
            beside = region.roles[op.id] is None and not is_grouped_product(op.eqn)
            if beside and any(self.sets[EXPERTS] in self.of(a) for a in (*op.inputs, *op.outputs)):
                self.whole.add(EXPERTS)

    def of(self, atom: Atom) -> tuple[Any, ...]:
        """A name for each dimension."""
        if isinstance(atom, Constant):
            return (None,) * len(atom.shape)
        value = self.reader.front(atom)
        names = [(value, d) for d in range(len(self.reader.shape(value)))]
        for name in names:
            self.sets.add(name)
        return tuple(self.sets[name] for name in names)

    def pieces_of(self, value: int, dim: int) -> Pieces:
        return self.pieces.get((self.reader.front(value), dim), WHOLE)

    def join_pieces(self) -> None:
        """Joins dimensions and their pieces; where one is cut in two ways, both are whole."""
        for of, piece, how in self.cuts:
            members = self.sets.subset(of)
            several = [name for name in members if self.pieces.setdefault(name, how) != how]
            if several or {ROWS, EXPERTS} & (members | self.sets.subset(piece)):
                self.whole |= {of, piece}
        for _ in self.cuts:  # what is whole makes its pieces whole, and those what they are pieces of
            for of, piece, _ in self.cuts:
                if self.is_whole(of) or self.is_whole(piece) or self.sets.subset(piece) & self.pieces.keys():
                    self.whole |= {of, piece}
        for of, piece, _ in self.cuts:
            if not self.is_whole(of):
                self.join(of, piece)
        self.pieces = {name: how for name, how in self.pieces.items() if not self.is_whole(name)}

    def join(self, one: Any, other: Any) -> None:
        if one is not None and other is not None:
            is_whole = self.is_whole(one) or self.is_whole(other)
            self.sets.merge(one, other)
            if is_whole:
                self.whole.add(self.sets[one])

    def is_whole(self, name: Any) -> bool:
        return name is not None and self.sets[name] in {self.sets[x] for x in self.whole}

    def rule_of(self, op: Op) -> Rule:
        rule = grouped_rule(op.eqn) if is_grouped_product(op.eqn) else op.rule
        assert rule is not None, "equations have one"
        return rule

    def read(self, op: Op) -> None:
        role = self.region.roles[op.id]
        if isinstance(role, Entry):
            for source, v in zip(role.sources, op.outputs, strict=True):
                made = self.of(v)
                self.join(ROWS, made[0])
                for a, b in zip(self.of(source)[::-1], made[:0:-1], strict=False):
                    self.join(a, b)
        elif isinstance(role, Exit) and not role.summed:
            for rows in (role.rows,) if role.base is None else (role.rows, role.base):
                for a, b in zip(self.of(rows)[:0:-1], self.of(op.outputs[0])[::-1], strict=False):
                    self.join(a, b)
        else:
            self.factors(op)
            if is_grouped_product(op.eqn):
                _, (array, dim) = grouped_places(op.eqn)
                self.join(EXPERTS, self.of(op.outputs[0] if array == len(op.inputs) else op.inputs[array])[dim])
        self.whole.update(name for a in op.inputs if isinstance(a, int) for name in self.told_apart(a))

    def told_apart(self, value: int) -> list[Any]:
        """The dimensions along which numbers that are known, and the same for all rows, differ."""
        front = self.reader.front(value)
        known = self.reader.known.get(front) if front in self.region.spread else None
        if known is None:
            return []
        return [self.of(value)[d] for d, n in enumerate(compressed(known.table).shape) if n > 1]

    def factors(self, op: Op) -> None:
        rule = self.rule_of(op)
        cuts = [(self.of(a)[d], self.of(b)[d], how) for a, b, d, how in pieces_in(op, self.reader)]
        cuts += self.larger_parts(op, rule)
        cuts = [cut for cut in cuts if None not in cut]
        self.cuts += cuts
        are_cut = {name for of, piece, _ in cuts for name in (of, piece)}
        places: dict[int, list[tuple[Any, bool]]] = {}
        for atom, d, factors in rule.factored_dims((*op.inputs, *op.outputs)):
            for f in factors:
                if self.of(atom)[d] not in are_cut:
                    places.setdefault(f, []).append((self.of(atom)[d], len(factors) == 1))
        self.whole.update(self.of(atom)[d] for atom, d in numbered_dims(op))
        for f, at in places.items():
            names = [name for name, alone in at if alone]
            kind = rule.factors[f].kind
            in_parts = kind is FactorKind.PASS or (kind is FactorKind.SUM and sums_parts(op))
            if not in_parts or len(names) < len(at):
                self.whole.update(self.sets[name] for name, _ in at if name is not None)
            for a, b in itertools.pairwise(names):
                self.join(a, b)

    def larger_parts(self, op: Op, rule: Rule) -> list[tuple[Any, Any, Pieces]]:
        """Of dimensions that a reshape cuts in two, or makes of two: they, and the larger of these."""
        if op.primitive != "reshape":
            return []
        at = [(self.of(atom)[d], factors) for atom, d, factors in rule.factored_dims((*op.inputs, *op.outputs))]
        found = []
        for of, factors in at:
            if len(factors) == 2:
                sizes = [rule.factors[f].size for f in factors]
                larger = sizes.index(max(sizes))
                how = Pieces(count=sizes[1 - larger], alternate=larger == 0)
                found += [(of, name, how) for name, alone in at if alone == (factors[larger],)]
                self.whole.update(name for name, alone in at if alone == (factors[1 - larger],))
        return found

    def summed_over(self, op: Op, name: Any) -> bool:
        """Whether an operation sums over a dimension."""
        rule, atoms = self.rule_of(op), (*op.inputs, *op.outputs)
        at = {f for atom, d, factors in rule.factored_dims(atoms) for f in factors if self.of(atom)[d] == name}
        return any(rule.factors[f].kind is FactorKind.SUM for f in at)

    def summands(self, name: Any, exits: Sequence[Op]) -> bool | None:
        """Whether results are sums of those that devices make with parts of a dimension; None where it must be whole.

        A result has the dimension, or is linear in what was summed over it; of what is not, such as a bias that is
        added to the sum, each device adds a share (`shares`).
        """
        name, front = self.sets[name], self.reader.front
        partial: set[int] = set()
        shares: list[tuple[int, int]] = []
        left: list[tuple[bool, bool]] = []
        for op in self.ops:
            role = self.region.roles[op.id]
            if isinstance(role, Entry):
                continue
            if isinstance(role, Exit) and not role.summed:
                reads = {0} if front(role.rows) in partial else set()
                if reads and role.base is not None:
                    return None
                is_partial = bool(reads)
            else:
                reads = {i for i, a in enumerate(op.inputs) if isinstance(a, int) and front(a) in partial}
                sums = self.summed_over(op, name)
                together = min((x for x in linear_sets(op) if reads <= x), key=len, default=None)
                if reads and (sums or together is None):
                    return None
                shares += [(op.id, i) for i in (together or set()) - reads if reads]
                is_partial = sums or bool(reads)
            has = [name in map(self.sets.__getitem__, self.of(v)) for v in op.outputs]
            if is_partial and any(has):
                return None
            if is_partial:
                partial.update(op.outputs)
            if op in exits:
                left += [(is_partial, h) for h in has]
                shares += [(op.id, RESULT)] if not is_partial and not all(has) else []
        are_sums = any(p for p, _ in left)
        if not are_sums and not all(h for _, h in left):
            return None
        for place in shares:
            self.shares.setdefault(place, set()).add(name)
        return are_sums


def numbered_dims(op: Op) -> list[tuple[Atom, int]]:
    """The dimensions of an operation's arrays in which indices number the places, which a part has not all of."""
    if op.primitive == "gather":
        return [(op.inputs[0], d) for d in op.eqn.params["dimension_numbers"].start_index_map]
    if op.primitive in SCATTERS:
        dims = op.eqn.params["dimension_numbers"].scatter_dims_to_operand_dims
        return [(array, d) for array in (op.inputs[0], op.outputs[0]) for d in dims]
    return []


def pieces_in(op: Op, reader: RegionReader) -> Iterator[tuple[Atom, Atom, int, Pieces]]:
    """Values of an operation of which one is several pieces as large as the other along a dimension, and which."""
    params, name = op.eqn.params, op.primitive
    if name not in ("slice", "split", "pad", "concatenate"):
        return
    is_cut = name in ("slice", "split")
    ends = [(op.inputs[0], v) for v in op.outputs] if is_cut else [(op.outputs[0], a) for a in op.inputs]
    if name == "pad":
        ends = ends[:1]
    sizes = [[reader.shape(part) for _, part in ends]]
    if any(shape != sizes[0][0] for shape in sizes[0]):
        return
    for of, part in ends:
        for d, (n, size) in enumerate(zip(reader.shape(of), reader.shape(part), strict=True)):
            count = n // size if size else 0
            if size == 1 or n == size or count * size != n:
                continue
            first, step = 0, 1
            if name == "slice":
                first, step = params["start_indices"][d], (params["strides"] or (1,) * len(sizes[0][0]))[d]
            elif name == "pad":
                first, _, step = params["padding_config"][d]
                step += 1
            if step == count and 0 <= first < count:
                yield of, part, d, Pieces(count=count, alternate=True)
            elif step == 1 and first >= 0 and first % size == 0:
                yield of, part, d, Pieces(count=count)


def params_in_pieces(eqn: Any, whole: Sequence[int], part: Sequence[int]) -> dict[str, Any]:
    """The parameters of an equation between dimensions and their pieces, on parts of each piece. `whole`, `part`: the
    shape of its first operand.
    """
    params, name = eqn.params, eqn.primitive.name
    scales = list(zip(part, whole, strict=True))
    if name == "split":
        n, of = scales[params["axis"]]
        return {"sizes": tuple(size * n // of for size in params["sizes"])}
    if name == "pad":
        ends = zip(params["padding_config"], scales, strict=True)
        return {
            "padding_config": tuple(end if end[2] else (end[0] * n // of, end[1] * n // of, 0) for end, (n, of) in ends)
        }
    if name != "slice":
        return {}
    starts, limits, steps = [], [], params["strides"] or (1,) * len(scales)
    for first, limit, step, (n, of) in zip(
        params["start_indices"], params["limit_indices"], steps, scales, strict=True
    ):
        starts.append(first if step > 1 else first * n // of)
        limits.append(limit if n == of else starts[-1] + (-(-(limit - first) // step) * n // of - 1) * step + 1)
    return {"start_indices": tuple(starts), "limit_indices": tuple(limits)}


def sums_parts(op: Op) -> bool:
    """Whether an operation on parts of what it sums over makes summands; a gather reads its table by global numbers."""
    return is_grouped_product(op.eqn) or op.primitive in LOCALLY_SUMMING


def linear_sets(op: Op) -> list[set[int]]:
    if is_grouped_product(op.eqn):
        return [{0}, {1}]
    return [set(s) for s in linear_operands(op.primitive, op.eqn)]


# A pass on one device's tokens


class Pass:
    """A pass of a region as a function of arrays."""

    def __init__(
        self, region: Region, reader: RegionReader, ops: Sequence[Op], exits: Sequence[Op], again: bool
    ) -> None:
        self.region, self.reader, self.ops, self.exits, self.again = region, reader, ops, exits, again
        self.order = region.order
        self.tokens = region.num_tokens or self.order.num_rows
        self.choices = self.order.num_rows // self.tokens
        self.dims = Dims(ops, region, reader)
        values = {v for op in ops for v in (*op.outputs, *(reader.front(a) for a in op.inputs if isinstance(a, int)))}
        self.nbytes = {v: reader.fresh.values[v].nbytes for v in values}
        self.for_tokens = self.read_for_tokens()
        self.arguments = self.read_arguments()
        self.results = [self.result(op) for op in exits]
        self.rule = self.written_rule()
        self.whole_sizes = {
            name: n for a in self.arguments for name, n in zip(self.names(a), self.shape(a), strict=True)
        }

    def read_arguments(self) -> list[Argument]:
        found: dict[tuple[int, bool], Argument] = {}

        def add(atom: Atom, per_token: int | None) -> None:
            if isinstance(atom, int) and (atom, per_token is not None) not in found:
                found[atom, per_token is not None] = self.argument(atom, per_token)

        add(self.order.experts, 1)
        for op in self.ops:
            match self.region.roles[op.id]:
                case Entry(sources=sources, per_token=times):
                    rows = [a for a, v in zip(sources, op.outputs, strict=True) if v in self.reader.rows]
                    for a in rows:
                        add(a, times)
                case Exit(base=base, per_token=times, summed=False):
                    if base is not None:
                        add(base, times)
                case _:
                    of = op.inputs[:2] if is_grouped_product(op.eqn) else op.inputs
                    for a in of:
                        if not self.reader.is_inside(self.region, a):
                            add(a, None)
        return list(found.values())

    def read_for_tokens(self) -> set[int]:
        """Rows that are only brought back, or of which only such are computed that are no fewer bytes."""
        found: set[int] = set()
        others: set[int] = set()
        for op in reversed(self.ops):
            role = self.region.roles[op.id]
            rows = {
                self.reader.front(a) for a in op.inputs if isinstance(a, int) and self.reader.rows_of(a) is not None
            }
            if isinstance(role, Exit) and not role.summed:
                found.add(self.reader.front(role.rows))
                continue
            kept = role is None and not is_grouped_product(op.eqn) and op.outputs[0] in found - others
            for v in rows:
                (found if kept and self.nbytes[v] <= self.nbytes[op.outputs[0]] else others).add(v)
        return found - others

    def argument(self, value: int, per_token: int | None) -> Argument:
        if per_token is None:
            return Argument(value=value, lead=None, per_token=1)
        shape, rows, lead = self.reader.shape(value), self.order.num_rows // per_token, 0
        while math.prod(shape[:lead]) < rows:
            lead += 1
        return Argument(value=value, lead=lead, per_token=per_token)

    def result(self, op: Op) -> Argument:
        role = self.region.roles[op.id]
        assert isinstance(role, Exit), "a region is left by it"
        return self.argument(op.outputs[0], None if role.summed else role.per_token)

    # The rule

    def shape(self, argument: Argument) -> tuple[int, ...]:
        """The shape in which a pass has it: tokens are a dimension of their own."""
        own = tuple({TOKENS: self.tokens, CHOICES: self.choices}[x] for x in self.lead(argument))
        return (*own, *self.spelled(argument, self.reader.shape(argument.value)[argument.lead or 0 :]))

    def lead(self, argument: Argument) -> tuple[Any, ...]:
        """The dimensions of tokens and choices that it has in front."""
        if argument.lead is None:
            return ()
        both = (CHOICES, TOKENS) if self.region.by_choice else (TOKENS, CHOICES)
        return (TOKENS,) if argument.per_token > 1 else both

    def spelled(self, argument: Argument, sizes: Sequence[int]) -> tuple[int, ...]:
        """The sizes of all dimensions behind these, where pieces have one of their own."""
        found: list[int] = []
        for d, n in enumerate(sizes, argument.lead or 0):
            pieces = self.dims.pieces_of(argument.value, d)
            found += pieces.spelled(n) if pieces.count > 1 else (n,)
        return tuple(found)

    def names(self, argument: Argument) -> tuple[Any, ...]:
        names = list(self.lead(argument))
        for d, name in enumerate(self.dims.of(argument.value)):
            if d >= (argument.lead or 0):
                pieces, own = self.dims.pieces_of(argument.value, d), self.dims.sets[name]
                both = (own, PIECES) if pieces.alternate else (PIECES, own)
                names += both if pieces.count > 1 else (own,)
        return tuple(names)

    def written_rule(self) -> KernelRule:
        arrays = [self.names(a) for a in (*self.arguments, *self.results)]
        texts = {TOKENS: TOKENS, CHOICES: CHOICES, PIECES: PIECES}
        whole, summed = {CHOICES, PIECES}, set()
        rows, experts = self.dims.sets[ROWS], self.dims.sets[EXPERTS]
        for name in (x for names in arrays for x in names):
            if name in texts:
                continue
            texts[name] = EXPERT_FACTOR if name == experts else f"d{len(texts) - 3}"
            if name == experts and not self.dims.is_whole(name):
                continue
            repeated = any(names.count(name) > 1 for names in arrays)
            if (
                name == rows
                or repeated
                or self.dims.is_whole(name)
                or (sums := self.dims.summands(name, self.exits)) is None
            ):
                whole.add(texts[name])
            elif sums:
                summed.add(texts[name])
        if any(a.lead is None for a in self.results):
            summed.add(TOKENS)
        named = [tuple(texts[x] for x in names) for names in arrays]
        named = [tuple(operation.UNNAMED if names.count(x) > 1 else x for x in names) for names in named]
        taken = frozenset(x for names in named for x in names)
        is_split = EXPERT_FACTOR in taken - whole
        return KernelRule(
            operands=tuple(named[: len(self.arguments)]), results=tuple(named[len(self.arguments) :]),
            whole=frozenset(whole & taken), summed=frozenset(summed & taken),
            exchanged=((EXPERT_FACTOR, TOKENS),) if is_split else (),
        )  # fmt: skip

    @property
    def exchanged(self) -> tuple[int, int] | None:
        """The array (operands, then results) and its dimension that tell which experts a device has; None: all."""
        if not self.rule.exchanged:
            return None
        places = (
            (i, names.index(EXPERT_FACTOR))
            for i, names in enumerate((*self.rule.operands, *self.rule.results))
            if EXPERT_FACTOR in names
        )
        return next(places, None)

    @functools.cached_property
    def tile(self) -> int:
        """The rows of the products are whole tiles of so many."""
        admitted = (grouped_admits(op.eqn) for op in self.region.products)
        return math.lcm(*(a.tile for a in admitted if a is not None))

    # On arrays

    def __call__(self, *arrays: Any, devices: Devices | None = None) -> tuple[Any, ...]:
        if self.again:  # what the forward pass computed is computed again, rather than being kept until now
            arrays = lax.optimization_barrier(arrays)
        first = _Run(self, arrays, devices)
        made = first.results()
        if not first.takes_turns:
            return made

        def another(carried: tuple[Any, tuple[Any, ...]]) -> tuple[Any, tuple[Any, ...]]:
            turn, sums = carried
            more = _Run(self, arrays, devices, turn).results()
            return turn + 1, tuple(a + b for a, b in zip(sums, more, strict=True))

        num_turns = first.exchange.num_turns
        with jax.named_scope(LATER_TURNS):
            _, made = lax.while_loop(lambda carried: carried[0] < num_turns, another, (jnp.ones_like(num_turns), made))
        return made


class _Run:
    """One run of a pass on arrays of any number of tokens. `devices`: those that share the experts.

    Rows are on the devices of their tokens (`here`), or on those of their experts (`there`), or on both. They are sent
    where an operation needs them. Each turn of sending makes the part of the results that its rows are in: they add up.
    """

    def __init__(self, made: Pass, arrays: Sequence[Any], devices: Devices | None, turn: Any = 0) -> None:
        self.made, self.region, self.reader, self.dims = made, made.region, made.reader, made.dims
        self.devices, self.turn, self.is_first = devices, turn, isinstance(turn, int)
        self.here: dict[int, Any] = {}
        self.there: dict[int, Any] = {}
        self.outer: dict[tuple[int, bool], Any] = {}
        self.sizes: dict[Any, int] = {}
        for argument, array in zip(made.arguments, arrays, strict=True):
            self.sizes.update(zip(made.names(argument), array.shape, strict=True))
            sizes = self.sizes_of(argument.value)[argument.lead or 0 :]
            array = array.reshape((*((-1,) if argument.lead is not None else ()), *sizes))
            self.outer[argument.value, argument.lead is not None] = array
        self.experts = self.outer[made.order.experts, True]

    @functools.cached_property
    def order(self) -> Any:
        return jnp.argsort(self.experts, stable=True)

    @functools.cached_property
    def inverse(self) -> Any:
        return jnp.argsort(self.order)

    @functools.cached_property
    def group_sizes(self) -> Any:
        """How many rows of each expert there are here."""
        groups = next(self.reader.shape(op.inputs[2])[0] for op in self.region.products)
        return jnp.sum(self.experts[:, None] == jnp.arange(groups, dtype=self.experts.dtype), axis=0, dtype=jnp.int32)

    @functools.cached_property
    def exchange(self) -> RowExchange:
        assert self.devices is not None, "rows are sent where devices share experts"
        return RowExchange(self.devices, self.experts[self.order], self.group_sizes, self.turn, self.made.tile)

    @property
    def takes_turns(self) -> bool:
        """Whether rows may be left after the first turn."""
        if self.devices is None or not any(is_grouped_product(op.eqn) for op in self.made.ops):
            return False
        num_rows = self.experts.shape[0]
        return quota(num_rows, self.devices.count, self.made.tile) < num_rows

    def results(self) -> tuple[Any, ...]:
        for op in self.made.ops:
            self.run(op)
        made = []
        for op, result in zip(self.made.exits, self.made.results, strict=True):
            array = self.share_of(op, RESULT, self.here[op.outputs[0]])
            tokens = {TOKENS: -1, CHOICES: self.made.choices}
            lead = [tokens[x] for x in self.made.lead(result)]
            made.append(array.reshape((*lead, *self.made.spelled(result, array.shape[bool(lead) :]))))
        return tuple(made)

    # Rows here and there

    def rows_here(self, value: int) -> Any:
        if value not in self.here:
            dim = self.reader.rows[value].dim
            back = self.exchange.to_tokens(jnp.moveaxis(self.there[value], dim, 0))
            self.here[value] = jnp.moveaxis(back, 0, dim)
        return self.here[value]

    def rows_there(self, value: int) -> Any:
        if value not in self.there and self.are_experts(value):
            self.there[value] = self.exchange.expert_numbers().astype(self.experts.dtype)
        elif value not in self.there and self.sent_before(value, {}) < self.made.nbytes[value]:
            op = self.reader.maker[value]
            self.there.update(zip(op.outputs, self.bound(op, True), strict=True))
        elif value not in self.there:
            dim = self.reader.rows[value].dim
            sent = self.exchange.to_experts(jnp.moveaxis(self.here[value], dim, 0))
            self.there[value] = jnp.moveaxis(sent, 0, dim)
        return self.there[value]

    def are_experts(self, value: int) -> bool:
        """Whether rows are the numbers of their experts, which devices of experts know."""
        op = self.reader.maker[value]
        role = self.region.roles[op.id]
        if not isinstance(role, Entry) or role.per_token > 1:
            return False
        source = role.sources[op.outputs.index(value)]
        return isinstance(source, int) and self.reader.front(source) == self.made.order.experts

    def sent(self, value: int, found: dict[int, float]) -> float:
        """The bytes that are sent for rows to be where experts are: of them, or of those that they are computed of."""
        if value not in found:
            is_there = value in self.there or self.are_experts(value)
            found[value] = 0.0 if is_there else min(self.made.nbytes[value], self.sent_before(value, found))
        return found[value]

    def sent_before(self, value: int, found: dict[int, float]) -> float:
        op = self.reader.maker[value]
        if self.region.roles[op.id] is not None or is_grouped_product(op.eqn):
            return math.inf
        rows = (a for a in op.inputs if isinstance(a, int) and self.reader.rows_of(a) is not None)
        return math.fsum(self.sent(self.reader.front(a), found) for a in rows)

    def read(self, atom: Atom, there: bool) -> Any:
        """An operand, its rows where they are asked for."""
        if isinstance(atom, Constant):
            return np.asarray(atom.literal.val, atom.literal.aval.dtype)
        front = self.reader.front(atom)
        if front in self.here or front in self.there:
            return self.rows_there(front) if there else self.rows_here(front)
        if front in self.region.spread:
            op = self.reader.maker.get(front)
            if op is not None and op.id in self.region.roles:
                return self.bound(op, there)[0]
            return jnp.broadcast_to(compressed(self.reader.known[front].table), self.local_shape(front, there))
        return self.outer[atom, False]

    def local_shape(self, value: int, there: bool) -> tuple[int, ...]:
        num_rows = self.exchange.num_places if there else self.experts.shape[0]
        return self.sizes_of(value, {self.dims.sets[ROWS]: num_rows})

    def sizes_of(self, value: int, known: Mapping[Any, int] = MappingProxyType({})) -> tuple[int, ...]:
        """The sizes of a value's dimensions here, where they are known; else those of all devices."""
        sizes, at = {**self.sizes, **known}, enumerate(zip(self.dims.of(value), self.reader.shape(value), strict=True))
        return tuple(sizes[x] * self.dims.pieces_of(value, d).count if x in sizes else n for d, (x, n) in at)

    def token_of(self, choices: Any, per_token: int) -> Any:
        return choices % (choices.shape[0] // per_token) if self.region.by_choice else choices // per_token

    # Operations

    def run(self, op: Op) -> None:
        role = self.region.roles[op.id]
        if isinstance(role, Entry):
            index = self.order if role.per_token == 1 else self.token_of(self.order, role.per_token)
            for a, v in zip(role.sources, op.outputs, strict=False):
                if isinstance(a, int) and v in self.reader.rows:
                    self.here[v] = self.outer[a, True].at[index].get(mode="promise_in_bounds")
        elif isinstance(role, Exit) and not role.summed:
            self.here[op.outputs[0]] = self.brought_back(role)
        elif op.outputs[0] not in self.region.spread:
            values = (a for a in op.inputs if isinstance(a, int))
            rows = [self.reader.front(a) for a in values if self.reader.rows_of(a) is not None]
            is_product = is_grouped_product(op.eqn)
            there = self.devices is not None and (is_product or self.stays_there(op, rows))
            made = self.product(op) if is_product else self.bound(op, there)
            is_rows = self.reader.rows_of(op.outputs[0]) is not None
            (self.there if there and is_rows else self.here).update(zip(op.outputs, made, strict=True))

    def stays_there(self, op: Op, rows: Sequence[int]) -> bool:
        """Whether rows are computed where experts are: not where only tokens need them, and they are as many bytes."""
        nbytes, (first, *_) = sum(self.made.nbytes[v] for v in rows if v not in self.here), op.outputs
        is_for_tokens = first in self.made.for_tokens and nbytes <= self.made.nbytes[first]
        return any(v in self.there for v in rows) and not is_for_tokens

    def brought_back(self, role: Exit) -> Any:
        rows = self.of_turn(self.rows_here(self.reader.front(role.rows)), 0, False)
        outer = None if role.base is None or not self.is_first else self.outer[role.base, True]
        if role.per_token == 1:
            back = rows.at[self.inverse].get(mode="promise_in_bounds", unique_indices=True)
            return back if outer is None else back + outer
        shape = (rows.shape[0] // role.per_token, *rows.shape[1:])
        base = jnp.zeros(shape, rows.dtype) if outer is None else outer
        return base.at[self.token_of(self.order, role.per_token)].add(rows, mode="promise_in_bounds")

    def product(self, op: Op) -> list[Any]:
        sizes, eqn = self.group_sizes, op.eqn
        if self.devices is not None:
            sizes, eqn = self.exchange.sizes, with_room(eqn, room_of(self.devices.count))
        operands = [self.read(a, self.devices is not None) for a in op.inputs[:2]]
        return jax_compat.bind(eqn, [*operands, sizes.astype(op.eqn.invars[2].aval.dtype)])

    def bound(self, op: Op, there: bool) -> list[Any]:
        """An equation on the rows that there are. Sums over them leave out the filling after those of experts."""
        operands = [self.share_of(op, i, self.read(a, there)) for i, a in enumerate(op.inputs)]
        role = self.region.roles[op.id]
        if isinstance(role, Exit):
            atoms = zip(operands, op.inputs, strict=True)
            operands = [self.of_turn(array, self.dim_of_rows(a), there) for array, a in atoms]
        whole = [tuple(v.aval.shape) for v in op.eqn.invars[:1]]
        part = [tuple(np.shape(a)) for a in operands[:1]]
        sizes = self.local_shape(op.outputs[-1], there)
        params = params_of_part(op.eqn, sizes, whole, part)
        for of_all, of_part in zip(whole, part, strict=True):
            params |= params_in_pieces(op.eqn, of_all, of_part)
        return jax_compat.bind(op.eqn, operands, **params)

    def share_of(self, op: Op, operand: int, array: Any) -> Any:
        """What this device adds to a sum of an array that all devices have."""
        names = self.made.dims.shares.get((op.id, operand), ())
        share = math.prod(self.sizes[x] / self.made.whole_sizes[x] for x in names if x in self.sizes)
        return array if share == 1 else array * jnp.asarray(share, array.dtype)

    def dim_of_rows(self, atom: Atom) -> int | None:
        """The dimension of rows, of what is the same for all rows too; None of an array without one."""
        rows = self.reader.rows_of(atom)
        if rows is not None:
            return rows.dim
        return self.region.spread.get(self.reader.front(atom)) if isinstance(atom, int) else None

    def of_turn(self, array: Any, dim: int | None, there: bool) -> Any:
        """The rows that are sent in this turn, without the filling where experts are; zeros in place of others."""
        if dim is None or (not there and not self.takes_turns):
            return array
        is_row = self.exchange.is_row() if there else self.exchange.in_turn()
        is_row = is_row.reshape([-1 if d == dim else 1 for d in range(array.ndim)])
        return jnp.where(is_row, array, jnp.zeros_like(array))


# In a graph


def ragged_experts(graph: OpGraph, rules: RuleBook) -> OpGraph:
    """The graph with an operation for each pass of each mixture of experts that is found."""
    if not any(op.kind is OpKind.EQUATION and is_grouped_product(op.eqn) for op in walk(graph.block)):
        return graph
    fresh = Fresh(graph)
    block = _rewritten(graph.block, fresh, {})
    if block is not graph.block:
        block = with_rules(remove_dead(block), rules)
        graph = renumbered(dataclasses.replace(graph, values=tuple(fresh.values), block=block))
    return dataclasses.replace(graph, block=_noted(graph.block, Fresh(graph), {}))


def with_load(graph: OpGraph, load: ExpertLoad) -> OpGraph:
    """The graph with so many rows for each expert: of each mixture by the first pattern that names its module, or one
    that it is in, and has as many counts as it has experts.

    Raises: InvalidArgumentError for counts that no mixture has.
    """
    mixtures = [(op, n) for op in walk(graph.block) if (n := num_experts(op)) is not None]
    number: dict[int, int] = {}
    for i, (pattern, layers) in enumerate(load):
        named = [(op, n) for op, n in mixtures if names_module(pattern, op.module)]
        if all(n != len(layers[0]) for _, n in named):
            others = ", ".join(map(str, sorted({n for _, n in named})))
            modules = ", ".join(sorted({op.module or "(no module)" for op, _ in mixtures}))
            raise InvalidArgumentError(
                where="Search(expert_load=...)" if pattern == "**" else f"Search(expert_load={{{pattern!r}: ...}})",
                expected=f"counts of {others} experts, as the step's mixtures have" if others
                else f"the path of a module with a mixture, or its end: {modules}" if mixtures
                else "a step with a mixture of sorted rows (jax.lax.ragged_dot) whose experts devices can share",
                got=f"counts of {len(layers[0])} experts",
                hint="name one of these modules, or the end of its path; '**' names all" if mixtures and not named
                else "give one count for each expert, or a list of such lists, one for each layer",
            )  # fmt: skip
        number |= {op.id: number.get(op.id, i) for op, n in named if n == len(layers[0])}
    busiest = [functools.cache(functools.partial(busiest_share, layers)) for _, layers in load]

    def loaded(block: Block) -> Block:
        ops = []
        for op in block.ops:
            if op.blocks:
                op = replace(op, blocks=tuple(map(loaded, op.blocks)))
            if (i := number.get(op.id)) is not None:
                function = dataclasses.replace(op.eqn.params["function"], busiest=busiest[i])
                eqn = op.eqn.replace(params=op.eqn.params | {"function": function})
                op = replace(op, eqn=eqn, key=f"{op.key}, load {i}")  # layers of other loads are no equal layers
            ops.append(op)
        return replace(block, ops=tuple(ops))

    return dataclasses.replace(graph, block=loaded(graph.block))


def num_experts(op: Op) -> int | None:
    """How many experts a pass of a mixture has that devices can share; None of other operations."""
    if op.kind is not OpKind.EQUATION or not operation.is_kernel(op.eqn) or op.eqn.params["function"].name != NAME:
        return None
    if (place := op.eqn.params["function"].exchanged) is None:
        return None
    array, dim = place
    return int((*op.eqn.invars, *op.eqn.outvars)[array].aval.shape[dim])


def _noted(block: Block, fresh: Fresh, around: Mapping[int, Known]) -> Block:
    """The block with a note at each product whose region is not understood: the operation that stands in the way."""
    regions = RegionReader(block, fresh, around).run()
    notes = {op.id: r.obstacle.text for r in regions if r.obstacle is not None for op in r.products}
    constants = constants_of(block, fresh, around)
    ops = []
    for op in block.ops:
        if op.blocks:
            known = constants_inside(op, constants)
            op = replace(op, blocks=tuple(_noted(b, fresh, known) for b in op.blocks))
        if op.id in notes and op.rule is not None:
            op = replace(op, rule=replace(op.rule, note=notes[op.id]))
        ops.append(op)
    return replace(block, ops=tuple(ops))


def _rewritten(block: Block, fresh: Fresh, around: Mapping[int, Known]) -> Block:
    if any(op.blocks for op in block.ops):
        constants = constants_of(block, fresh, around)
        block = with_joined_scans(block, fresh, functools.partial(_rewritten_pair, fresh, constants))
        ops = []
        for op in block.ops:
            known = constants_inside(op, constants) if op.blocks else {}
            inner = tuple(_rewritten(b, fresh, known) for b in op.blocks)
            ops.append(op if inner == op.blocks else replace(op, blocks=inner))
        if any(new is not old for new, old in zip(ops, block.ops, strict=True)):
            block = replace(block, ops=tuple(ops))
    return _Writer(block, fresh, frozenset(), around).run()


def _rewritten_pair(
    fresh: Fresh, constants: Mapping[int, Known], first: Op, second: Op, joined: JoinedBodies
) -> JoinedBodies | None:
    known = constants_inside(first, constants_inside(second, constants))
    writer = _Writer(joined.block, fresh, joined.first, known)
    block = writer.run()
    if not writer.added:
        return None
    return dataclasses.replace(joined, block=block, first=joined.first | writer.of_first)


class _Writer:
    """Puts operations in the place of the passes of a block. `first`: operations that stay apart from the others."""

    def __init__(self, block: Block, fresh: Fresh, first: frozenset[int], constants: Mapping[int, Known]) -> None:
        self.block, self.fresh, self.first, self.constants = block, fresh, first, constants
        self.added: list[Op] = []
        self.of_first: set[int] = set()
        self.replaced: dict[int, int] = {}
        self.makers = makers(block.ops)

    def run(self) -> Block:
        reader = RegionReader(self.block, self.fresh, self.constants)
        apart = {op.id: (op.id in self.first, op.role) for op in self.block.ops}
        for region in reader.run():
            if region.obstacle is None:
                for number, exits in passes_of(self.block, region, apart):
                    self.write(Pass(region, reader, slice_of(region, reader, exits), exits, number > 0))
        return in_order(self.block, self.added, self.replaced) if self.added else self.block

    def write(self, made: Pass) -> None:
        like = made.exits[-1]
        operands = [self.reshaped(a.value, made.shape(a), like) for a in made.arguments]
        function = LocalFunction(
            name=NAME, function=made, rule=made.rule, exchanged=made.exchanged, is_program=True,
            takes_any_part=all(grouped_admits(op.eqn) is None for op in made.region.products),
        )  # fmt: skip
        values = [self.fresh.values[v] for v in operands]
        avals = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in values]
        work = functools.cache(lambda key: ragged_work(function.program([jax.ShapeDtypeStruct(*a) for a in key])))
        function = dataclasses.replace(function, work_on=lambda of: work(tuple((tuple(a.shape), a.dtype) for a in of)))
        eqn = _equation(lambda *args: operation.bind(function, args), avals, like)
        key = f"{equation_key(eqn)}#{hashlib.sha256(str(function.program(avals)).encode()).hexdigest()}"
        op = self.operation(eqn, operands, like, rule=operation.rule_of(eqn), key=key)
        for exit_op, argument, v in zip(made.exits, made.results, op.outputs, strict=True):
            self.replaced[exit_op.outputs[0]] = self.reshaped(v, made.reader.shape(argument.value), like)

    def operation(self, eqn: Any, operands: Sequence[int], like: Op, **fields: Any) -> Op:
        outputs = tuple(
            self.fresh.value(tuple(v.aval.shape), str(v.aval.dtype), jax_compat.itemsize(v.aval)) for v in eqn.outvars
        )
        op = replace(
            like, id=self.fresh.op_id(), primitive=eqn.primitive.name, eqn=eqn, inputs=tuple(operands), outputs=outputs,
            **fields,
        )  # fmt: skip
        self.added.append(op)
        if like.id in self.first:
            self.of_first.add(op.id)
        return op

    def reshaped(self, value: int, shape: tuple[int, ...], like: Op) -> int:
        own = self.fresh.values[value]
        if own.shape == shape:
            return value
        maker = self.makers.get(value)
        source = maker.inputs[0] if maker is not None and maker.primitive == "reshape" else None
        if isinstance(source, int) and self.fresh.values[source].shape == shape:
            return source
        eqn = _equation(lambda a: a.reshape(shape), [jax.ShapeDtypeStruct(own.shape, own.dtype)], like)
        return self.operation(eqn, [value], like, rule=None, key=equation_key(eqn)).outputs[0]


def _equation(function: Any, avals: Sequence[Any], like: Op) -> Any:
    (eqn,) = jax_compat.open_jaxpr(jax.make_jaxpr(function)(*avals)).eqns
    return jax_compat.at_line_of(like.eqn, eqn)
