"""`Checkpointer`, the checkpoints of a training run in one folder."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Protocol

import jax
import numpy as np

from autopar.calls import nnx_objects
from autopar.checkpoint.leaves import named_leaves, nested, tree_of
from autopar.checkpoint.manifest import FORMAT_VERSION, Manifest, complete_steps, encoded, find, read
from autopar.checkpoint.preemption import Preempted, PreemptionNotice
from autopar.checkpoint.stored_arrays import (
    number_of,
    record_of,
    restored_array,
    stored_array,
    stored_shape,
    stored_sharding,
)
from autopar.checkpoint.targets import (
    PlannedStep,
    Target,
    shardings_for,
    structure_of_plan,
    targets_of,
    targets_of_all,
)
from autopar.checkpoint.unfinished import no_wait, wait_at_exit
from autopar.errors import InvalidArgumentError, MissingPackageError
from autopar.plan.file import encode
from autopar.plan.plan import Plan
from autopar.runtime.execution.cross_process import absent
from autopar.runtime.execution.global_arrays import aval_of, from_whole

# Where checkpoints that are no longer kept go until they are removed: a removal that is cut off leaves nothing half
# there under the name of a checkpoint.
_DELETED = "deleted"


class HasPosition(Protocol):
    """Batches with a position that JSON can hold: those of `autopar.data.shard`, or any other with these methods."""

    def position(self) -> Any: ...

    def restore(self, position: Any) -> None: ...


class Checkpointer:
    """Saves and restores the state of a training run, its plan and the position in its data.

    `folder` is one that all processes see. Every `every`-th step is saved, and the latest `keep` checkpoints are kept
    (None: all). With `on_preemption`, SIGTERM makes the next `save` write the state and end the program.

    Saving runs in the background: `save` returns when the state is copied to the memory of the host. A checkpoint
    counts once it is complete; a program that ends waits for the last one. A `with` block, or `close`, does so too, and
    gives the signal back.
    """

    def __init__(self, folder: str | Path, *, every: int = 1, keep: int | None = 3, on_preemption: bool = True) -> None:
        for name, number in (("every", every), ("keep", keep)):
            if number is not None and (not isinstance(number, int) or number < 1):
                raise InvalidArgumentError(
                    where=f"Checkpointer({name}=...)",
                    expected="a whole number from 1" + (", or None to keep all" if name == "keep" else ""),
                    got=repr(number),
                    hint=f"such as Checkpointer(folder, {name}=3)",
                )
        self.folder = Path(folder).absolute()
        self.every, self.keep = every, keep
        self._writer: Any = None
        self._here: int | None = None  # the step that this run saved or restored last
        self._notice = PreemptionNotice() if on_preemption else None
        self._removal: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"<Checkpointer of {self.folder}, steps {self.steps()}>"

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # What is there

    def steps(self) -> list[int]:
        """The numbers of the complete checkpoints, ascending."""
        return complete_steps(self.folder)

    def latest(self) -> int | None:
        """The number of the latest complete checkpoint; None where there is none."""
        return next(iter(reversed(self.steps())), None)

    def plan(self, step_number: int | None = None) -> Plan | None:
        """The plan that a checkpoint was saved under, the latest by default. Raises: as `restore`."""
        number = find(self.folder, step_number)
        return read(self.folder, number).plan_of(str(self.folder / str(number)))

    # Saving

    def save(
        self,
        step_number: int,
        state: Any,
        *,
        plan: Plan | PlannedStep | None = None,
        data: HasPosition | None = None,
        force: bool = False,
    ) -> bool:
        """Saves the state after `step_number` steps where it is time, or with `force`; returns whether it does.

        Every process calls it after every step. `plan` is a plan, or the step, whose latest plan is taken. What `data`
        says of its position is saved with the state.

        Raises: Preempted when the program was told to end, once the state is on disk; InvalidArgumentError where the
        folder has a later step; UnsupportedError for leaves that are neither arrays nor numbers; the error of the
        checkpoint before, if it could not be written.
        """
        preempted = self.preempted(step_number)
        if not (force or preempted or step_number % self.every == 0):
            return False
        is_new = step_number != self._here
        if is_new:
            self._write(step_number, state, plan, data)
        if preempted:
            self.wait()
            raise Preempted(step_number)
        return is_new

    def preempted(self, step_number: int) -> bool:
        """Whether the program was told to end, by SIGTERM, so that `save` will write the state of this step and end it.

        In a program of several processes all get the same answer for a step.
        """
        return self._notice is not None and self._notice.reached(step_number)

    def wait(self) -> None:
        """Returns when what was saved is complete. Raises: the error of what could not be written."""
        if self._writer is not None:
            self._writer.wait_until_finished()
            self._remove_deleted()
            if self._removal is not None:
                self._removal.join()

    def close(self) -> None:
        """Waits, and gives back the signal and the threads; `save` begins anew."""
        try:
            self.wait()
        finally:
            if self._writer is not None:
                self._writer.close()
                self._writer = None
                no_wait(self)
            if self._notice is not None:
                self._notice.close()

    def _write(self, step_number: int, state: Any, plan: Plan | PlannedStep | None, data: HasPosition | None) -> None:
        leaves, _ = named_leaves(state)
        records = [record_of(leaf) for leaf in leaves]
        file = Manifest(
            format_version=FORMAT_VERSION,
            step=step_number,
            leaves=tuple(records),
            plan=_plan_text(plan),
            data=None if data is None else data.position(),
        )
        files = array_files("Checkpointer.save")
        self._open(files)
        self._check_is_later(step_number)
        self._remove_deleted()
        arrays = {
            record.name: stored_array(leaf.value, record)
            for leaf, record in zip(leaves, records, strict=True)
            if record.is_stored
        }
        files.save(self._writer, step_number, arrays, encoded(file))
        self._here = step_number

    def _open(self, files: ModuleType) -> None:
        """Begins to write to the folder: what unfinished saves and removals left in it goes."""
        if self._writer is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._writer = files.manager(self.folder, self.keep, _DELETED)
            wait_at_exit(self, self.wait)

    def _check_is_later(self, step_number: int) -> None:
        latest = self._writer.latest_step()
        if latest is not None and latest >= step_number:
            raise InvalidArgumentError(
                where=f"save({step_number}, ...) in {self.folder}",
                expected=f"a step after {latest}, which the folder has",
                got=f"step {step_number}",
                hint="go on from it (Checkpointer.restore_or), take another folder for another run, or, where this run "
                f"went back on purpose, drop what came later: Checkpointer.discard_after({step_number - 1})",
            )

    def discard_after(self, step_number: int) -> list[int]:
        """Removes the checkpoints of later steps, of a run that went back to `step_number`; returns their numbers."""
        self.wait()
        self._open(array_files("Checkpointer.discard_after"))
        later = [step for step in self.steps() if step > step_number]
        for step in later:
            self._writer.delete(step)
        self._here = None
        self.wait()
        return later

    def _remove_deleted(self) -> None:
        """Removes what is no longer kept, in the background, in one process."""
        at = self.folder / _DELETED
        if jax.process_index() or not at.is_dir() or (self._removal is not None and self._removal.is_alive()):
            return
        self._removal = threading.Thread(target=shutil.rmtree, args=(at,), kwargs={"ignore_errors": True})
        self._removal.start()

    # Restoring

    def restore(
        self,
        step_number: int | None = None,
        *,
        step: PlannedStep | None = None,
        plan: Plan | None = None,
        shardings: Any = None,
        like: Any = None,
        data: HasPosition | None = None,
        partial: bool = False,
    ) -> Any:
        """The state of a checkpoint, the latest by default, bit for bit, under another plan or under none.

        `like` has the structure: a state, or its shapes (`jax.eval_shape(create)`); a `step` that has a plan knows it.
        Without either the result is dictionaries in dictionaries. The leaves are laid out by `shardings` (one, or one
        for each leaf), by the `step` or the `plan`, else as the arrays of `like` are, else on the first device. Each
        process reads only the parts of its devices. `data` goes to where it was. With `partial`, leaves of the
        checkpoint that `like` does not have are left out.

        Every process calls it. Raises: CheckpointNotFoundError; CheckpointMismatchError where the state has other
        leaves, shapes or types; CheckpointFormatError and PlanFormatError for a damaged or hostile checkpoint.
        """
        self.wait()
        number = find(self.folder, step_number)
        file = read(self.folder, number)
        where = f"restore({number}) from {self.folder}"
        planned = step.latest_plan if step is not None else plan
        if like is None and planned is not None and (planned.trees is not None or step is not None):
            like = structure_of_plan(planned, where)
        elif like is None and (step is not None or plan is not None or shardings is not None):
            raise InvalidArgumentError(
                where=where,
                expected="the structure of the state, in like, or by a step that has a plan",
                got="neither",
                hint="pass like=jax.eval_shape(create), or plan first: train_step.plan(shapes, batch)",
            )
        state = _restored(self.folder, number, file, like, where, (step, plan, shardings), partial=partial)
        if data is not None:
            data.restore(file.data)
        self._here = number
        return state

    def restore_or(
        self,
        create: Callable[..., Any],
        *args: Any,
        step: Any = None,
        data: HasPosition | None = None,
    ) -> tuple[Any, int]:
        """(state, number of steps done): the latest checkpoint, or else `create(*args)` and 0.

        With a `step`, the state is made (`step.init`) and restored in its layouts. `data` goes to where it was.
        Raises: as `restore`.
        """
        self.wait()
        if self.latest() is None:
            return (create(*args) if step is None else step.init(create, *args)), 0
        shapes = jax.eval_shape(lambda *values: nnx_objects.split((create(*values),))[0], *args)
        state = self.restore(step=step, like=shapes, data=data)
        assert self._here is not None, "restore sets it"
        return nnx_objects.merged(state), self._here


def _restored(
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
        wanted = targets_of_all(file)
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
    arrays = files.load(folder, number, reads) if reads else {}
    return [_value(t, arrays) for t in wanted]


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
        number = number_of(record)
        if sharding is None:
            return number
        value = np.asarray(number, target.dtype)
    elif sharding is not None and not sharding.addressable_devices:
        return absent(record.shape, target.dtype, sharding)
    elif record.kind == "key":
        raw = jax.numpy.zeros(stored_shape(record), record.stored_dtype)
        value = jax.random.wrap_key_data(raw, impl=record.dtype)
    else:
        value = np.zeros(record.shape, target.dtype)
    return value if sharding is None else from_whole(value, aval_of(value), sharding)


def _plan_text(plan: Plan | PlannedStep | None) -> str:
    if plan is not None and not isinstance(plan, Plan):
        if not hasattr(plan, "latest_plan"):
            raise InvalidArgumentError(
                where="save(plan=...)",
                expected="a plan, or a step made by autopar.parallelize",
                got=type(plan).__name__,
                hint="such as plan=train_step",
            )
        plan = plan.latest_plan
    return "" if plan is None else encode(plan.record).decode()


def array_files(where: str) -> ModuleType:
    """The module that imports orbax. Raises: MissingPackageError."""
    try:
        files = import_module("autopar.checkpoint.array_files")
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            where=where,
            expected="the packages of autopar[train]",
            got=f"no {error.name}",
            hint="pip install autopar[train]",
        ) from error
    return files
