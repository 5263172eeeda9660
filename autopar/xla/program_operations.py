"""Which collective or computation, and which of the user's modules, an operation of a compiled program belongs to."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from autopar.frontend.build_graph import module_path, split_stack
from autopar.hardware.collective_cost import CollectiveKind
from autopar.xla import parse

COMPUTE, HOST_COPY = "compute", "copy to or from the host"
_MODULE = re.compile(r"^HloModule ([\w.\-]+)", re.MULTILINE)
# Operations that only hold others, which have events of their own.
_CONTAINERS = ("while", "conditional", "call")
_OURS = re.compile(r"^(?:shard_map|branch_\d+_fun)$")
_KINDS = {str(kind): str(kind) for kind in CollectiveKind}
_COLLECTIVES = _KINDS | {f"{name}-{end}": name for name in _KINDS for end in ("start", "done")}
_BETWEEN_STAGES = ("send", "recv", "send-done", "recv-done")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProgramOperation:
    """`kind` is COMPUTE, HOST_COPY or the name of a collective; `module` is empty for work of no module."""

    kind: str
    module: str


def operations_of(text: str) -> Mapping[tuple[str, str], ProgramOperation]:
    """The operations of compiled programs, by (program, operation), without those that only hold others."""
    found = {}
    starts = [match.start() for match in _MODULE.finditer(text)]
    for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
        name = _MODULE.match(text[start:end])
        assert name is not None, "the text begins with the header"
        for computation in parse.parse(text[start:end]).computations.values():
            for instruction in computation.instructions.values():
                if instruction.opcode not in _CONTAINERS:
                    found[name[1], instruction.name] = ProgramOperation(
                        kind=_kind(instruction.opcode), module=module_of(instruction.op_name)
                    )
    return found


def module_of(op_name: str) -> str:
    """The user's module in JAX's path of an operation: `jit(step)/jvp(M)/layer0/dot_general` is of `M/layer0`."""
    parts = split_stack(op_name)
    return module_path("/".join(part for part in parts[1:-1] if not _OURS.match(part)))


def _kind(opcode: str) -> str:
    if opcode in _BETWEEN_STAGES:
        return HOST_COPY
    return _COLLECTIVES.get(opcode, COMPUTE)
