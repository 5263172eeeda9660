"""The leaves of a checkpoint read into the structure and the layout that is asked for."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np

from autopar.checkpoint.leaves import named_leaves, nested, tree_of
from autopar.checkpoint.manifest import Manifest
from autopar.checkpoint.stored_arrays import restored_array, stored_shape, stored_sharding
from autopar.checkpoint.targets import PlannedStep, Target, shardings_for, targets_of, targets_of_all
from autopar.errors import CheckpointFormatError, MissingPackageError
from autopar.executables.multiprocess import with_process_lost_errors
from autopar.plan.plan import Plan
from autopar.runtime.execution.cross_process import absent
from autopar.runtime.execution.global_arrays import aval_of, from_whole


def restored(
    folder: Path,
    number: int,
    file: Manifest,
    like: Any,
    where: str,
    layout: tuple[PlannedStep | None, Plan | None, Any],
    *,
    partial: bool,
) -> Any:
    """The state of a checkpoint in the structure and the layout that is asked for."""
    if like is None:
        wanted = targets_of_all(file, where)
        return nested(dict(zip([t.record.name for t in wanted], _values(folder, number, wanted), strict=True)))
    step, plan, shardings = layout
    leaves, structure = named_leaves(like)
    placed = shardings_for(leaves, structure, step=step, plan=plan, shardings=shardings)
    wanted = targets_of(file, leaves, placed, where, partial=partial)
    return tree_of(structure, _values(folder, number, wanted))


def _values(folder: Path, number: int, wanted: list[Target]) -> list[Any]:
    files = array_files("Checkpointer.restore")
    reads = {
        t.record.name: files.Wanted(
            shape=stored_shape(t.record),
            dtype=_type_read(t),
            sharding=None if t.sharding is None else stored_sharding(t.record, t.sharding),
        )
        for t in wanted
        if t.record.is_stored and (t.sharding is None or t.sharding.addressable_devices)
    }
    arrays = with_process_lost_errors(lambda: read_arrays(files, folder, number, reads)) if reads else {}
    return [_value(t, arrays) for t in wanted]


def read_arrays(files: ModuleType, folder: Path, number: int, reads: dict[str, Any]) -> dict[str, Any]:
    """Raises: CheckpointFormatError where arrays cannot be read."""
    try:
        arrays: dict[str, Any] = files.load(folder, number, reads)
    except (jax.errors.JaxRuntimeError, MemoryError):
        raise
    except Exception as error:  # orbax and tensorstore raise whatever they do, and `Exception` itself
        cause = str(error.__cause__ or error).splitlines() or [type(error).__name__]
        raise CheckpointFormatError(
            where=str(folder / str(number)),
            expected="arrays that can be read as they were saved",
            got=cause[0][:300],
            hint="restore another step of the folder (autopar checkpoint show FOLDER lists them)",
        ) from error
    return arrays


def _type_read(target: Target) -> Any:
    record = target.record
    if record.kind == "array" and record.stored_dtype == record.dtype and target.dtype is not None:
        return target.dtype
    return np.dtype(record.stored_dtype)


def _value(target: Target, arrays: dict[str, Any]) -> Any:
    record, sharding = target.record, target.sharding
    if record.name in arrays:
        return restored_array(arrays[record.name], record, sharding)
    if record.kind == "number":
        number = record.value
        if sharding is None:
            return number
        value: Any = np.asarray(number, target.dtype)
    elif sharding is not None and not sharding.addressable_devices:
        return absent(record.shape, target.dtype, sharding)
    elif record.kind == "key":
        raw = jax.numpy.zeros(stored_shape(record), record.stored_dtype)
        value = jax.random.wrap_key_data(raw, impl=record.dtype)
    else:
        value = np.zeros(record.shape, target.dtype)
    return value if sharding is None else from_whole(value, aval_of(value), sharding)


def array_files(where: str) -> ModuleType:
    """The module that imports orbax. Raises: MissingPackageError."""
    try:
        files = import_module("autopar.checkpoint.array_files")
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            where=where,
            expected="the packages of the extra autopar[train]",
            got=f"no {error.name}",
            hint="pip install orbax-checkpoint safetensors tensorstore",
        ) from error
    return files
