"""What is in a folder of checkpoints, as text and as values; no devices are needed, and no arrays are read."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import jax

from autopar.checkpoint.manifest import LeafRecord, complete_steps, find, read
from autopar.common import jax_compat
from autopar.common.text_console import PLAIN, TextFormat
from autopar.common.units import text_of_bytes
from autopar.plan.plan import Plan
from autopar.plan.summary import sentence


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
    path = Path(folder)
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
