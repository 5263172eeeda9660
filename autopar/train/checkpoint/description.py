"""Checkpoints without devices: what is in a folder, as text and values; their parameters as a safetensors file."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np

from autopar.common import jax_compat
from autopar.common.text import PLAIN, TextFormat, text_of_bytes
from autopar.errors import InvalidArgumentError, UnsupportedError
from autopar.plan.plan import Plan
from autopar.plan.summary import sentence
from autopar.train.checkpoint.folders import folder_of
from autopar.train.checkpoint.manifest import LeafRecord, complete_steps, find, read
from autopar.train.checkpoint.stored_arrays import restored_array
from autopar.train.checkpoint.targets import read_arrays


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """The steps of a folder, and what the checkpoint of one of them holds."""

    folder: str
    steps: tuple[int, ...]
    step: int
    leaves: tuple[LeafRecord, ...]
    plan: Plan | None
    data: Any

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "folder": self.folder,
            "steps": list(self.steps),
            "step": self.step,
            "bytes": sum(map(bytes_of, self.leaves)),
            "leaves": [_row(leaf) for leaf in self.leaves],
            "plan": None if self.plan is None else sentence(self.plan.record),
            "data": self.data,
        }

    def text(self, text_format: TextFormat = PLAIN) -> str:
        """The steps, and of one its leaves, plan and position in the data."""
        widths = [max((len(leaf.name) for leaf in self.leaves), default=0)]
        widths.append(max((len(_type(leaf)) for leaf in self.leaves), default=0))
        rows = [
            f"  {leaf.name:<{widths[0]}}  {_type(leaf):<{widths[1]}}  {_size(leaf)}".rstrip() for leaf in self.leaves
        ]
        total = text_of_bytes(sum(map(bytes_of, self.leaves)))
        return text_format.broken(
            [
                f"{self.folder}: steps {', '.join(map(str, self.steps))}",
                f"Step {self.step}: {len(self.leaves)} leaves, {total}",
                *rows,
                f"Plan: {'none' if self.plan is None else sentence(self.plan.record)}",
                f"Data: {'no position' if self.data is None else json.dumps(self.data)}",
            ]
        )

    __str__ = text


def describe(folder: str | Path, step: int | None = None) -> Description:
    """The latest checkpoint of a folder, or that of a step. Raises: as `Checkpointer.restore`."""
    path = folder_of(folder)
    number = find(path, step)
    file = read(path, number)
    return Description(
        folder=str(folder),
        steps=tuple(complete_steps(path)),
        step=number,
        leaves=file.leaves,
        plan=file.plan_of(str(path)),
        data=file.data,
    )


def bytes_of(leaf: LeafRecord) -> int:
    """Bytes of a leaf, whole; numbers of Python count as none."""
    if leaf.kind == "number":
        return 0
    return math.prod(leaf.shape) * jax_compat.itemsize(jax.ShapeDtypeStruct((), leaf.leaf_dtype))


def _row(leaf: LeafRecord) -> dict[str, Any]:
    row = {"name": leaf.name, "kind": leaf.kind, "dtype": leaf.dtype, "shape": list(leaf.shape)}
    return row | ({"value": leaf.number} if leaf.kind == "number" else {"bytes": bytes_of(leaf)})


def _type(leaf: LeafRecord) -> str:
    if leaf.kind == "number":
        return f"{leaf.dtype} {leaf.value!r}"
    return f"{'keys of ' if leaf.kind == 'key' else ''}{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def _size(leaf: LeafRecord) -> str:
    return "" if leaf.kind == "number" else text_of_bytes(bytes_of(leaf))


# The part of a state that is exported where nothing is selected.
PARAMETERS = "params"

# https://huggingface.co/docs/safetensors: eight bytes with the length of the header, the header in JSON, the arrays
# without gaps in little-endian order. The library's own writer wants all of them in memory at once.
_DTYPES = {
    "bool": "BOOL",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
_ALIGNMENT = 8


def export(
    folder: str | Path, path: str | Path, files: ModuleType, step: int | None = None, select: str | None = None
) -> list[str]:
    """Writes the arrays below a part of the state to a safetensors file; returns their names there.

    `select` is a name as `describe` shows it, such as `0/params`; `params` by default. The names in the file are those
    behind it, with dots: `dense.kernel`. `files` is `autopar.train.checkpoint.array_files`.

    Raises: InvalidArgumentError where nothing is called so; UnsupportedError for types that the format does not have;
    as `Checkpointer.restore`.
    """
    at = folder_of(folder)
    number = find(at, step)
    selected = _selected(read(at, number).leaves, select, f"{folder}, step {number}")
    header: dict[str, object] = {"__metadata__": {"format": "pt", "step": str(number)}}
    offset = 0
    for name, leaf in selected.items():
        if leaf.kind != "array" or leaf.dtype not in _DTYPES:
            raise UnsupportedError(
                where=f"{folder}, step {number}, {leaf.name}",
                expected="an array of a type that safetensors has",
                got="random keys" if leaf.kind == "key" else leaf.dtype,
                hint="select what is exported: --select PATH",
            )
        end = offset + bytes_of(leaf)
        header[name] = {"dtype": _DTYPES[leaf.dtype], "shape": list(leaf.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    unfinished = Path(f"{path}.new")
    with unfinished.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for leaf in selected.values():
            if leaf.is_stored:
                wanted = files.Wanted(shape=leaf.shape, dtype=np.dtype(leaf.stored_dtype), sharding=None)
                stored = read_arrays(files, at, number, {leaf.name: wanted})[leaf.name]
                file.write(np.ascontiguousarray(restored_array(stored, leaf, None)).tobytes())
    os.replace(unfinished, path)
    return list(selected)


def _selected(leaves: Sequence[LeafRecord], select: str | None, where: str) -> dict[str, LeafRecord]:
    """The leaves below a part of the state, by their names in the file."""
    part = (PARAMETERS if select is None else select).strip("/")
    below: dict[str, LeafRecord] = {}
    for leaf in leaves:
        if leaf.kind != "number" and (leaf.name == part or leaf.name.startswith(f"{part}/")):
            name = (leaf.name[len(part) + 1 :] or leaf.name).replace("/", ".")
            if name in below:
                raise UnsupportedError(
                    where=where,
                    expected="names that differ with dots for slashes too, as safetensors files have them",
                    got=f"{below[name].name!r} and {leaf.name!r}, both {name!r}",
                    hint="export one of them alone: --select PATH",
                )
            below[name] = leaf
    if not below:
        tops = dict.fromkeys(leaf.name.split("/")[0] for leaf in leaves)
        raise InvalidArgumentError(
            where=where,
            expected="a part of the state with arrays" if select else f"parameters below {PARAMETERS!r}",
            got=f"no {part!r} among {', '.join(tops)}",
            hint="--select one of them, or a part of one, as autopar checkpoint show prints it",
        )
    return below
