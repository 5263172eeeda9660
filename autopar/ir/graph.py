"""The graph of operations that plans are made for: values, operations with their factors, and nested blocks.

A `Block` lists operations in program order. Loops and branches hold blocks of their own; calls (jit, custom_vjp, ...)
are inlined. Values are numbered through the whole graph.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from autopar.common.enums import HashedById
from autopar.ir.traced_step import WrittenLayout

# The states in which a value of a graph can lie, beside its layout.

# The states in which a value can lie, beside the copies for one role (by the role's name): as its operation left it,
# once its sums are reduced, and as a copy for readers of all roles; in the memory of the host, which nothing reads; and
# back from there.
UNREDUCED, REDUCED, ALL = "raw", "placed", "all"
HOST, RETURNED = "host", "back from the host"


_Atom = TypeVar("_Atom")
# Equinox names what its layers do after their classes: all layers of a class have one name.
_CLASSES = re.compile(r"eqx\.nn\.\w+(/eqx\.nn\.\w+)*")


class Role(HashedById):
    """Which part of a training step an operation belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


# `Op.primitive` of an ACCUMULATE whose summand is a product that nobody else reads: XLA's compilers for GPU and TPU add
# the sum up within the product (`autopar.passes.summed_products`).
SUMMED_PRODUCT = "accumulate_product"


class OpKind(HashedById):
    EQUATION = "equation"  # one jax primitive
    BARRIER = "barrier"  # operands pass unchanged; keeps rematerialised work where the user put it
    SCAN = "scan"
    WHILE = "while"
    COND = "cond"
    # What enters and leaves the loop over micro-batches, one operand and one result each:
    SPLIT = "split"  # a value with examples of the whole batch; the result holds those of one micro-batch
    ACCUMULATE = "accumulate"  # a summand that each micro-batch makes; the result is their sum
    STACK = "stack"  # what each micro-batch makes of its examples; the result holds the whole batch
    # A value that another stage reads leaves its stage here; no results.
    SEND = "send"


class Section(HashedById):
    """When an operation runs in a step that is cut into micro-batches, in order."""

    WHOLE = "whole"  # the step is not cut
    BEFORE = "before"  # once, before the first micro-batch
    FORWARD = "forward"  # once a micro-batch
    BACKWARD = "backward"  # once a micro-batch, after its forward section
    WEIGHT = "weight"  # the part of the backward section that no other stage waits for
    AFTER = "after"  # once, after the last micro-batch

    def __init__(self, name: str) -> None:
        """Sets what passes ask of every operation: whether it runs once for each micro-batch (`repeats`), and whether
        it is part of the backward pass.
        """
        self.is_backward = name in ("backward", "weight")
        self.repeats = self.is_backward or name == "forward"


class Dimension(HashedById):
    """What a dimension of a value counts. What is none of these (vocabularies, inner widths) has no name."""

    EXAMPLE = "example"
    SEQUENCE = "sequence"  # positions of a text, of an image, of a sound
    EXPERT = "expert"  # of a mixture of experts
    FEATURE = "feature"  # what layers hand on: the width of a model, not the width inside of a layer
    HEAD = "head"  # of attention: each has scores of its own


class Side(HashedById):
    """What a product of the forward pass does with a dimension of a matrix."""

    INPUT = "input"  # sums over it, with the features that it reads
    OUTPUT = "output"  # makes it: the features of its result


class Purpose(HashedById):
    """What a value is to a training step."""

    BATCH = "batch"
    MATRIX = "matrix"  # state that the forward pass multiplies with
    PARAMETER = "parameter"  # other state that the forward pass reads
    OPTIMIZER = "optimizer"  # state that only the update reads
    MATRIX_COPY = "matrix copy"  # what products read of a matrix: its cast, its transpose
    WEIGHT_COPY = "weight copy"  # anything else that is computed of state alone
    GRADIENT = "gradient"  # has no examples any more, and is computed of them
    ACCUMULATOR = "accumulator"  # a sum over micro-batches
    UPDATE = "update"  # made by the update
    ACTIVATION = "activation"  # everything else


class FactorKind(HashedById):
    """What happens when a mesh axis splits a factor."""

    PASS = "pass"  # operands and results are split alike, nothing is sent
    SUM = "sum"  # results are partial sums
    EXTREMUM = "extremum"  # results are combined by max, min, and, or
    RING = "ring"  # operands and results are split alike, and parts of some operands go round all devices
    # What has another factor (`Factor.along`) is split too, and its parts are exchanged for those of this one.
    EXCHANGE = "exchange"
    FIXED = "fixed"  # may not be split


@dataclasses.dataclass(frozen=True, slots=True)
class Factor:
    """`rounded`: of examples that are split unevenly, the size to which `size` is rounded up; 0: as it is. `along`: of
    an exchanged factor the number of the one that its axes split too; experts and tokens.
    """

    size: int
    kind: FactorKind
    rounded: int = 0
    along: int = -1

    @property
    def split_size(self) -> int:
        """What the number of parts must divide."""
        return self.rounded or self.size


class Rule(msgspec.Struct, frozen=True, gc=False):
    """How an operation's dimensions hang together, in Shardy's terms.

    `operands[i][d]` and `results[i][d]` list the factors of a dimension, major first; a dimension of size one has none.
    `note` says why an operation is replicated, where it is.
    """

    factors: tuple[Factor, ...]
    operands: tuple[tuple[tuple[int, ...], ...], ...]
    results: tuple[tuple[tuple[int, ...], ...], ...]
    note: str = ""

    def factored_dims(self, atoms: Iterable[_Atom]) -> Iterator[tuple[_Atom, int, tuple[int, ...]]]:
        """(operand or result, dimension, factors) of each dimension with factors. `atoms`: operands, then results."""
        for atom, dims in zip(atoms, (*self.operands, *self.results), strict=True):
            for d, factors in enumerate(dims):
                if factors:
                    yield atom, d, factors

    @classmethod
    def by_names(cls, operands: NamedDims, results: NamedDims, factor_of: Callable[[Any, int], Factor]) -> Rule:
        """The rule of arrays whose dimensions are written as names of factors, which are numbered as they come.

        `factor_of`: of a name, and of the size of the dimension that has it first. What is left of a dimension behind
        its factors is a factor of its own, which may not be split.
        """
        numbers: dict[Any, int] = {}
        factors: list[Factor] = []

        def row(names: Iterable[Any], size: int) -> Iterator[int]:
            for name in names:
                factor = factors[numbers[name]] if name in numbers else factor_of(name, size)
                if factor.size == 1:
                    continue
                if name not in numbers:
                    numbers[name] = len(factors)
                    factors.append(factor)
                yield numbers[name]
                size = size // factor.size if factor.size else 1
            if size != 1:
                factors.append(Factor(size, FactorKind.FIXED))
                yield len(factors) - 1

        def dims(arrays: NamedDims) -> tuple[tuple[tuple[int, ...], ...], ...]:
            return tuple([tuple([tuple(row(*dim)) for dim in zip(*array, strict=True)]) for array in arrays])

        read, made = dims(operands), dims(results)
        return cls(tuple(factors), read, made)


# Of each array (of each dimension the names of its factors, major first; the shape).
NamedDims = Iterable[tuple[Iterable[Iterable[Any]], Iterable[int]]]


class Value(msgspec.Struct, frozen=True, gc=False):
    """One array of the program. `name` is set for arguments and constants; `weak_type` as jax has it. Of a leaf of the
    batch, `example_dim` is the dimension that counts examples, None where it holds none.

    `dimensions` (of each dimension what it counts, as far as that is known), `sides` (of those of a matrix, and of what
    belongs to it, which side they are) and `purpose` are set by `autopar.ir.semantics`, for plans that are bound
    to them. `rounded`: the shape with its number of examples rounded up to what devices divide, where they are split
    unevenly (`autopar.passes.round_examples`).
    """

    id: int
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    name: str = ""
    weak_type: bool = False
    dimensions: tuple[frozenset[Dimension], ...] = ()
    sides: tuple[frozenset[Side], ...] = ()
    purpose: Purpose | None = None
    example_dim: int | None = None
    rounded: tuple[int, ...] = ()

    @property
    def split_shape(self) -> tuple[int, ...]:
        """The shape of which devices hold equal parts."""
        return self.rounded or self.shape

    @property
    def size(self) -> int:
        n = 1
        for d in self.shape:
            n *= d
        return n

    @property
    def nbytes(self) -> int:
        """Bytes of all equal parts together."""
        return math.prod(self.split_shape) * self.itemsize


@dataclasses.dataclass(frozen=True, slots=True)
class Constant:
    """A literal operand."""

    literal: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.literal.aval.shape)

    @property
    def content(self) -> tuple[str, bytes]:
        """Equal for literals of one type that are equal to the last bit."""
        dtype = self.literal.aval.dtype
        return str(dtype), np.asarray(self.literal.val, dtype).tobytes()


Atom = int | Constant


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OrderCost:
    """What an operation on scores costs more where results of products stay in the order of dimensions in which they
    are made (`autopar.ops.attention.score_kernels`).

    Attributes:
        copied_itemsize: Of a product whose result is copied in another order, the bytes of an element of the copy.
        in_tiles: Whether that copy moves tiles; else each element is read for itself.
        beside_itemsize: Of an operation whose kernel writes weights anew beside its result, the bytes of an element.
        rewritten_operand: Of a product the operand that another kernel writes anew beside its result.
        more_bytes: What its kernel moves beyond `Op.kernel_bytes`.
    """

    copied_itemsize: int = 0
    in_tiles: bool = True
    beside_itemsize: int = 0
    rewritten_operand: int | None = None
    more_bytes: float = 0.0


class Op(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One operation.

    `key` tells what an equation computes of its operands (primitive, parameters, literals, shapes): equations with
    equal keys and operands compute the same. `count` is how often it runs in a step (trip counts of the loops around
    it, and micro-batches, multiplied). `dim` is where a SPLIT cuts and a STACK joins. For loops: `blocks` are (body,)
    of a scan, (condition, body) of a while, the branches of a cond; `num_consts` and `num_carry` divide a loop's
    inputs as jax does (for a while, `num_consts` counts both condition's and body's constants and
    `num_condition_consts` the first of them). `kernel_bytes`, of operations on scores of attention:
    bytes that their kernel moves to memory and back, counted with one of its operations, zero with the others
    (`ops.attention.score_kernels`); `order_cost`: what is added to that by the order of dimensions. `parameters`:
    of an operation in no module, that of the parameters it reads (`autopar.frontend.build_graph`). `recomputes`:
    it is the backward pass's, and computes again what `jax.checkpoint` does not keep.
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
    section: Section = Section.WHOLE
    dim: int = 0
    kernel_bytes: float | None = None
    order_cost: OrderCost | None = None
    parameters: str = ""
    recomputes: bool = False

    @property
    def has_place(self) -> bool:
        """Whether the code names the module of the operation, by more than the class of its layer."""
        return bool(self.module) and not _CLASSES.fullmatch(self.module)

    @property
    def place(self) -> str:
        """Where the operation stands in the model, to be read: its module, else that of the parameters it reads."""
        return self.module if self.has_place else self.parameters or self.module


class Block(msgspec.Struct, frozen=True, kw_only=True, weakref=True):  # what is found for it is kept so
    inputs: tuple[int, ...]
    outputs: tuple[Atom, ...]
    ops: tuple[Op, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OpGraph:
    """The whole step. The top block's inputs are the hoisted constants, then the flat arguments.

    `tied` pairs a position in the inputs with the position in the outputs that must have the same layout; `donated`
    are the inputs whose memory the step may reuse; `batch` the inputs that carry examples. Where the step is cut into
    `num_microbatches`, the top block's operations stand in the order of their sections, and `repeating` are the inputs
    that arrive once for each micro-batch (from another stage). A batch may be cut into as many runs of neighbouring
    examples as divide `runs_of_examples`, of each of which a micro-batch takes its share (0: into any number).
    `written` are layouts that the step's code gives to values. `per_microbatch` are the patterns of modules that mix
    the examples of a micro-batch: the step is then one of gradient accumulation. `saved_in_host` are values that wait
    in the memory of the host between the passes, by what layers recompute.
    """

    values: tuple[Value, ...]
    block: Block
    constants: tuple[Any, ...]
    tied: tuple[tuple[int, int], ...]
    donated: frozenset[int]
    batch: frozenset[int]
    num_microbatches: int = 1
    repeating: frozenset[int] = frozenset()
    runs_of_examples: int = 0
    written: tuple[tuple[int, WrittenLayout], ...] = ()
    per_microbatch: tuple[str, ...] = ()
    saved_in_host: frozenset[int] = frozenset()

    @property
    def is_cut(self) -> bool:
        """Whether the step is cut into sections."""
        return any(op.section is not Section.WHOLE for op in self.block.ops)

    @property
    def forward_role(self) -> Role:
        """The role of the forward pass: where nothing is differentiated, that of all operations."""
        trains = any(op.kind is OpKind.EQUATION and op.role is not Role.UPDATE for op in self.ops())
        return Role.FORWARD if trains else Role.UPDATE

    def once(self) -> frozenset[int]:
        """The values of the top block that are the same for every micro-batch and known before the first one."""
        values = {v for i, v in enumerate(self.block.inputs) if i not in self.repeating}
        hoisted = (op for op in self.block.ops if op.section is Section.BEFORE and op.kind is not OpKind.SPLIT)
        return frozenset(values | {v for op in hoisted for v in op.outputs})

    def result_counts(self) -> tuple[float, ...]:
        """How often a step makes each of its results, all micro-batches together: once, but in a graph in which one
        operation stands for several.
        """
        m = self.num_microbatches
        count_of = {v: op.count / (m if op.section.repeats else 1) for op in self.block.ops for v in op.outputs}
        return tuple(count_of.get(atom, 1.0) if isinstance(atom, int) else 1.0 for atom in self.block.outputs)

    def ops(self) -> Iterator[Op]:
        """Every operation, bodies of loops after their loop."""
        yield from walk(self.block)


def walk(block: Block) -> Iterator[Op]:
    for op in block.ops:
        yield op
        for inner in op.blocks:
            yield from walk(inner)


def values_of(block: Block) -> Iterator[int]:
    """The inputs and results of a block, and those of its loops."""
    yield from block.inputs
    for op in block.ops:
        yield from op.outputs
        for inner in op.blocks:
            yield from values_of(inner)


def free_values(block: Block) -> set[int]:
    """Values that a block reads from around it."""
    bound = {*block.inputs, *(o for op in walk(block) for o in op.outputs)}
    bound |= {i for op in walk(block) for inner in op.blocks for i in inner.inputs}
    read = [a for op in walk(block) for a in op.inputs] + list(block.outputs)
    read += [a for op in walk(block) for inner in op.blocks for a in inner.outputs]
    return {a for a in read if isinstance(a, int)} - bound


def read_by(op: Op) -> tuple[int, ...]:
    """The values that an operation reads: its operands, then what its blocks read from around them."""
    inputs = op.inputs
    if not op.blocks and 1 <= len(inputs) <= 2:  # as most have
        first, last = inputs[0], inputs[-1]
        if isinstance(first, int) and isinstance(last, int):
            return (first, last) if first != last else (first,)
    direct = [a for a in inputs if isinstance(a, int)]
    if not op.blocks:
        return tuple(direct) if len(direct) < 2 else tuple(dict.fromkeys(direct))
    return tuple(dict.fromkeys([*direct, *(v for block in op.blocks for v in sorted(free_values(block)))]))


def scaled_by_one_number(op: Op, values: Sequence[Value]) -> int | None:
    """What an operation multiplies with a scalar; None of any other operation."""
    if op.primitive != "mul":
        return None
    arrays = [a for a in op.inputs if isinstance(a, int) and values[a].shape]
    return arrays[0] if len(arrays) == 1 and values[arrays[0]].shape == values[op.outputs[0]].shape else None


def has_effects(op: Op) -> bool:
    """Whether an operation, or one inside of it, does more than its results say."""
    runs = op.kind in (OpKind.EQUATION, OpKind.SCAN, OpKind.WHILE, OpKind.COND)
    return runs and op.eqn is not None and bool(op.eqn.effects)
