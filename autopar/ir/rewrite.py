"""Tools for passes that rewrite the top block of a graph: operands of an operation, clones, substitution."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from msgspec.structs import replace

from autopar.common import jax_compat
from autopar.ir.graph import Atom, Block, Op, OpGraph, OpKind, Value, free_values, has_effects, read_by


class Fresh:
    """Numbers the values and operations that a pass adds to a graph."""

    def __init__(self, graph: OpGraph) -> None:
        self.values: list[Value] = list(graph.values)
        self._next_op = 1 + max((op.id for op in graph.ops()), default=-1)

    def copy_of(self, value: int) -> int:
        """A new value of the same shape and type."""
        self.values.append(replace(self.values[value], id=len(self.values), name=""))
        return len(self.values) - 1

    def value(self, shape: tuple[int, ...], dtype: str, itemsize: int) -> int:
        """A new value."""
        self.values.append(Value(len(self.values), tuple(shape), dtype, itemsize))
        return len(self.values) - 1

    def op_id(self) -> int:
        self._next_op += 1
        return self._next_op - 1


def remove_dead(block: Block) -> Block:
    """The block without operations of which no result is used and that have no effect. Loops keep all they carry,
    scans the constants that they read, barriers what is read behind them.
    """
    live = {a for a in block.outputs if isinstance(a, int)}
    live_ops: list[Op] = []
    for op in reversed(block.ops):
        if live.isdisjoint(op.outputs) and not has_effects(op):
            continue
        if op.blocks:
            op = replace(op, blocks=tuple(remove_dead(b) for b in op.blocks))
            op = _without_unread_constants(op) if op.kind is OpKind.SCAN else op
            live |= {i for inner in op.blocks for i in free_values(inner)}
        elif op.kind is OpKind.BARRIER and not live.issuperset(op.outputs):
            pairs = [(a, v) for a, v in zip(op.inputs, op.outputs, strict=True) if v in live]
            op = replace(op, inputs=tuple(a for a, _ in pairs), outputs=tuple(v for _, v in pairs))
        live |= {a for a in op.inputs if isinstance(a, int)}
        live_ops.append(op)
    return replace(block, ops=tuple(reversed(live_ops)))


def _without_unread_constants(op: Op) -> Op:
    (body,) = op.blocks
    read = {a for a in body.outputs if isinstance(a, int)}.union(*map(read_by, body.ops))
    kept = [i for i in range(len(op.inputs)) if i >= op.num_consts or body.inputs[i] in read]
    if len(kept) == len(op.inputs):
        return op
    return replace(
        op,
        eqn=scan_equation(op, kept),
        inputs=tuple(op.inputs[i] for i in kept),
        blocks=(replace(body, inputs=tuple(body.inputs[i] for i in kept)),),
        num_consts=op.num_consts - (len(op.inputs) - len(kept)),
    )


def missing(value: int, makers: Mapping[int, Op], known: Container[int]) -> Iterator[Op]:
    """The operations of a value that is not known yet, each behind those of its operands; the results of each are known
    before the next is asked for.
    """
    stack = [value]
    while stack:
        op = makers.get(stack[-1]) if stack[-1] not in known else None
        needed = [v for v in read_by(op) if v in makers and v not in known] if op is not None else []
        stack += reversed(needed)
        if not needed:
            stack.pop()
            if op is not None:
                yield op


def scan_equation(op: Op, kept: Sequence[int], added: Sequence[Value] = (), at: int | None = None) -> Any:
    """The equation of a scan whose body has some of its inputs, and more like these values, by default behind them, as
    slices; of its operations and results only the graph says more.
    """
    jaxpr = jax_compat.open_jaxpr(op.eqn.params["jaxpr"])
    variables, invars = [jaxpr.invars[i] for i in kept], [op.eqn.invars[i] for i in kept]
    stacked = () if at is not None and at <= op.num_consts else (op.trips,)
    at = len(variables) if at is None else at
    variables[at:at] = [jax_compat.variable_of(v.shape, v.dtype, v.weak_type) for v in added]
    invars[at:at] = [jax_compat.variable_of((*stacked, *v.shape), v.dtype, v.weak_type) for v in added]
    inner = jaxpr.replace(constvars=[], invars=variables, outvars=variables, eqns=[])
    return op.eqn.replace(invars=invars, params={**op.eqn.params, "jaxpr": inner})


def reading(op: Op, names: Mapping[int, int]) -> Op:
    """The operation with other values in the place of those it reads."""
    if not any(v in names for v in read_by(op)):
        return op
    blocks = tuple(_block_reading(block, names) for block in op.blocks)
    return replace(op, inputs=named(op.inputs, names), blocks=blocks)


def clone(op: Op, names: MutableMapping[int, int], fresh: Fresh) -> Op:
    """A copy with results of its own, entered in `names`, that reads `names[v]` in the place of v."""
    blocks = tuple(_cloned_block(block, names, fresh) for block in op.blocks)
    inputs = named(op.inputs, names)
    outputs = tuple(fresh.copy_of(v) for v in op.outputs)
    names.update(zip(op.outputs, outputs, strict=True))
    return replace(op, id=fresh.op_id(), inputs=inputs, outputs=outputs, blocks=blocks)


def makers(ops: Iterable[Op]) -> dict[int, Op]:
    """The operation that makes each value."""
    return {v: op for op in ops for v in op.outputs}


def equal_values(block: Block) -> dict[int, int]:
    """What a barrier of a block hands on, a scan from trip to trip, or each branch -> the value that it is equal to."""
    equal: dict[int, int] = {}
    for op in block.ops:
        pairs: Iterable[tuple[Atom, int]] = ()
        if op.kind is OpKind.BARRIER:
            pairs = zip(op.inputs, op.outputs, strict=True)
        elif op.kind is OpKind.SCAN:
            pairs = [(op.inputs[op.num_consts + i], op.outputs[i]) for i in handed_on(op)]
        elif op.kind is OpKind.COND:
            pairs = [(op.inputs[1 + i], op.outputs[o]) for o, i in _handed_on_by_branches(op)]
        equal |= {out: equal.get(a, a) for a, out in pairs if isinstance(a, int)}
    return equal


def handed_on(scan: Op) -> frozenset[int]:
    """The positions of the carried values that each trip of a scan leaves as they are."""
    (body,), equal = scan.blocks, equal_values(scan.blocks[0])
    pairs = zip(body.inputs[scan.num_consts :], body.outputs[: scan.num_carry], strict=False)
    return frozenset(i for i, (v, out) in enumerate(pairs) if isinstance(out, int) and equal.get(out, out) == v)


def _handed_on_by_branches(cond: Op) -> set[tuple[int, int]]:
    """(result, operand) of which each branch hands on the operand as the result."""
    found = []
    for branch in cond.blocks:
        equal, position = equal_values(branch), {v: i for i, v in enumerate(branch.inputs)}
        sources = [equal.get(a, a) if isinstance(a, int) else None for a in branch.outputs]
        found.append({(o, position[v]) for o, v in enumerate(sources) if v in position})
    return set.intersection(*found)


def renumbered(graph: OpGraph) -> OpGraph:
    """The graph with its operations numbered from 0 in program order, bodies after their loop; values stay."""
    number = 0

    def block_of(block: Block) -> Block:
        nonlocal number
        ops = []
        for op in block.ops:
            new_id, number = number, number + 1
            ops.append(replace(op, id=new_id, blocks=tuple(block_of(b) for b in op.blocks)))
        return replace(block, ops=tuple(ops))

    return dataclasses.replace(graph, block=block_of(graph.block))


def named(atoms: Iterable[Atom], names: Mapping[int, int]) -> tuple[Atom, ...]:
    """Atoms with `names[v]` in the place of v."""
    return tuple(names.get(a, a) if isinstance(a, int) else a for a in atoms)


def _block_reading(block: Block, names: Mapping[int, int]) -> Block:
    ops = tuple(reading(op, names) for op in block.ops)
    return replace(block, ops=ops, outputs=named(block.outputs, names))


def _cloned_block(block: Block, names: Mapping[int, int], fresh: Fresh) -> Block:
    inner = dict(names)
    inputs = tuple(fresh.copy_of(v) for v in block.inputs)
    inner.update(zip(block.inputs, inputs, strict=True))
    ops = tuple(clone(op, inner, fresh) for op in block.ops)
    return Block(inputs=inputs, outputs=named(block.outputs, inner), ops=ops)


# Parameters that are the last sizes of the last result, and those that are sizes of slices of the first operand.
_SIZES = ("shape", "new_sizes")
_SLICES = ("slice_sizes", "limit_indices")


def params_of_part(
    eqn: Any, result: Sequence[int], whole: Sequence[Sequence[int]], part: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """The parameters of an equation that are other ones on parts of its operands.

    `result`: the shape of the last result. `whole`, `part`: of the first operand, where it is an array.
    """
    params: dict[str, Any] = {}
    for name in _SIZES:
        if isinstance(sizes := eqn.params.get(name), Sequence):
            params[name] = tuple(result[len(result) - len(sizes) :])
    for of_all, of_part in zip(whole, part, strict=True):
        for name in _SLICES:
            if isinstance(sizes := eqn.params.get(name), Sequence):
                kept = zip(sizes, of_all, of_part, strict=True)
                params[name] = tuple(part if n == size else size for size, n, part in kept)
    return params


def in_order(block: Block, added: Sequence[Op], replaced: Mapping[int, int]) -> Block:
    """The block with more operations, in an order in which everything is made before it is read, without dead ones."""
    ops = [reading(op, replaced) for op in (*block.ops, *added)]
    outputs = tuple(replaced.get(a, a) if isinstance(a, int) else a for a in block.outputs)
    maker = {v: op for op in ops for v in op.outputs}
    placed: dict[int, Op] = {}

    def place(op: Op) -> None:
        if op.id not in placed:
            for v in read_by(op):
                if v in maker:
                    place(maker[v])
            placed[op.id] = op

    for op in ops:
        place(op)
    return remove_dead(replace(block, ops=tuple(placed.values()), outputs=outputs))


# Canonical forms: operations and values numbered in the order of their first occurrence.
#
# Groups of operations with equal keys compute the same and differ only in the numbers of their operations and values,
# which then correspond one to one, in order.


class CanonicalForm:
    """Keys of operations and blocks of a graph, given in order. `ops` and `values` are those seen so far, in order.

    `attributes` are those of an operation that have to be equal too. Other operations are known by their primitives.
    """

    def __init__(self, graph: OpGraph, attributes: Callable[[Op], Hashable]) -> None:
        self._graph, self._attributes = graph, attributes
        self._inputs = set(graph.block.inputs)
        self._number: dict[int, int] = {}
        self.ops: list[int] = []

    @property
    def values(self) -> tuple[int, ...]:
        return tuple(self._number)

    def op_key(self, op: Op) -> tuple:
        self.ops.append(op.id)
        counts = (op.num_consts, op.num_carry, op.num_condition_consts, op.trips, op.dim)
        operands = tuple(map(self._atom, op.inputs))
        blocks = tuple(map(self.block_key, op.blocks))
        outputs = tuple(map(self._value, op.outputs))
        kernel = op.kernel_bytes, op.order_cost
        return (
            op.kind,
            op.section,
            op.key or op.primitive,
            self._attributes(op),
            counts,
            kernel,
            operands,
            blocks,
            outputs,
        )

    def block_key(self, block: Block) -> tuple:
        inputs = tuple(map(self._value, block.inputs))
        return inputs, tuple(map(self.op_key, block.ops)), tuple(map(self._atom, block.outputs))

    def _value(self, v: int) -> Hashable:
        if v in self._number:
            return self._number[v]
        self._number[v] = len(self._number)
        value = self._graph.values[v]
        return self._number[v], value.shape, value.dtype, v in self._inputs

    def _atom(self, atom: Atom) -> Hashable:
        return self._value(atom) if isinstance(atom, int) else ("literal", atom.shape, repr(atom.literal))
