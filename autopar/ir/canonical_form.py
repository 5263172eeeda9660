"""Canonical forms: operations and values numbered in the order of their first occurrence.

Groups of operations with equal keys compute the same and differ only in the numbers of their operations and values,
which then correspond one to one, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from autopar.ir.graph import Atom, Block, Op, OpGraph


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
