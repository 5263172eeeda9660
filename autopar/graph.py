"""The graph of operations that plans are made for: values, operations with their factors, and nested blocks.

A `Block` lists operations in program order. Loops and branches hold blocks of their own; calls (jit, custom_vjp, ...)
are inlined. Values are numbered through the whole graph.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator
from typing import Any


class Role(enum.Enum):
    """Which part of a training step an operation belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


class OpKind(enum.Enum):
    EQUATION = "equation"  # one jax primitive
    BARRIER = "barrier"  # operands pass unchanged; keeps rematerialised work where the user put it
    SCAN = "scan"
    WHILE = "while"
    COND = "cond"


class FactorKind(enum.Enum):
    """What happens when a mesh axis splits a factor."""

    PASS = "pass"  # operands and results are split alike, nothing is sent
    SUM = "sum"  # results are partial sums
    EXTREMUM = "extremum"  # results are combined by max, min, and, or
    FIXED = "fixed"  # may not be split


@dataclasses.dataclass(frozen=True, slots=True)
class Factor:
    size: int
    kind: FactorKind


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """How an operation's dimensions hang together, in Shardy's terms.

    `operands[i][d]` and `results[i][d]` list the factors of a dimension, major first; a dimension of size one has none.
    `note` says why an operation is replicated, where it is.
    """

    factors: tuple[Factor, ...]
    operands: tuple[tuple[tuple[int, ...], ...], ...]
    results: tuple[tuple[tuple[int, ...], ...], ...]
    note: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Value:
    """One array of the program. `name` is set for arguments and constants."""

    id: int
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    name: str = ""

    @property
    def size(self) -> int:
        n = 1
        for d in self.shape:
            n *= d
        return n

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize


@dataclasses.dataclass(frozen=True, slots=True)
class Constant:
    """A literal operand."""

    literal: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.literal.aval.shape)


Atom = int | Constant


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operation.

    `key` tells what an equation computes of its operands (primitive, parameters, literals, shapes): equations with
    equal keys and operands compute the same. `count` is how often it runs in a step (trip counts of the loops around
    it, multiplied). For loops: `blocks` are (body,) of a scan, (condition, body) of a while, the branches of a cond;
    `num_consts` and `num_carry` divide a loop's inputs as jax does (for a while, `num_consts` counts both condition's
    and body's constants and `num_condition_consts` the first of them).
    """

    id: int
    kind: OpKind
    primitive: str
    eqn: Any
    inputs: tuple[Atom, ...]
    outputs: tuple[int, ...]
    rule: Rule | None
    role: Role
    module: str
    count: float
    key: str = ""
    blocks: tuple[Block, ...] = ()
    num_consts: int = 0
    num_carry: int = 0
    num_condition_consts: int = 0
    trips: int = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    inputs: tuple[int, ...]
    outputs: tuple[Atom, ...]
    ops: tuple[Op, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OpGraph:
    """The whole step. The top block's inputs are the hoisted constants, then the flat arguments.

    `tied` pairs a position in the inputs with the position in the outputs that must have the same layout; `donated`
    are the inputs whose memory the step may reuse; `batch` the inputs that carry examples.
    """

    values: tuple[Value, ...]
    block: Block
    constants: tuple[Any, ...]
    tied: tuple[tuple[int, int], ...]
    donated: frozenset[int]
    batch: frozenset[int]

    def ops(self) -> Iterator[Op]:
        """Every operation, bodies of loops after their loop."""
        yield from walk(self.block)


def walk(block: Block) -> Iterator[Op]:
    for op in block.ops:
        yield op
        for inner in op.blocks:
            yield from walk(inner)
