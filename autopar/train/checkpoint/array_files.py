"""Arrays written and read by orbax: what it cannot do with the arrays of pipelines, and how much it may read at once.

orbax's released API is used (`orbax.checkpoint.CheckpointManager` and its handlers): in 0.12 its v1 API is below
`experimental`, "subject to change without notice". This module is imported when a checkpoint is saved or restored.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import functools
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np

from autopar.train.checkpoint.folders import is_in_bucket, take_back
from autopar.train.checkpoint.manifest import MANIFEST, STATE

# Memory that the C library keeps of what was freed.

# Parameters of glibc's mallopt (malloc.h).
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
# Free memory at the end of a heap that is given back: by default (DEFAULT_TRIM_THRESHOLD), and the most to which glibc
# raises that by itself while a program runs, twice the size up to which it takes blocks from heaps
# (DEFAULT_MMAP_THRESHOLD_MAX).
_GIVEN_BACK_BYTES = 128 << 10
_LARGEST_BLOCK_BYTES = 32 << 20
# By which a user sets these, which then stay.
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")

_lock = threading.Lock()
_num_at_work = 0


class GivingBack:
    """From its beginning to its `end`, glibc returns freed memory to the system; without effect on other C libraries.

    Each thread allocates from one of many arenas. What is free at the end of an arena other than the first goes back
    only when something is freed there and more than a threshold is free, and glibc raises this threshold to up to 64
    MiB; `malloc_trim` leaves it. Work that new threads do again and again thus makes resident memory grow until each
    arena has seen the most that it ever needs. Here the threshold is low while such work is done. Afterwards it is at
    glibc's own maximum, as in any program that frees large blocks, so that what a step frees is used by the next one.
    """

    def __init__(self) -> None:
        global _num_at_work
        self._is_at_work = True
        with _lock:
            _num_at_work += 1
            if _num_at_work == 1:
                _set(_MMAP_THRESHOLD, _LARGEST_BLOCK_BYTES)
                _set(_TRIM_THRESHOLD, _GIVEN_BACK_BYTES)

    def end(self) -> None:
        """Also returns what is free between blocks in use. A second call does nothing."""
        global _num_at_work
        with _lock:
            if not self._is_at_work:
                return
            self._is_at_work = False
            _num_at_work -= 1
            if _num_at_work == 0:
                _set(_TRIM_THRESHOLD, 2 * _LARGEST_BLOCK_BYTES)
        give_back_free_memory()


def give_back_free_memory() -> None:
    """Has glibc return what is free between blocks in use; nothing where the C library is another one."""
    trim = _function("malloc_trim")
    if trim is not None:
        trim(0)


def _set(parameter: int, value: int) -> None:
    mallopt = None if _is_set_by_user() else _function("mallopt")
    if mallopt is not None:
        mallopt(parameter, value)


@functools.cache
def _is_set_by_user() -> bool:
    return "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "") or any(name in os.environ for name in _VARIABLES)


@functools.cache
def _function(name: str) -> Any:
    """A function of glibc; None where the C library is another one, which may have some of that name."""
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    return getattr(library, name, None) if hasattr(library, "gnu_get_libc_version") else None


# orbax without its words, and without what it leaves behind.
#
# It says a lot, and absl puts a handler on the root logger with the first word. Twice for each checkpoint it asks
# Tensorstore how many bytes were written, as Python objects, of which Tensorstore's Python package releases none
# (0.1.86: about 130 lists and dictionaries each time).


def quiet_orbax() -> Any:
    """`orbax.checkpoint`, imported. Raises: ModuleNotFoundError."""
    handlers = list(logging.root.handlers)
    import orbax.checkpoint

    for handler in [handler for handler in logging.root.handlers if handler not in handlers]:
        logging.root.removeHandler(handler)
    for module in [module for name, module in sys.modules.copy().items() if name.startswith("orbax.")]:
        spoken = getattr(module, "logging", None)
        if isinstance(spoken, ModuleType) and spoken.__name__ == "absl.logging":
            vars(module)["logging"] = _Quiet(spoken)
    counting = sys.modules.get("orbax.checkpoint._src.serialization.tensorstore_utils")
    if hasattr(counting, _COUNTS):
        vars(counting)[_COUNTS] = _raw_bytes
    return orbax.checkpoint


_COUNTS = "get_tensorstore_raw_bytes"


def _raw_bytes(direction: Any = None) -> int:
    """The bytes that Tensorstore wrote or read so far, from its metrics as lines of text."""
    import tensorstore

    suffix = "_bytes_read" if getattr(direction, "value", "write") == "read" else "_bytes_written"
    lines = tensorstore.experimental_collect_prometheus_format_metrics("/tensorstore/kvstore/")
    rows = (line.split() for line in lines if not line.startswith("#"))
    return sum(int(float(row[1])) for row in rows if row[0].endswith(suffix))


class _Quiet:
    """absl's logging as orbax has it from now on: errors go to the logger `orbax`, and nothing else goes anywhere."""

    def __init__(self, absl_logging: ModuleType) -> None:
        self._absl_logging = absl_logging

    def __getattr__(self, name: str) -> Any:
        if name in ("error", "exception", "critical"):
            return getattr(logging.getLogger("orbax"), name)
        found = getattr(self._absl_logging, name)
        return _nothing if callable(found) and name.islower() else found


def _nothing(*_: Any, **__: Any) -> bool:
    return False


ocp: Any = quiet_orbax()
ArrayHandler: Any = ocp.type_handlers.ArrayHandler

# Arrays on disk are in chunks of at most so many bytes: whoever reads a part of an array reads little else.
CHUNK_BYTES = 4 << 20
# The part of what a process restores that may be on its way at once, beside what has arrived.
IN_FLIGHT = 0.1


def manager(folder: Path, keep: int | None, deleted: str) -> Any:
    """Writes checkpoints into a folder, in the background, and keeps the latest ones: others go to `deleted` in it."""
    options = ocp.CheckpointManagerOptions(
        max_to_keep=keep,
        todelete_subdir=deleted,
        # In a bucket orbax takes every folder for a checkpoint, and would remove those of others.
        cleanup_tmp_directories=not is_in_bucket(folder),
        save_root_metadata=False,
    )
    handlers = {STATE: _handler(None), MANIFEST: ocp.JsonCheckpointHandler()}
    manager = _Manager(folder, item_handlers=handlers, options=options)
    if is_in_bucket(folder):  # orbax has no option for the order in which a checkpoint's objects go
        assert hasattr(manager, "_checkpoint_deleter"), "orbax would remove a checkpoint's objects in any order"
        manager._checkpoint_deleter = _TakingBack(folder)
    return manager


class _Manager(ocp.CheckpointManager):
    """orbax's manager, which does not ask JAX whether the program is to end: `Checkpointer.save` has, for this step.

    JAX lets processes agree on a step by the one that each asked about last, which must not go back. orbax asks about
    the step of a checkpoint when that is complete, in process 0, while the loop has long gone on.
    """

    def reached_preemption(self, step: int) -> bool:
        return False


class _TakingBack:
    """In place of orbax's removal in a bucket, which may be cut off: a checkpoint ceases to be complete at once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def delete(self, step: int) -> None:
        if jax.process_index() == 0:
            take_back(self._folder / str(step))

    def delete_steps(self, steps: Sequence[int]) -> None:
        for step in steps:
            self.delete(step)

    def close(self) -> None:
        pass


def save(writer: Any, step: int, arrays: Mapping[str, Any], manifest: Any) -> None:
    """Begins to write a checkpoint; returns when the arrays may change."""
    items = {MANIFEST: ocp.args.JsonSave(manifest)}
    if arrays:
        chunks = {name: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES) for name in arrays}
        items[STATE] = ocp.args.PyTreeSave(dict(arrays), save_args=chunks)
    writer.save(step, args=ocp.args.Composite(**items), force=True)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """An array to read: shape and type of it, and its sharding, or None for an array of numpy."""

    shape: tuple[int, ...]
    dtype: Any
    sharding: Any | None

    @property
    def local_bytes(self) -> int:
        """Bytes in this process."""
        if self.sharding is None:
            return math.prod(self.shape) * np.dtype(self.dtype).itemsize
        shards = len(self.sharding.addressable_devices)
        return shards * math.prod(self.sharding.shard_shape(self.shape)) * np.dtype(self.dtype).itemsize


def load(folder: Path, step: int, wanted: Mapping[str, Wanted]) -> dict[str, Any]:
    """The arrays of a checkpoint by name: each process reads what its devices get."""
    budget_bytes = math.ceil(IN_FLIGHT * sum(w.local_bytes for w in wanted.values()))
    how = {name: _restore_args(w) for name, w in wanted.items()}
    with contextlib.closing(ocp.Checkpointer(_handler(budget_bytes))) as reader:
        args = ocp.args.PyTreeRestore(dict.fromkeys(wanted, 0), restore_args=how, partial_restore=True)
        arrays: dict[str, Any] = reader.restore(folder / str(step) / STATE, args=args)
    return arrays


def _restore_args(wanted: Wanted) -> Any:
    if wanted.sharding is None:
        return ocp.RestoreArgs(restore_type=np.ndarray, dtype=wanted.dtype)
    return ocp.ArrayRestoreArgs(sharding=wanted.sharding, global_shape=wanted.shape, dtype=wanted.dtype)


def _handler(budget_bytes: int | None) -> Any:
    registry = ocp.type_handlers.create_type_handler_registry(
        (jax.Array, _StageArrays(budget_bytes)), (np.ndarray, ocp.type_handlers.NumpyHandler())
    )
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry)


class _StageArrays(ArrayHandler):
    """orbax's handler of arrays, also for those that lie on the devices of some processes alone."""

    def __init__(self, budget_bytes: int | None) -> None:
        super().__init__(enable_write_sharding_file=False)
        self._budget_bytes = budget_bytes

    async def serialize(self, values: Sequence[Any], infos: Sequence[Any], args: Any = None) -> Any:
        return [await _Writing.begun(super().serialize([_StageArray(v) for v in values], infos, args))]

    async def deserialize(self, infos: Sequence[Any], args: Any = None) -> Any:
        if self._budget_bytes is not None:
            limiter = _InFlight(self._budget_bytes)
            infos = [info.replace(byte_limiter=limiter) for info in infos]
        return await super().deserialize(infos, args)


class _Writing:
    """What orbax writes in threads of its own, as one future of its kind; what they free is given back."""

    def __init__(self) -> None:
        self._giving_back = GivingBack()
        self._futures: Sequence[Any] = ()

    @classmethod
    async def begun(cls, futures: Awaitable[Sequence[Any]]) -> _Writing:
        writing = cls()
        try:
            writing._futures = await futures
        except BaseException:
            writing._giving_back.end()
            raise
        return writing

    def result(self, timeout: float | None = None) -> None:
        end_s = None if timeout is None else time.monotonic() + timeout
        try:
            for future in self._futures:
                future.result(timeout=None if end_s is None else max(0.0, end_s - time.monotonic()))
            self._futures = ()  # with copies of the arrays in the memory of the host
        finally:
            self._giving_back.end()

    def cancel(self) -> None:
        for future in self._futures:
            future.cancel()
        self._giving_back.end()


class _StageArray:
    """An array as orbax has to see it, which knows global arrays alone.

    It refuses arrays that lie in one process altogether, and takes the shape of the chunks from the first shard of each
    process, of which process 0 describes all arrays: where a process has none, it gets one that others write.
    """

    def __init__(self, array: Any) -> None:
        self.shape, self.dtype, self.sharding = array.shape, array.dtype, array.sharding
        self.size, self.ndim, self.itemsize = array.size, array.ndim, array.dtype.itemsize
        part = _Part(shape=array.sharding.shard_shape(array.shape))
        self.addressable_shards = array.addressable_shards or [_OthersShard(data=part)]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _OthersShard:
    data: _Part
    replica_id: int = 2**31 - 1  # beyond the copies that are written


class _InFlight:
    """Lets reads begin while no more than a budget is on its way; one that is larger goes alone."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes, self._used_bytes, self._changed = budget_bytes, 0, asyncio.Condition()

    async def wait_for_bytes(self, requested_bytes: int) -> None:
        async with self._changed:
            await self._changed.wait_for(
                lambda: not self._used_bytes or self._used_bytes + requested_bytes <= self._budget_bytes
            )
            self._used_bytes += requested_bytes

    async def release_bytes(self, requested_bytes: int) -> None:
        async with self._changed:
            self._used_bytes -= requested_bytes
            self._changed.notify_all()
