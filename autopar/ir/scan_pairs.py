"""A scan and one that goes back over it, rewritten as if their bodies were one."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Collection, Sequence

from msgspec.structs import replace

from autopar.ir.graph import Atom, Block, Op, OpKind, Value, free_values, read_by
from autopar.ir.rewrite import Fresh, named, reading, scan_equation


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JoinedBodies:
    """The bodies of two scans as one block, that of the first before that of the second. `first`: ids of the operations
    of the first; the last `num_ends` outputs are those of the second; `carried` are what the first hands from turn to
    turn, as it enters one of `trips`.
    """

    block: Block
    first: frozenset[int]
    num_ends: int
    carried: tuple[int, ...]
    trips: int

    @property
    def forward(self) -> tuple[Op, ...]:
        """The operations of the first body."""
        return tuple(op for op in self.block.ops if op.id in self.first)


# Both scans, and their bodies as one -> these rewritten; None where nothing changes.
Rewrite = Callable[[Op, Op, JoinedBodies], JoinedBodies | None]


def with_joined_scans(block: Block, fresh: Fresh, rewrite: Rewrite) -> Block:
    """The block with each scan, and each later one that reads what it stacks, rewritten together.

    What the second body then reads of the first is stacked, and nothing else but what is read elsewhere.
    """
    ops = list(block.ops)
    scans = [i for i, op in enumerate(ops) if op.kind is OpKind.SCAN]
    if len(scans) < 2:
        return block
    reads = [read_by(op) for op in ops]
    readers = collections.Counter(v for read in reads for v in read)
    readers.update(a for a in block.outputs if isinstance(a, int))
    for behind in scans:
        op = ops[behind]
        made_by = {v: i for i in scans if i < behind for v in ops[i].outputs}
        sources = [made_by[v] for v in op.inputs if isinstance(v, int) and v in made_by]
        for first in dict.fromkeys(i for i in sources if ops[i].trips == op.trips):
            readers.subtract(reads[behind])
            pair = _Pair(ops[first], ops[behind], {v for v in ops[first].outputs if readers[v]})
            if (found := rewrite(ops[first], ops[behind], pair.joined)) is not None:
                readers.subtract(reads[first])
                ops[first], ops[behind] = pair.parted(found, fresh)
                reads[first], reads[behind] = read_by(ops[first]), read_by(ops[behind])
                readers.update(reads[first])
            readers.update(reads[behind])
    return replace(block, ops=tuple(ops))


class _Pair:
    """Two scans, the second of which reads what the first stacks up. Slices of one array have one position in both,
    whichever way a scan goes.
    """

    def __init__(self, first: Op, second: Op, elsewhere: Collection[int]) -> None:
        self.first, self.second = first, second
        (one,), (two,) = first.blocks, second.blocks
        carried = first.num_carry
        self.stacked = dict(zip(first.outputs[carried:], one.outputs[carried:], strict=True))
        self.handed_on = [v for v in self.stacked if v in elsewhere]
        self.slices = list(zip(second.inputs[self.fixed :], two.inputs[self.fixed :], strict=True))
        inputs = list(zip(one.inputs, first.inputs, strict=True))
        self.constants_of_first = dict(inputs[: first.num_consts])
        self.slices_of_first = dict(inputs[first.num_consts + carried :])
        slices: dict[int, Atom] = {a: v for v, a in self.slices_of_first.items() if isinstance(a, int)}
        slices |= self.stacked
        constants = {a: v for v, a in self.constants_of_first.items() if isinstance(a, int)}
        self.same: dict[int, int] = {}  # inputs of the second body: the values of the first one that they are
        for values, pairs in (
            (slices, self.slices),
            (constants, list(zip(second.inputs, two.inputs[: second.num_consts], strict=False))),
        ):
            for outer, inner in pairs:
                made = values.get(outer) if isinstance(outer, int) else None
                if isinstance(made, int):
                    self.same[inner] = made

    @property
    def fixed(self) -> int:
        """The inputs of the second scan that are no slices."""
        return self.second.num_consts + self.second.num_carry

    @property
    def joined(self) -> JoinedBodies:
        (one,), (two,) = self.first.blocks, self.second.blocks
        ends = [self.same.get(a, a) if isinstance(a, int) else a for a in two.outputs]
        carried = one.outputs[: self.first.num_carry]
        block = Block(
            inputs=(*one.inputs, *(v for v in two.inputs if v not in self.same)),
            outputs=(*carried, *(self.stacked[v] for v in self.handed_on), *ends),
            ops=(*one.ops, *(reading(op, self.same) for op in two.ops)),
        )
        return JoinedBodies(
            block=block,
            first=frozenset(op.id for op in one.ops),
            num_ends=len(ends),
            carried=one.inputs[self.first.num_consts :][: self.first.num_carry],
            trips=self.first.trips,
        )

    def parted(self, found: JoinedBodies, fresh: Fresh) -> tuple[Op, Op]:
        """The two scans of rewritten bodies."""
        first, second = self.first, self.second
        (one,), (two,) = first.blocks, second.blocks
        c = first.num_carry
        mine, theirs = (tuple(op for op in found.block.ops if (op.id in found.first) is own) for own in (True, False))
        starts, ends = found.block.outputs[: -found.num_ends], found.block.outputs[-found.num_ends :]
        there = {*one.inputs, *(v for op in mine for v in op.outputs)}
        read = [*(v for op in theirs for v in read_by(op)), *(a for a in ends if isinstance(a, int))]
        crossing = dict.fromkeys(v for v in read if v in there)
        inside = {made: inner for inner, made in self.same.items() if made in crossing}
        still = [i for i, (_, inner) in enumerate(self.slices) if inner not in self.same or inner in inside.values()]
        kept = [self.slices[i] for i in still]
        ys = dict(zip(self.handed_on, starts[c:], strict=True))
        read_on = (v for v, inner in kept if isinstance(v, int) and inner in self.same)
        ys.update({v: self.stacked[v] for v in read_on if v in self.stacked})
        constants: list[tuple[Atom, int]] = []
        added: list[Value] = []
        for v in crossing:
            if v in inside:
                continue
            inside[v] = fresh.copy_of(v)
            if v in self.constants_of_first:
                constants.append((self.constants_of_first[v], inside[v]))
                continue
            outer = self.slices_of_first.get(v)
            if outer is None:
                value = fresh.values[v]
                outer = fresh.value((first.trips, *value.shape), value.dtype, value.itemsize)
                ys[outer] = v
            kept.append((outer, inside[v]))
            added.append(fresh.values[v])
        fixed = self.fixed
        eqn = scan_equation(second, [*range(fixed), *(fixed + i for i in still)], added)
        first = replace(
            first,
            outputs=(*first.outputs[:c], *ys),
            blocks=(Block(inputs=one.inputs, outputs=(*starts[:c], *ys.values()), ops=mine),),
        )
        second = replace(
            second,
            eqn=eqn,
            inputs=(*second.inputs[:fixed], *(outer for outer, _ in kept)),
            blocks=(
                Block(
                    inputs=(*two.inputs[:fixed], *(inner for _, inner in kept)),
                    outputs=tuple(inside.get(a, a) if isinstance(a, int) else a for a in ends),
                    ops=tuple(reading(op, inside) for op in theirs),
                ),
            ),
        )
        return first, _with_constants(second, constants, fresh)


def _with_constants(scan: Op, constants: Sequence[tuple[Atom, int]], fresh: Fresh) -> Op:
    """A scan that reads more constants: (operand, the value in its body)."""
    if not constants:
        return scan
    (body,), k = scan.blocks, scan.num_consts
    inner = [v for _, v in constants]
    return replace(
        scan,
        eqn=scan_equation(scan, range(len(scan.inputs)), [fresh.values[v] for v in inner], k),
        inputs=(*scan.inputs[:k], *(outer for outer, _ in constants), *scan.inputs[k:]),
        num_consts=k + len(constants),
        blocks=(replace(body, inputs=(*body.inputs[:k], *inner, *body.inputs[k:])),),
    )


def closed(block: Block, fresh: Fresh) -> Block:
    """The block with each value of it that the body of a scan reads as a constant of that scan."""
    ops: list[Op] = []
    for op in block.ops:
        if op.blocks:
            op = replace(op, blocks=tuple(closed(inner, fresh) for inner in op.blocks))
        if op.kind is OpKind.SCAN and (around := sorted(free_values(op.blocks[0]))):
            (body,), names = op.blocks, {v: fresh.copy_of(v) for v in around}
            inside = tuple(reading(inner, names) for inner in body.ops)
            body = replace(body, ops=inside, outputs=named(body.outputs, names))
            op = _with_constants(replace(op, blocks=(body,)), list(names.items()), fresh)
        ops.append(op)
    return replace(block, ops=tuple(ops))
