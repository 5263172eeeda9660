"""A parser for the text of an optimised XLA program: computations, instructions, shapes and replica groups.

Reads the output of `compiled.as_text()` on CPU, GPU and TPU. Parsing is lazy: a line is split into name, shape,
operation and rest, and the rest is parsed on access.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re

import numpy as np

from autopar.errors import InvalidArgumentError

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .* )?\{$")
_LINE = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (\S.*?) ([a-z][\w\-]*)\((.*)$")
_END = re.compile(r"^\}(?:, execution_thread=.*)?\s*(?://.*)?$")
_COMMENT = re.compile(r"/\*.*?\*/")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")
_BITS_IN_NAME = re.compile(r"^(?:[sufc]|bf)(\d+)")
_NAME = re.compile(r"%([\w.\-]+)")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Array:
    """An array type, as one device holds it."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return (math.prod(self.dims) * _bits(self.dtype) + 7) // 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One line of a computation. `shape_text` and `rest` (operands and attributes) are as written."""

    name: str
    opcode: str
    shape_text: str
    rest: str
    is_root: bool

    @property
    def arrays(self) -> tuple[Array, ...]:
        """All arrays of the result, tuples flattened."""
        return _arrays(self.shape_text)

    @property
    def tuple_elements(self) -> tuple[str, ...]:
        """The texts of a tuple result's elements, or an empty tuple where the result is no tuple."""
        if not self.shape_text.startswith("("):
            return ()
        return _split(_COMMENT.sub("", self.shape_text)[1:-1])

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of the operands; for a `constant` or a `parameter` its literal."""
        return tuple(
            m.group(1) if (m := _NAME.search(text)) else text.split()[-1] for text in _split(self.argument_text)
        )

    @property
    def argument_text(self) -> str:
        return _COMMENT.sub("", self.rest[: _closing(self.rest)])

    @property
    def attributes(self) -> str:
        return self.rest[_closing(self.rest) + 1 :]

    @property
    def op_name(self) -> str:
        """The path that JAX gave to the operation, or an empty string."""
        m = re.search(r'op_name="([^"]*)"', self.rest)
        return m.group(1) if m else ""

    def called(self, attribute: str) -> tuple[str, ...]:
        """Names of the computations in `attribute=%name` or `attribute={%name, %name}`."""
        m = re.search(rf"\b{attribute}=(?:\{{([^}}]*)\}}|%?([\w.\-]+))", self.attributes)
        if not m:
            return ()
        return tuple(name.strip().lstrip("%") for name in (m.group(1) or m.group(2) or "").split(",") if name.strip())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Computation:
    """A named block of instructions, in order."""

    name: str
    instructions: dict[str, Instruction]

    @property
    def root(self) -> Instruction:
        return next(i for i in reversed(self.instructions.values()) if i.is_root)

    def parameter(self, index: int) -> str:
        """Name of the instruction that is parameter `index`."""
        return next(
            i.name for i in self.instructions.values() if i.opcode == "parameter" and i.operands == (str(index),)
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """A whole program. `num_devices` is partitions times replicas."""

    computations: dict[str, Computation]
    entry: str
    num_devices: int


def parse(text: str) -> Module:
    """The module that `text` spells.

    Raises:
        InvalidArgumentError: The text has no entry computation, so it is no HLO module.
    """
    computations: dict[str, Computation] = {}
    entry, current = "", None
    num_devices = 1
    for line in text.splitlines():
        if current is None:
            if line.startswith("HloModule"):
                sizes = re.findall(r"(?:num_partitions|replica_count)=(\d+)", line)
                num_devices = math.prod(int(n) for n in sizes)
            elif m := _HEADER.match(line):
                current = Computation(name=m.group(2), instructions={})
                computations[current.name] = current
                entry = current.name if m.group(1) else entry
        elif _END.match(line):
            current = None
        elif m := _LINE.match(line):
            root, name, shape_text, opcode, tail = m.groups()
            current.instructions[name] = Instruction(
                name=name, opcode=opcode, shape_text=shape_text, rest=tail, is_root=root is not None
            )
        elif current.instructions:
            # Attributes of Pallas calls (`kernel_metadata`) span several lines, of which one begins with "}".
            name, last = current.instructions.popitem()
            current.instructions[name] = dataclasses.replace(last, rest=f"{last.rest} {line.strip()}")
    if not entry:
        raise InvalidArgumentError(
            where="the text of a compiled program",
            expected="an HLO module with an ENTRY computation",
            got=f"{len(text)} characters that begin with {text[:60]!r}",
            hint="pass compiled.as_text() of step.lower(...).compile(); lowered.as_text() is StableHLO",
        )
    return Module(computations=computations, entry=entry, num_devices=num_devices)


def arrays_of(shape_text: str) -> tuple[Array, ...]:
    """All arrays of a shape as it is written, tuples flattened."""
    return _arrays(shape_text)


def replica_groups(attributes: str, num_devices: int) -> tuple[tuple[int, ...], ...] | None:
    """Devices of each group, from any spelling XLA uses; None where no groups are written.

    Understands `{{0,1},{2,3}}`, `{}` (all devices), `[2,4]<=[4,2]T(1,0)`, `mesh['x'=2,'y'=4] {'x'}` with sub-axes
    `'x':(1)2` and `device_ids=([2,4]T(1,0))` or `device_ids=(3,1,0,2)`.
    """
    m = re.search(r"replica_groups=(.*)", attributes)
    return None if m is None else _groups(_group_text(m.group(1)), num_devices)


def source_target_pairs(attributes: str) -> tuple[tuple[int, int], ...] | None:
    """The (source, target) pairs of a collective-permute."""
    m = re.search(r"source_target_pairs=\{(\{[\d,{} ]*\})\}", attributes)
    return None if m is None else tuple((int(a), int(b)) for a, b in re.findall(r"\{(\d+),\s*(\d+)\}", m.group(1)))


def _group_text(text: str) -> str:
    """The spelling of the groups at the start of `text`, without the attributes that follow."""
    if text.startswith("{"):
        return text[: _closing(text[1:], "{", "}") + 2]
    if text.startswith("["):
        m = re.match(r"\[[\d,]*\]<=\[[\d,]*\](?:T\([\d,]*\))?", text)
        assert m, f"expected replica groups like [2,4]<=[8], got {text[:80]!r}"
        return m.group(0)
    return text[: text.index("}") + 1]


@functools.lru_cache(maxsize=4096)
def _groups(text: str, num_devices: int) -> tuple[tuple[int, ...], ...]:
    if text.startswith("{"):
        groups = tuple(_ints(inner) for inner in re.findall(r"\{([\d,\s]*)\}", text[1:-1]))
        return groups or (tuple(range(num_devices)),)
    if text.startswith("["):
        m = re.match(r"\[(\d+),(\d+)\]<=(.*)", text)
        assert m, f"expected replica groups like [2,4]<=[8], got {text!r}"
        ids = _iota(m.group(3)).reshape(int(m.group(1)), int(m.group(2)))
        return tuple(tuple(group) for group in ids.tolist())
    return _mesh_groups(text)


def _mesh_groups(text: str) -> tuple[tuple[int, ...], ...]:
    """`mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a','b':(2)2}`: the groups that the axes in braces span."""
    m = re.match(r"@?\w*[\[<]([^\]>]*)[\]>](?:,\s*device_ids=\((.*)\))?\s*\{([^}]*)\}", text)
    assert m, f"expected replica groups like mesh['x'=2,'y'=4] {{'x'}}, got {text!r}"
    sizes = {name: int(size) for name, size in re.findall(r"'?([^',=\[\]]+)'?=(\d+)", m.group(1))}
    order = m.group(2)
    if order is None:
        ids = np.arange(math.prod(sizes.values()))
    else:
        ids = _iota(order) if order.startswith("[") else np.array(_ints(order))
    # Every axis is cut into the piece that a group spans and what lies before and after it.
    dims: list[int] = []
    pieces: dict[str, list[tuple[int, int, int]]] = {name: [] for name in sizes}  # (before, size, rank in the braces)
    for rank, (name, before, size) in enumerate(
        re.findall(r"'?([^',:(){} ][^',:(){}]*)'?(?::\((\d+)\)(\d+))?", m.group(3))
    ):
        pieces[name].append((int(before or 1), int(size or sizes[name]), rank))
    spanned: dict[int, int] = {}
    for name, axis_size in sizes.items():
        parsed_size = 1
        for before, size, rank in sorted(pieces[name]):
            dims += [before // parsed_size, size]
            spanned[rank] = len(dims) - 1
            parsed_size = before * size
        dims.append(axis_size // parsed_size)
    inside = [spanned[rank] for rank in sorted(spanned)]
    outside = [d for d in range(len(dims)) if d not in inside]
    group_size = math.prod(dims[d] for d in inside)
    groups = ids.reshape(dims).transpose(outside + inside).reshape(-1, group_size)
    return tuple(tuple(group) for group in groups.tolist())


def _iota(text: str) -> np.ndarray:
    """`[4,2]T(1,0)`: 0, 1, 2, ... in shape 4 x 2, transposed, flattened."""
    m = re.match(r"\[([\d,]*)\](?:T\(([\d,]*)\))?", text)
    assert m, f"expected device ids like [4,2]T(1,0), got {text!r}"
    dims = _ints(m.group(1))
    ids = np.arange(math.prod(dims)).reshape(dims)
    return (ids.transpose(_ints(m.group(2))) if m.group(2) else ids).reshape(-1)


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n.strip())


@functools.lru_cache(maxsize=65536)
def _arrays(shape_text: str) -> tuple[Array, ...]:
    return tuple(
        Array(dtype=dtype, dims=_ints(dims.replace("<=", "")))
        for dtype, dims in _ARRAY.findall(shape_text)
        if dtype != "token"
    )


@functools.lru_cache(maxsize=64)
def _bits(dtype: str) -> int:
    """Width of an element; XLA spells it in the name (`bf16`, `f8e4m3fn`, `s4`), except for `pred`.

    Raises:
        InvalidArgumentError: A type whose name holds no width.
    """
    if dtype == "pred":
        return 8
    if dtype == "token":
        return 0
    m = _BITS_IN_NAME.match(dtype)
    if m is None:
        raise InvalidArgumentError(
            where="the text of a compiled program",
            expected="element types such as f32, bf16 or s4",
            got=repr(dtype),
            hint="this is a type that autopar does not know yet: please report it",
        )
    return int(m.group(1))


def _closing(text: str, opening: str = "(", closing: str = ")") -> int:
    """Index of the bracket that closes one opened just before `text`."""
    depth = 1
    for m in re.finditer(rf"[{re.escape(opening + closing)}]", text):
        depth += 1 if m.group(0) == opening else -1
        if depth == 0:
            return m.start()
    return len(text)


def _split(text: str) -> tuple[str, ...]:
    """Splits at the commas that stand outside of brackets."""
    parts, depth, start = [], 0, 0
    for m in re.finditer(r"[(){}\[\],]", text):
        c = m.group(0)
        if c == ",":
            if depth == 0:
                parts.append(text[start : m.start()].strip())
                start = m.end()
        else:
            depth += 1 if c in "({[" else -1
    last = text[start:].strip()
    return (*parts, last) if last else tuple(parts)
