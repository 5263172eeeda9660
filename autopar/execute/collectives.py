"""The collectives of a compiled XLA program: the runs and the bytes of each.

The bytes are those of ring algorithms (`autopar.hardware.collective_cost.sent_bytes`). `send` and `recv`
(point-to-point transfers that a program writes itself) are not read.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from autopar.execute import parse
from autopar.hardware.collective_cost import CollectiveKind, sent_bytes
from autopar.ops.kernels.row_exchange import LATER_TURNS

# Trip counts of the `while` loops of a compiled XLA program.
#
# XLA writes a known number into the instruction's backend configuration. Elsewhere (TPU) the count follows from the
# text: a carried integer starts at a constant, is compared with a constant in the condition, and incremented by a
# constant in the body.


_SAME_VALUE = frozenset({"copy", "bitcast", "convert", "reshape", "copy-done", "optimization-barrier"})
_SCALAR = re.compile(r"^(?:[su]\d+|pred)\[\]")
_INTEGER = re.compile(r"^-?\d+$")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Carried:
    """The loop's value number `index` at the start of a turn, plus a constant."""

    index: int
    plus: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Compare:
    direction: str
    left: _Value
    right: _Value


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Loop:
    """The whole carried tuple."""


_Value = int | _Carried | _Compare | _Loop | None


def trip_count(module: parse.Module, loop: parse.Instruction) -> int | None:
    """The trip count of a `while` instruction, or None where the text does not determine it."""
    if m := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.rest):
        return int(m.group(1))
    (condition,), (body,) = loop.called("condition"), loop.called("body")
    test = _evaluate(module, condition, {0: _Loop()})
    if not isinstance(test, _Compare):
        return None
    left, right, direction = test.left, test.right, test.direction
    if isinstance(right, _Carried) and not isinstance(left, _Carried):
        left, right, direction = right, left, {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE"}.get(direction, direction)
    if not isinstance(left, _Carried):
        return None
    if isinstance(right, _Carried):  # a bound that is carried along
        right = _initial(module, loop, right.index)
    start, step = _initial(module, loop, left.index), _carried_on(module, body, left.index)
    if isinstance(start, int) and isinstance(right, int) and isinstance(step, _Carried) and step.index == left.index:
        return _turns(start + left.plus, right, step.plus, direction)
    return None


def _turns(start: int, bound: int, step: int, direction: str) -> int | None:
    if direction in ("GT", "GE"):
        start, bound, step, direction = -start, -bound, -step, {"GT": "LT", "GE": "LE"}[direction]
    if direction == "LE":
        bound, direction = bound + 1, "LT"
    if step <= 0 or direction not in ("LT", "NE"):
        return None
    if direction == "NE" and (bound - start) % step:
        return None
    return max(0, -((start - bound) // step))


def _initial(module: parse.Module, loop: parse.Instruction, index: int) -> _Value:
    """The constant with which value `index` of the loop starts."""
    holder = next(c for c in module.computations.values() if c.instructions.get(loop.name) is loop)
    start = holder.instructions[loop.operands[0]]
    if start.opcode != "tuple":
        return None
    return _value(module, holder, start.operands[index], {}, {})


def _carried_on(module: parse.Module, body: str, index: int) -> _Value:
    """Value `index` after a turn."""
    computation = module.computations[body]
    if computation.root.opcode != "tuple":
        return None
    return _value(module, computation, computation.root.operands[index], {0: _Loop()}, {})


def _evaluate(module: parse.Module, name: str, arguments: dict[int, _Value]) -> _Value:
    """The result of a computation as far as it is scalars and the loop's carried values."""
    computation = module.computations[name]
    return _value(module, computation, computation.root.name, arguments, {})


def _value(
    module: parse.Module,
    computation: parse.Computation,
    name: str,
    arguments: dict[int, _Value],
    values: dict[str, _Value],
) -> _Value:
    """A value of a computation for these arguments; `values` holds those that are already known."""
    if name not in values:
        instruction = computation.instructions.get(name)
        values[name] = None
        if instruction is not None and (instruction.opcode == "parameter" or _SCALAR.match(instruction.shape_text)):
            values[name] = _scalar(module, computation, instruction, arguments, values)
    return values[name]


def _scalar(
    module: parse.Module,
    computation: parse.Computation,
    instruction: parse.Instruction,
    arguments: dict[int, _Value],
    values: dict[str, _Value],
) -> _Value:
    def operand(i: int) -> _Value:
        return _value(module, computation, instruction.operands[i], arguments, values)

    match instruction.opcode:
        case "constant":
            text = instruction.argument_text.strip()
            return int(text) if _INTEGER.match(text) else None
        case "parameter":
            return arguments.get(int(instruction.operands[0]))
        case "get-tuple-element":
            index = _attribute(instruction, r"index=(\d+)")
            return _Carried(index=int(index), plus=0) if isinstance(operand(0), _Loop) else None
        case "add":
            return _sum(operand(0), operand(1), 1)
        case "subtract":
            return _sum(operand(0), operand(1), -1)
        case "compare":
            direction = _attribute(instruction, r"direction=(\w+)")
            return _Compare(direction=direction, left=operand(0), right=operand(1))
        case "fusion" | "call":
            called = instruction.called("calls") or instruction.called("to_apply")
            inner = {i: operand(i) for i in range(len(instruction.operands))}
            return _evaluate(module, called[0], inner) if called else None
        case opcode if opcode in _SAME_VALUE:
            return operand(0)
        case _:
            return None


def _attribute(instruction: parse.Instruction, pattern: str) -> str:
    m = re.search(pattern, instruction.attributes)
    assert m, f"expected {pattern} in the attributes of {instruction.name}, got {instruction.attributes[:200]!r}"
    return m.group(1)


def _sum(left: _Value, right: _Value, sign: int) -> _Value:
    if isinstance(left, int) and isinstance(right, int):
        return left + sign * right
    if isinstance(left, _Carried) and isinstance(right, int):
        return _Carried(index=left.index, plus=left.plus + sign * right)
    if isinstance(left, int) and isinstance(right, _Carried) and sign == 1:
        return _Carried(index=right.index, plus=left + right.plus)
    return None


_STARTS = {f"{kind}-start": kind for kind in CollectiveKind}
_PLAIN = {str(kind): kind for kind in CollectiveKind}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective instruction of the program, at one place from which it is reached.

    Attributes:
        groups: Devices that communicate with each other; for a collective-permute its (source, target) pairs; None
            where the text has neither. Numbers are positions in the order of the mesh's devices.
        result_bytes: Bytes of the result on one device, for one run of the instruction.
        sent_bytes_per_device: Bytes that one device sends, for one run of the instruction.
        count: Runs of the instruction in one run of the program.
        count_is_exact: False in a loop whose trip count is not in the text; it is counted as one trip.
        dtype: Element type in XLA's spelling; that with most bytes for several arrays.
        op_name: JAX's path of the operation that needs it, `jit(step)/transpose(jvp(M))/dense/dot_general`.
    """

    kind: CollectiveKind
    name: str
    group_size: int
    groups: tuple[tuple[int, ...], ...] | None
    result_bytes: int
    sent_bytes_per_device: float
    count: int
    count_is_exact: bool
    dtype: str
    op_name: str

    @property
    def total_bytes(self) -> float:
        """Bytes sent per device in one run of the program."""
        return self.count * self.sent_bytes_per_device


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Per device, one run of the program: runs and bytes sent by kind of collective, and the total."""

    count: Mapping[CollectiveKind, int]
    bytes: Mapping[CollectiveKind, float]
    count_is_exact: bool

    @property
    def total_bytes(self) -> float:
        return sum(self.bytes.values())

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {n} ({self.bytes[kind] / 1e6:.2f} MB)" for kind, n in sorted(self.count.items()))
        return f"{self.total_bytes / 1e6:.2f} MB sent per device: {kinds or 'nothing'}"


def collectives(text: str, *, as_written: bool = False) -> tuple[Collective, ...]:
    """The collectives of a compiled program, from the text of `compiled.as_text()`.

    An instruction in a loop counts as often as the loop turns, of a conditional the branch that sends most bytes
    counts. TPU writes an asynchronous collective into each of the fusions that overlap it: it counts once. TPU also
    fuses an all-reduce with the slice that each device keeps, and runs that as a reduce-scatter: `as_written` counts it
    as the all-reduce that its text says.

    Raises:
        InvalidArgumentError: The text is no HLO module.
    """
    reader = _Reader(module=parse.parse(text), as_written=as_written, known={})
    return reader.computation(reader.module.entry)


def traffic(collectives: tuple[Collective, ...]) -> Traffic:
    """Sums by kind."""
    count: dict[CollectiveKind, int] = {}
    sent: dict[CollectiveKind, float] = {}
    for c in collectives:
        count[c.kind] = count.get(c.kind, 0) + c.count
        sent[c.kind] = sent.get(c.kind, 0.0) + c.total_bytes
    return Traffic(count=count, bytes=sent, count_is_exact=all(c.count_is_exact for c in collectives))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Reader:
    module: parse.Module
    as_written: bool
    known: dict[str, tuple[Collective, ...]]

    def computation(self, name: str) -> tuple[Collective, ...]:
        """The collectives of one run of a computation and of all it calls."""
        if name not in self.known:
            body = self.module.computations[name]
            starts, waits = _async_markers(body)
            collectives: list[Collective] = []
            for instruction in body.instructions.values():
                kind = _PLAIN.get(instruction.opcode) or _STARTS.get(instruction.opcode)
                if kind is None:
                    collectives += self._called(instruction)
                elif waits or ("chain_id=" in instruction.rest and not starts):
                    continue  # TPU: the same collective, waited for or carried on by a later fusion
                else:
                    collectives.append(self._collective(instruction, kind, body))
            self.known[name] = tuple(collectives)
        return self.known[name]

    def _called(self, instruction: parse.Instruction) -> tuple[Collective, ...]:
        match instruction.opcode:
            case "while":
                (body,), (condition,) = instruction.called("body"), instruction.called("condition")
                if LATER_TURNS in instruction.op_name:  # of rows that the first turn left: most often of none
                    return ()
                turns = trip_count(self.module, instruction)
                inside = self.computation(body) + self.computation(condition)
                return tuple(
                    dataclasses.replace(
                        c, count=c.count * (turns or 1), count_is_exact=c.count_is_exact and turns is not None
                    )
                    for c in inside
                )
            case "conditional":
                names = instruction.called("branch_computations") or (
                    *instruction.called("true_computation"),
                    *instruction.called("false_computation"),
                )
                branches = (self.computation(name) for name in names)
                return max(branches, key=lambda branch: sum(c.total_bytes for c in branch))
            case "fusion" | "async-start":
                names = instruction.called("calls")
            case "call":
                names = instruction.called("to_apply")
            case "custom-call":
                names = instruction.called("called_computations")
            case _:
                return ()
        inside = tuple(c for name in names for c in self.computation(name))
        return tuple(c if c.op_name else dataclasses.replace(c, op_name=instruction.op_name) for c in inside)

    def _collective(self, instruction: parse.Instruction, kind: CollectiveKind, body: parse.Computation) -> Collective:
        arrays = parse.arrays_of(_result_text(instruction, kind))
        if kind is CollectiveKind.RAGGED_ALL_TO_ALL:
            arrays = _sent_rows(instruction, arrays, body)
        result_bytes = sum(a.nbytes for a in arrays)
        attributes = instruction.attributes
        groups: tuple[tuple[int, ...], ...] | None
        if kind is CollectiveKind.COLLECTIVE_PERMUTE:
            groups, group_size = parse.source_target_pairs(attributes), 2
        else:
            groups = parse.replica_groups(attributes, self.module.num_devices)
            group_size = max(map(len, groups)) if groups else self.module.num_devices
        if not self.as_written and kind is CollectiveKind.ALL_REDUCE and _keeps_a_slice(body):
            kind, result_bytes = CollectiveKind.REDUCE_SCATTER, result_bytes // group_size
        return Collective(
            kind=kind,
            name=instruction.name,
            group_size=group_size,
            groups=groups,
            result_bytes=result_bytes,
            sent_bytes_per_device=float(sent_bytes(kind, result_bytes, group_size)),
            count=1,
            count_is_exact=True,
            dtype=max(arrays, key=lambda a: a.nbytes).dtype if arrays else "",
            op_name=instruction.op_name,
        )


def _result_text(instruction: parse.Instruction, kind: CollectiveKind) -> str:
    """The shape of the result. An asynchronous start has (operands, results, ...); all-reduce only results."""
    elements = instruction.tuple_elements
    if instruction.opcode == str(kind) or len(elements) < 2:
        return instruction.shape_text
    if kind is CollectiveKind.ALL_REDUCE and not elements[0].startswith("("):
        return instruction.shape_text
    return elements[1]


def _sent_rows(
    instruction: parse.Instruction, arrays: tuple[parse.Array, ...], body: parse.Computation
) -> tuple[parse.Array, ...]:
    """The smaller one of what a ragged all-to-all sends and makes: the other one has room for more rows."""
    if instruction.opcode == str(CollectiveKind.RAGGED_ALL_TO_ALL):
        operand = body.instructions.get(instruction.operands[0])
        sent = operand.arrays[:1] if operand is not None else arrays
    else:
        sent = parse.arrays_of(instruction.tuple_elements[0])[:1]
    return min(sent, arrays, key=lambda of: sum(a.nbytes for a in of))


def _async_markers(body: parse.Computation) -> tuple[bool, bool]:
    """Whether this is TPU's fusion that starts an asynchronous collective, or the fusion that waits for it."""
    targets = [i.rest for i in body.instructions.values() if i.opcode == "custom-call"]
    return (
        any('custom_call_target="AsyncCollectiveStart"' in target for target in targets),
        any('custom_call_target="AsyncCollectiveDone"' in target for target in targets),
    )


def _keeps_a_slice(body: parse.Computation) -> bool:
    """Whether this is TPU's fusion of an all-reduce with the slice that each device keeps."""
    return body.name.startswith("all-reduce-scatter") and body.root.opcode in ("dynamic-slice", "bitcast", "reshape")
