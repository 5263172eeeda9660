"""What a checkpoint says about itself, in JSON: its leaves, the plan's file and the data position.

A checkpoint of step 50 is the folder `FOLDER/50`: `manifest/metadata` is this file, `state/` the arrays as orbax writes
them. Reading it needs no devices. Nothing in it is run or unpickled, and its paths are checked before a file is opened.
"""

from __future__ import annotations

import collections
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from autopar.checkpoint.leaves import array_dtype, is_name, key_dtype, number_of
from autopar.common.files import JsonFaultError, decoded
from autopar.errors import CheckpointFormatError, CheckpointNotFoundError, PlanFormatError
from autopar.plan.file import decode
from autopar.plan.plan import Plan

logger = logging.getLogger("autopar")

FORMAT_VERSION = 1
STATE, MANIFEST = "state", "manifest"
_MANIFEST_FILE = "metadata"  # as orbax names the file of a JSON item
_COMMITTED = "_CHECKPOINT_METADATA"  # what orbax writes when a checkpoint is complete
_ARRAYS_FILE = "_METADATA"
_HINT = "restore another step of the folder (autopar checkpoint show FOLDER lists them)"

Kind = Literal["array", "key", "number"]


class LeafRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One leaf of the state.

    Attributes:
        kind: An array, typed random keys, or a number (or text) of Python.
        shape, dtype: Those of the array; keys have their implementation for a type.
        stored_dtype: The type of the array on disk: that of its bits, where the format has no such type.
        is_numpy: Whether it was an array of numpy.
        number: The value of a number as text, exact; floats in hexadecimal. `dtype` is then its Python type.
    """

    name: str
    kind: Kind
    shape: tuple[int, ...] = ()
    dtype: str
    stored_dtype: str = ""
    is_numpy: bool = False
    number: str = ""

    @property
    def leaf_dtype(self) -> Any:
        """The type of an array or of random keys. Raises: TypeError, ValueError for no type, an unknown one."""
        return key_dtype(self.dtype) if self.kind == "key" else array_dtype(self.dtype)

    @property
    def is_host(self) -> bool:
        """Whether it was a number of Python or an array of numpy."""
        return self.kind == "number" or self.is_numpy

    @property
    def value(self) -> Any:
        """The value of a number of Python. Raises: ValueError."""
        return number_of(self.dtype, self.number)

    @property
    def is_stored(self) -> bool:
        """Whether the arrays on disk have it: not what has no elements."""
        return self.kind != "number" and 0 not in self.shape


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The whole file. `plan` is the text of a plan file, or empty; `data` a position, or None."""

    format_version: int
    step: int
    leaves: tuple[LeafRecord, ...]
    plan: str = ""
    data: Any = None

    def plan_of(self, where: str) -> Plan | None:
        """The plan that the state was saved under. Raises: PlanFormatError for a damaged or foreign one."""
        return Plan(decode(self.plan.encode(), f"{where}, plan")) if self.plan else None


class _Version(msgspec.Struct):
    format_version: int


class _Arrays(msgspec.Struct):
    use_ocdbt: bool = False


def complete_steps(folder: Path) -> list[int]:
    """The numbers of the complete checkpoints of a folder, ascending. Unfinished ones have other names or no end."""
    if not folder.is_dir():
        return []
    names = [entry.name for entry in os.scandir(folder) if entry.name.isascii() and entry.name.isdigit()]
    return sorted(int(name) for name in names if str(int(name)) == name and (folder / name / _COMMITTED).is_file())


def find(folder: Path, step: int | None, steps: Sequence[int] | None = None) -> int:
    """The number of a checkpoint of a folder: of a step, or the latest; `steps` are those in it, if they are known.

    Raises: CheckpointNotFoundError.
    """
    steps = complete_steps(folder) if steps is None else steps
    if not steps or (step is not None and step not in steps):
        there = (
            "no folder" if not folder.is_dir() else f"steps {list(steps)}" if steps else "no complete checkpoint in it"
        )
        raise CheckpointNotFoundError(
            where=str(folder),
            expected="a checkpoint" if step is None else f"a checkpoint of step {step}",
            got=there,
            hint="save one with Checkpointer.save, or begin anew where there is none: Checkpointer.restore_or",
        )
    return steps[-1] if step is None else step


def read(folder: Path, step: int) -> Manifest:
    """The manifest of a complete checkpoint, its plan and its paths checked.

    Raises: CheckpointFormatError for a newer format, a damaged file, or links and paths that lead elsewhere;
    PlanFormatError for a plan file that was changed.
    """
    at = folder / str(step)
    if not at.is_dir():
        raise CheckpointNotFoundError(
            where=str(at),
            expected="the checkpoint that process 0 sees",
            got="no such folder in this process",
            hint="save to a folder that all processes share",
        )
    _check_paths(at)
    path = at / MANIFEST / _MANIFEST_FILE
    where = str(path)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise _fault(str(at), "a checkpoint that autopar saved", f"none: {MANIFEST} is missing") from None
    try:
        version = decoded(data, _Version, "the manifest of a checkpoint").format_version
        if version > FORMAT_VERSION:
            raise CheckpointFormatError(
                where=where,
                expected=f"format version {FORMAT_VERSION} at most",
                got=f"format version {version}",
                hint="a newer autopar saved it: restore with that version, or update this one",
            )
        manifest = decoded(data, Manifest, "the manifest of a checkpoint")
    except JsonFaultError as error:
        raise _fault(f"{where}, {error.fault.place}", error.fault.expected, error.fault.got) from error
    if manifest.step != step:
        raise _fault(where, f"the manifest of step {step}", f"that of step {manifest.step}")
    for name, times in collections.Counter(leaf.name for leaf in manifest.leaves).items():
        if not is_name(name) or times > 1:
            raise _fault(where, "names of leaves, each once, without '..'", repr(name))
    for leaf in manifest.leaves:
        if any(size < 0 for size in leaf.shape):
            raise _fault(f"{where}, {leaf.name}", "a shape", str(leaf.shape))
        try:
            _ = leaf.value if leaf.kind == "number" else leaf.leaf_dtype
        except (TypeError, ValueError) as error:
            raise _fault(f"{where}, {leaf.name}", "a type and a value", f"{leaf.kind} {leaf.dtype!r}") from error
    _check_arrays(at, manifest)
    try:
        manifest.plan_of(where)
    except PlanFormatError:
        if _other_plan_format(manifest.plan):
            logger.warning("%s: its plan is of an older format and left out; the state opens under any plan", at)
            return msgspec.structs.replace(manifest, plan="")
        raise
    return manifest


def encoded(manifest: Manifest) -> Any:
    """The manifest as what `json.dumps` takes."""
    return msgspec.to_builtins(manifest)


def _other_plan_format(plan: str) -> bool:
    """Whether a plan is of an older format: the state opens under any plan, so that one of no use is left out."""
    from autopar.plan.schema import FORMAT_VERSION as PLAN_FORMAT_VERSION

    try:
        return msgspec.json.decode(plan, type=_Version).format_version < PLAN_FORMAT_VERSION
    except msgspec.DecodeError:
        return False


def _check_paths(at: Path) -> None:
    """Raises: CheckpointFormatError where a checkpoint is, or holds, a link."""
    if at.is_symlink():
        raise _fault(str(at), "a folder", "a symbolic link")
    for root, folders, files in os.walk(at):
        for name in (*folders, *files):
            path = Path(root, name)
            if path.is_symlink():
                raise _fault(str(path), "files and folders of the checkpoint itself", "a symbolic link")


def _check_arrays(at: Path, manifest: Manifest) -> None:
    """Raises: CheckpointFormatError where the arrays are not in one database, whose keys are no paths of files."""
    if not any(leaf.is_stored for leaf in manifest.leaves):
        return
    path = at / STATE / _ARRAYS_FILE
    try:
        arrays = decoded(path.read_bytes(), _Arrays, "orbax's description of the arrays")
    except FileNotFoundError:
        raise _fault(str(path), "orbax's description of the arrays", "no such file") from None
    except JsonFaultError as error:
        raise _fault(f"{path}, {error.fault.place}", error.fault.expected, error.fault.got) from error
    if not arrays.use_ocdbt:
        raise _fault(f"{path}, $.use_ocdbt", "arrays in one OCDBT database", "a file for each by its name")


def _fault(where: str, expected: str, got: str) -> CheckpointFormatError:
    return CheckpointFormatError(where=where, expected=expected, got=got, hint=_HINT)
