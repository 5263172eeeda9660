"""The instructions of a lowered step, the places of its values, and blocks of instructions."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from autopar.frontend.callbacks import is_callback
from autopar.ir.graph import HOST, REDUCED, UNREDUCED, Atom, Block, Op, Role, Section
from autopar.ir.layout import Layout
from autopar.ir.resharding import ReshardStep
from autopar.ir.strategies import Strategy

# Where a value lies: its layout, and as what: RAW as its operation left it, PLACED once its sums are reduced, a copy
# for ALL readers, or one for the readers of a role (by the role's name), or in the memory of the HOST, or RETURNED from
# there.
Place = tuple[Layout, str]
# A value in one of its places.
Key = tuple[int, Place]


class _Reading(msgspec.Struct, frozen=True, dict=True):
    """What an instruction reads and makes, asked for many times over: worked out once (hence no slots)."""

    @functools.cached_property
    def keys_read(self) -> tuple[Key, ...]:
        """The places that the instruction reads, those inside of loops included."""
        return tuple(self._read())

    @functools.cached_property
    def keys_made(self) -> tuple[Key, ...]:
        """The places that the instruction fills."""
        return tuple(self._made())

    def _read(self) -> Iterable[Key]:
        raise NotImplementedError  # each kind of instruction has its own

    def _made(self) -> Iterable[Key]:
        raise NotImplementedError  # as above


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """How a product runs in pieces (`autopar.lowering.collective_matmul`).

    Attributes:
        axes: The mesh axes round which pieces go, in the order in which they split the dimension.
        operand: The operand that comes in pieces; None: the result leaves in pieces.
        dim: The dimension of that operand, or of the result, that is in pieces.
        step: The gather of the operand, or the reduce-scatter of the result, that the pieces stand for.
        is_read_again: Whether something behind it reads the operand too, which is put together from the pieces.
    """

    axes: tuple[int, ...]
    operand: int | None
    dim: int
    step: ReshardStep
    is_read_again: bool = False


class Move(_Reading, frozen=True, kw_only=True):
    """Reshards a value: from one of its places to another, by single collectives.

    `apart` says that the same steps were made before for readers of another role, and are meant to be made again
    (a gathered parameter is freed in between): the compiler must not merge the two. `in_pieces`: of a gather or a
    reduce-scatter that a product does while it runs (`Pieces`).
    """

    value: int
    source: Place
    target: Place
    steps: tuple[ReshardStep, ...]
    count: float
    module: str
    role: Role
    apart: bool = False
    section: Section = Section.WHOLE
    in_pieces: bool = False

    def _read(self) -> Iterable[Key]:
        return ((self.value, self.source),)

    def _made(self) -> Iterable[Key]:
        return ((self.value, self.target),)


class Compute(_Reading, frozen=True, kw_only=True):
    """Runs one operation. `reads[i]` is the place of operand i, None for a literal; `strategy` None: replicated.

    `written_out`: results stay partial and are computed on each device's part by hand; otherwise the partitioner
    runs it, and `reduced` says over which axes it all-reduces the results on the way. `pieces`: of a product that runs
    in pieces; one that scatters its result leaves it as the reduce-scatter would.
    """

    op: Op
    reads: tuple[Place | None, ...]
    results: tuple[Layout, ...]
    strategy: Strategy | None
    written_out: bool
    reduced: tuple[int, ...]
    pieces: Pieces | None = None

    @functools.cached_property
    def places(self) -> tuple[Place, ...]:
        """Where the results lie."""
        summed = self.strategy is not None and bool(self.reduced) and self.reduced != self.strategy.combined
        # What a callback hands on from the first device is no sum.
        state = REDUCED if summed and not is_callback(self.op.eqn) else UNREDUCED
        return tuple([(layout, state) for layout in self.results])

    def _read(self) -> Iterable[Key]:
        return _pairs(self.op.inputs, self.reads)

    def _made(self) -> Iterable[Key]:
        return zip(self.op.outputs, self.places, strict=True)


class Pass(_Reading, frozen=True, kw_only=True):
    """Operands go through a barrier unchanged."""

    op: Op
    reads: tuple[Place, ...]

    def _read(self) -> Iterable[Key]:
        return _pairs(self.op.inputs, self.reads)

    def _made(self) -> Iterable[Key]:
        return ((v, (place[0], UNREDUCED)) for v, place in zip(self.op.outputs, self.reads, strict=True))


class Loop(_Reading, frozen=True, kw_only=True):
    """A scan, while or cond. `results` are the layouts of its results; those `in_host` (by position) are stacked up in
    the memory of the host, trip by trip.
    """

    op: Op
    reads: tuple[Place | None, ...]
    blocks: tuple[LoweredBlock, ...]
    results: tuple[Layout, ...]
    in_host: frozenset[int] = frozenset()

    def _read(self) -> Iterable[Key]:
        yield from _pairs(self.op.inputs, self.reads)
        for block in self.blocks:
            made = set(zip(block.block.inputs, block.entries(), strict=True))
            for inner in block.instructions:
                yield from (key for key in inner.keys_read if key not in made)
                made.update(inner.keys_made)
            yield from (key for key in _pairs(block.block.outputs, block.outputs) if key not in made)

    def _made(self) -> Iterable[Key]:
        places = ((layout, HOST if i in self.in_host else UNREDUCED) for i, layout in enumerate(self.results))
        return zip(self.op.outputs, places, strict=True)


class _Crossing(_Reading, frozen=True, kw_only=True):
    """A value goes into the loop over micro-batches, or comes out of it; the result lies as it does."""

    op: Op
    read: Place | None
    result: Layout

    def _read(self) -> Iterable[Key]:
        return _pairs(self.op.inputs, (self.read,))

    def _made(self) -> Iterable[Key]:
        return ((self.op.outputs[0], (self.result, UNREDUCED)),)


class Split(_Crossing, frozen=True, kw_only=True):
    """Cuts a value into those of the micro-batches."""


class Accumulate(_Reading, frozen=True, kw_only=True):
    """Adds a summand to the sum over micro-batches (`sum_` lies as the summand; it starts from zeros)."""

    op: Op
    read: Place | None
    sum_: Place

    @property
    def accumulator(self) -> Key:
        """The sum."""
        return self.op.outputs[0], self.sum_

    def _read(self) -> Iterable[Key]:
        return (*_pairs(self.op.inputs, (self.read,)), self.accumulator)

    def _made(self) -> Iterable[Key]:
        return (self.accumulator,)


class Stack(_Crossing, frozen=True, kw_only=True):
    """Joins what the micro-batches made."""


class Leave(_Reading, frozen=True, kw_only=True):
    """A value is in the layout in which another stage takes it."""

    op: Op
    read: Place | None

    def _read(self) -> Iterable[Key]:
        return _pairs(self.op.inputs, (self.read,))

    def _made(self) -> Iterable[Key]:
        return ()


class HostCopy(_Reading, frozen=True, kw_only=True):
    """Copies each device's part of a value from the memory of the host, or to it: one of the places is a HOST one.

    It waits for what lies in the places `behind`, of those that are made before it in the same program. `trips` are
    those of the loops around it, multiplied.
    """

    value: int
    source: Place
    target: Place
    module: str
    section: Section
    behind: tuple[tuple[int, Place], ...] = ()
    trips: int = 1

    @property
    def to_host(self) -> bool:
        return self.target[1] == HOST

    def _read(self) -> Iterable[Key]:
        return ((self.value, self.source),)

    def _made(self) -> Iterable[Key]:
        return ((self.value, self.target),)


def _pairs(atoms: Sequence[Atom], places: Sequence[Place | None]) -> list[Key]:
    return [(a, p) for a, p in zip(atoms, places, strict=True) if isinstance(a, int) and p is not None]


Instruction = Move | Compute | Pass | Loop | Split | Accumulate | Stack | Leave | HostCopy


def section_of(instruction: Instruction) -> Section:
    """The section in which an instruction of the top block runs."""
    return instruction.section if isinstance(instruction, (Move, HostCopy)) else instruction.op.section


def host_copies_in(lowered: LoweredBlock) -> Iterator[HostCopy]:
    """The copies of a block, those in the bodies of its loops included."""
    for instruction in lowered.instructions:
        if isinstance(instruction, HostCopy):
            yield instruction
        elif isinstance(instruction, Loop):
            for block in instruction.blocks:
                yield from host_copies_in(block)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoweredBlock:
    """Instructions of a block, the layouts its inputs come in, and where its outputs lie (None: literals).

    Inputs that are `in_host` come in the memory of the host, all others in that of the devices.
    """

    block: Block
    inputs: tuple[Layout, ...]
    instructions: tuple[Instruction, ...]
    outputs: tuple[Place | None, ...]
    in_host: frozenset[int] = frozenset()

    def entries(self) -> tuple[Place, ...]:
        """The places in which the inputs come."""
        return tuple(
            (layout, HOST if v in self.in_host else UNREDUCED)
            for v, layout in zip(self.block.inputs, self.inputs, strict=True)
        )
