"""What a checkpoint is restored to: the structure of the state, where its leaves are to lie, and their reading."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from autopar.common import jax_compat
from autopar.errors import (
    AutoparError,
    CheckpointFormatError,
    CheckpointMismatchError,
    InvalidArgumentError,
    MissingPackageError,
)
from autopar.execute import nnx_objects
from autopar.execute.step_leaves import with_process_lost_errors
from autopar.frontend.static_leaves import set_apart
from autopar.plan.plan import Plan, shardings_in
from autopar.runtime.transfers import absent, aval_of, from_whole
from autopar.train.checkpoint.manifest import LeafRecord, Manifest, NamedLeaf, named_leaves, nested, tree_of
from autopar.train.checkpoint.stored_arrays import restored_array, stored_shape, stored_sharding

NAMED = 4  # leaves that an error names


class PlannedStep(Protocol):
    """A step made by `autopar.parallelize`."""

    @property
    def latest_plan(self) -> Plan | None: ...

    def state_shardings(self, leaves: Sequence[Any]) -> Sequence[Any]: ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A leaf to restore: its record, and the shape, type and sharding that it is to have.

    `sharding` is None for numbers of Python and arrays of numpy.
    """

    record: LeafRecord
    dtype: Any
    sharding: Any | None


def structure_of_plan(plan: Plan, where: str) -> Any:
    """The state of the step of a plan as a tree of shapes, with the plan's shardings.

    Raises: InvalidArgumentError for a plan of a file, which knows no structure; UnsupportedError where a class in it
    accepts only arrays.
    """
    if plan.trees is None:
        raise InvalidArgumentError(
            where=where,
            expected="the structure of the state: like=, or a step that has a plan",
            got="the plan of a file, which knows no structure",
            hint="pass like=jax.eval_shape(create): the state's shapes",
        )
    arguments = []
    for i in sorted(plan.trees.donated):
        leaves = plan.argument_leaves(frozenset({i}))
        shapes = [
            jax.ShapeDtypeStruct(v.shape, jax_compat.struct(v.shape, v.dtype).dtype, sharding=plan.sharding_of(v))
            for v in leaves
        ]
        arguments.append(shardings_in(plan.trees.arguments[i], shapes, where))
    return arguments[0] if len(arguments) == 1 else tuple(arguments)


def like_created(create: Callable[..., Any], args: Sequence[Any], *, in_jit: bool) -> Any:
    """The state that `create` makes, with NNX objects split and the shapes of its JAX arrays, which are not made; all
    other leaves as they are, unless it is called `in_jit`, where they become JAX arrays.
    """
    others: dict[int, Any] = {}
    structure: Any = None

    def made() -> Any:
        nonlocal structure
        (tree,) = nnx_objects.split((create(*args),))
        if in_jit:
            return set_apart(tree)
        leaves, structure = jax.tree.flatten(tree)
        others.update((i, leaf) for i, leaf in enumerate(leaves) if not isinstance(leaf, jax.Array))
        return {i: leaf for i, leaf in enumerate(leaves) if i not in others}

    shapes = jax.eval_shape(made)
    if in_jit:
        return shapes
    return jax.tree.unflatten(structure, [(shapes | others)[i] for i in range(len(shapes) + len(others))])


def shardings_for(
    leaves: Sequence[NamedLeaf], structure: Any, *, step: PlannedStep | None, plan: Plan | None, shardings: Any
) -> list[Any]:
    """The sharding of each leaf: as asked for, by the step or its plan, or as the leaf itself has it.

    Raises: CheckpointMismatchError where the plan is of another state; NotEnoughDevicesError.
    """
    planned: Sequence[Any]
    arrays = [leaf for leaf in leaves if not leaf.is_static]
    if shardings is not None:
        planned = _given(shardings, arrays, structure)
    elif step is not None:
        planned = step.state_shardings([aval_of(leaf.value) for leaf in arrays])
    elif plan is not None:
        planned = shardings_of_plan(plan, arrays, "restore(plan=...)")
    else:
        return [getattr(leaf.value, "sharding", None) for leaf in leaves]
    sharding_of = {leaf.name: s for leaf, s in zip(arrays, planned, strict=True) if hasattr(leaf.value, "shape")}
    return [sharding_of.get(leaf.name) for leaf in leaves]


def targets_of(
    manifest: Manifest, leaves: Sequence[NamedLeaf], shardings: Sequence[Any], where: str, *, partial: bool
) -> list[Target]:
    """The targets of the leaves of a state, in order.

    Raises: CheckpointMismatchError that names leaves, what the state wants and what the checkpoint has.
    """
    records = {record.name: record for record in manifest.leaves}
    _check_names(records, leaves, where, partial=partial)
    default = SingleDeviceSharding(jax.local_devices()[0])
    out = []
    for leaf, sharding in zip(leaves, shardings, strict=True):
        record, value = records[leaf.name], leaf.value
        is_host = isinstance(value, np.ndarray | np.generic) or not hasattr(value, "shape")
        dtype = _checked_dtype(record, value, f"{where}, {leaf.path or leaf.name}")
        if sharding is None and not (is_host and (record.kind == "number" or record.is_numpy)):
            sharding = default
        if sharding is not None and dtype is not None:
            _check_jax_has(dtype, f"{where}, {leaf.path or leaf.name}")
        out.append(Target(record=record, dtype=dtype, sharding=sharding))
    return out


def targets_of_all(manifest: Manifest, where: str) -> list[Target]:
    """The leaves of a checkpoint as they are, on the first device.

    Raises: CheckpointMismatchError for an array of JAX of 64 bits, where JAX has none.
    """
    default = SingleDeviceSharding(jax.local_devices()[0])
    targets = []
    for record in manifest.leaves:
        dtype = None if record.kind == "number" else record.leaf_dtype
        sharding = None if record.kind == "number" or record.is_numpy else default
        if sharding is not None:
            _check_jax_has(dtype, f"{where}, {record.name}")
        targets.append(Target(record=record, dtype=dtype, sharding=sharding))
    return targets


def _given(shardings: Any, arrays: Sequence[NamedLeaf], structure: Any) -> list[Any]:
    if isinstance(shardings, Sharding):
        return [shardings] * len(arrays)
    given, own = named_leaves(shardings)
    if own != structure:
        raise InvalidArgumentError(
            where="restore(shardings=...)",
            expected=f"one sharding, or one for each of the {structure.num_leaves} leaves of the state",
            got=f"{len(given)}, in the structure {own}"[:500],
            hint="give a tree of the structure of like, such as plan.state_shardings",
        )
    return [leaf.value for leaf in given if not leaf.is_static]


def shardings_of_plan(
    plan: Plan, leaves: Sequence[NamedLeaf], where: str, error: type[AutoparError] = CheckpointMismatchError
) -> list[Any]:
    """The shardings of a plan's state for the leaves of a state.

    Raises: `error` where the plan is of another state; NotEnoughDevicesError.
    """
    plan.check_devices()
    if plan.trees is not None:
        planned = plan.argument_leaves(plan.trees.donated)
    else:
        planned = [value for value in plan.record.arguments if value.kind == "state"]
    for i, leaf in enumerate(leaves):
        shape = aval_of(leaf.value)
        wanted = (tuple(shape.shape), str(shape.dtype))
        has = (planned[i].shape, planned[i].dtype) if i < len(planned) else None
        if wanted != has:
            raise error(
                where=f"{where}, {leaf.path or leaf.name}",
                expected=f"{wanted[1]}{list(wanted[0])}, as the state has it",
                got="no such leaf in the plan" if has is None else f"{has[1]}{list(has[0])} in the plan",
                hint="give the plan of the step that takes this state, or shardings",
            )
    return [plan.sharding_of(value) for value in planned[: len(leaves)]]


def _check_names(records: dict[str, LeafRecord], leaves: Sequence[NamedLeaf], where: str, *, partial: bool) -> None:
    missing = [leaf.name for leaf in leaves if leaf.name not in records]
    wanted = {leaf.name for leaf in leaves}
    extra = [] if partial else [name for name in records if name not in wanted]
    if twice := [name for name in wanted if f"{name}~2" in records and f"{name}~2" not in wanted]:
        raise CheckpointMismatchError(
            where=where,
            expected=f"one leaf of the checkpoint for {_some(twice)}",
            got="two of that name, such as those of {'a/b': x, 'a': {'b': y}}",
            hint="restore the state whole, and take the leaf from it",
        )
    if not missing and not extra:
        return
    got = []
    if missing:
        got.append(f"a checkpoint without {_some(missing)}")
    if extra:
        got.append(f"{'one' if got else 'a checkpoint'} with {_some(extra)} beside them")
    raise CheckpointMismatchError(
        where=where,
        expected=f"the {len(leaves)} leaves of the state",
        got=", and ".join(got),
        hint="restore into the structure that was saved (autopar checkpoint show FOLDER prints it)"
        + ("" if missing else "; partial=True takes the leaves of like alone"),
    )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(repr(name) for name in names[:NAMED]) + more


def _checked_dtype(record: LeafRecord, value: Any, where: str) -> Any:
    """The type that a leaf is restored to. Raises: CheckpointMismatchError for another shape or type."""
    if not hasattr(value, "shape"):  # a number of Python takes what was saved in its place
        return None if record.kind == "number" else record.leaf_dtype
    dtype = record.leaf_dtype if record.kind != "number" else np.dtype(type(record.value))
    # What was not an array of JAX becomes one as jax makes it of it.
    becomes = dtype if record.kind == "key" or not record.is_host else jax.dtypes.canonicalize_dtype(dtype)
    wanted = value.dtype.newbyteorder("=") if isinstance(value.dtype, np.dtype) else value.dtype
    if record.shape == tuple(value.shape) and wanted in (dtype, becomes) and _fits(record, wanted):
        return wanted
    raise CheckpointMismatchError(
        where=where,
        expected=f"{value.dtype}{list(value.shape)}, as the state has it",
        got=f"{dtype}{list(record.shape)} in the checkpoint",
        hint="restore with the configuration that it was saved with; plain dictionaries of what is there, to convert "
        "by hand, come from restore() without like, step and plan",
    )


def _check_jax_has(dtype: Any, where: str) -> None:
    """Raises: CheckpointMismatchError for a type of 64 bits without `jax_enable_x64`: JAX would round the array."""
    if isinstance(dtype, np.dtype) and jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise CheckpointMismatchError(
            where=where,
            expected="an array of a type that JAX has",
            got=f"{dtype}, without jax_enable_x64",
            hint="restore with jax_enable_x64, as it was saved; autopar checkpoint show FOLDER lists the types",
        )


def _fits(record: LeafRecord, dtype: Any) -> bool:
    """Whether a number of Python is one of a type."""
    if record.kind != "number" or not np.issubdtype(dtype, np.integer):
        return record.dtype != "str"
    return bool(np.iinfo(dtype).min <= record.value <= np.iinfo(dtype).max)


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
        files = import_module("autopar.train.checkpoint.array_files")
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            where=where,
            expected="the packages of the extra autopar[train]",
            got=f"no {error.name}",
            hint="pip install orbax-checkpoint safetensors tensorstore",
        ) from error
    return files
