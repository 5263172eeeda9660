"""The collectives of a compiled XLA program: the runs and the bytes of each.

The bytes are those of ring algorithms (`autopar.hardware.collective_cost.sent_bytes`). `send` and `recv`
(point-to-point transfers that a program writes itself) are not read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from autopar.hardware.collective_cost import CollectiveKind, sent_bytes
from autopar.xla import loops, parse

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
                turns = loops.trip_count(self.module, instruction)
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
