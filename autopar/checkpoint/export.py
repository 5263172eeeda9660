"""The parameters of a checkpoint as a safetensors file, one leaf in memory at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import numpy as np

from autopar.checkpoint.description import bytes_of
from autopar.checkpoint.manifest import LeafRecord, find, read
from autopar.checkpoint.restoring import read_arrays
from autopar.checkpoint.stored_arrays import restored_array
from autopar.errors import InvalidArgumentError, UnsupportedError

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
    behind it, with dots: `dense.kernel`. `files` is `autopar.checkpoint.array_files`.

    Raises: InvalidArgumentError where nothing is called so; UnsupportedError for types that the format does not have;
    as `Checkpointer.restore`.
    """
    at = Path(folder).absolute()
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
