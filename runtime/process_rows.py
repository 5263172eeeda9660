"""Rows of the batch that each process holds, moved to the layout of a plan; and moves of arrays between devices of
processes.

The global array is the rows of all processes in process order; processes need not have equally many. Where the devices
of each process read only rows of their own, nothing is sent. Otherwise rows go to the devices that read them, over all
devices of a program, or from process to process for the devices of a stage.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from autopar.common import jax_compat
from autopar.ir.jax_sharding import dims_of, named_sharding
from autopar.ir.layout import Layout, LogicalMesh, replicated
from autopar.runtime.agreement import meet
from autopar.runtime.cross_mesh import End, refined
from autopar.runtime.heartbeat import the_watch
from autopar.runtime.moves import Ends, boxes_of, move_in_rounds, sends_in_rounds
from autopar.runtime.transfers import absent, aval_of, crosser, crossing, from_whole, is_here, is_whole

# Of pieces that a device sends, or receives, at once while an array moves.
ROUND_BYTES = 2**26


def place(value: Any, aval: Any, sharding: NamedSharding) -> Any:
    """A value where it is wanted. `aval` has its shape and dtype.

    Raises: TypeError, in all processes alike, for a value of another shape.
    """
    if np.shape(value) != aval.shape:
        raise TypeError(f"compiled for shape {aval.shape}, got {np.shape(value)}")
    if is_whole(value):
        return from_whole(value, aval, sharding)
    if value.dtype != aval.dtype:
        raise TypeError(f"compiled for {aval.dtype}, got {value.dtype}")
    if value.sharding == sharding or value.sharding.is_equivalent_to(sharding, value.ndim):
        return value
    return move(value, sharding)


def move(array: Any, sharding: NamedSharding) -> Any:
    """A global array on other devices or in another layout; every process must call it.

    Within the array's own devices it is resharded. To other devices it goes in pieces (`moves`). On CPU devices
    this returns when the array is there: of a whole state more programs would be in flight than XLA's CPU client takes
    (`autopar.runtime.execute`), and the processes would wait for one another forever.
    """
    moved = _moved(array, sharding)
    if jax.devices()[0].platform == "cpu":
        jax.block_until_ready([shard.data for shard in moved.addressable_shards])
    return moved


def _moved(array: Any, sharding: NamedSharding) -> Any:
    if array.sharding.device_set == sharding.device_set:
        on_devices = _relaid(array, NamedSharding(sharding.mesh, sharding.spec))
        return on_devices if sharding.memory_kind == on_devices.sharding.memory_kind else _relaid(on_devices, sharding)
    devices = jax.devices()
    number = {device: i for i, device in enumerate(devices)}
    ends = [boxes_of(s.devices_indices_map(array.shape), array.shape, number) for s in (array.sharding, sharding)]
    way = Ends(held=ends[0], wanted=ends[1], itemsize=jax_compat.itemsize(array))
    rounds = sends_in_rounds([way], [d.process_index for d in devices], ROUND_BYTES)
    (moved,) = move_in_rounds([array], [(aval_of(array), sharding)], rounds, devices, "a moved array")
    return moved


def _relaid(array: Any, sharding: NamedSharding) -> Any:
    """The array in another layout on the same devices, in any order of them."""
    if not is_here(sharding):
        return absent(array.shape, array.dtype, sharding)
    if list(array.sharding.mesh.devices.flat) != list(sharding.mesh.devices.flat):
        return jax.device_put(array, sharding)
    return _identity(sharding)(array)


@functools.lru_cache(maxsize=1024)
def _identity(sharding: NamedSharding) -> Any:
    return jax.jit(_unchanged, out_shardings=sharding)


def _unchanged(x: Any) -> Any:
    return x


def waits_for_all(what: str) -> Callable[[list[Any]], None] | None:
    """Between a transfer and what is computed of it: returns when all processes have what they were sent.

    None for accelerators. The CPU client serves what it sends with the few threads that also wait in collectives: so
    none may begin before.
    """

    def wait(arrived: list[Any]) -> None:
        jax.block_until_ready(arrived)
        meet(what)

    return wait if jax.devices()[0].platform == "cpu" else None


class ProcessRows:
    """This process's rows of an array that all processes have together; it has the shape and dtype of the whole.

    Attributes:
        rows: What this process has, an array with rows in dimension 0.
        counts: The number of rows of each process.
    """

    def __init__(self, rows: Any, counts: Sequence[int]) -> None:
        aval = aval_of(rows)
        self.rows, self.counts = _with_dtype(rows, aval.dtype), tuple(counts)
        self.shape, self.dtype = (sum(self.counts), *aval.shape[1:]), aval.dtype
        self.ndim = len(self.shape)
        assert aval.shape[0] == self.counts[jax.process_index()], f"{aval.shape} are not the rows {self.counts}"

    @property
    def first_row(self) -> int:
        """The number of this process's first row in the whole."""
        return sum(self.counts[: jax.process_index()])

    def as_array(self) -> Any:
        """A global array, the rows of each process on its own devices as far as they are as many in all.

        Every process must call it.
        """
        mesh = _device_rows()
        sharding = NamedSharding(mesh, PartitionSpec("process"))
        if len(set(self.counts)) == 1:
            return _from_own_rows(self.rows, self.shape, sharding, self.first_row)
        longest = max(self.counts)
        padded = _padded(self.rows, longest)
        shape = (longest * len(self.counts), *self.shape[1:])
        array = _from_own_rows(padded, shape, sharding, longest * jax.process_index())
        return _without_padding(self.counts, NamedSharding(mesh, PartitionSpec()))(array)


def place_rows(rows: Sequence[ProcessRows], shardings: Sequence[NamedSharding]) -> list[Any]:
    """The whole arrays where they are wanted; every process must call it.

    Raises: ProcessLostError.
    """
    watch = the_watch()
    if watch is not None:
        watch.begin_joint_work()
    placed: list[Any] = [None] * len(rows)
    crossing_rows = []
    for i, (r, sharding) in enumerate(zip(rows, shardings, strict=True)):
        if _reads_own_rows(sharding, r.shape, r.counts):
            here = is_here(sharding)
            placed[i] = _from_own_rows(r.rows, r.shape, sharding, r.first_row) if here else None
        elif set(sharding.mesh.devices.flat) == set(jax.devices()):
            placed[i] = move(r.as_array(), sharding)
        else:
            crossing_rows.append(i)
    if crossing_rows:
        ways = tuple((rows[i].shape[1:], rows[i].dtype, rows[i].counts, shardings[i]) for i in crossing_rows)
        for i, array in zip(crossing_rows, _to_stages(ways)([rows[i].rows for i in crossing_rows]), strict=True):
            placed[i] = array
    return [
        absent(r.shape, r.dtype, sharding) if array is None else array
        for array, r, sharding in zip(placed, rows, shardings, strict=True)
    ]


def _from_own_rows(rows: Any, shape: Sequence[int], sharding: NamedSharding, first_row: int) -> Any:
    """An array of which this process's devices hold only rows that it has, from row `first_row` of the whole on."""
    shards = []
    indices: dict[Any, Any] = dict(sharding.addressable_devices_indices_map(tuple(shape)))
    for device, (whole, *index) in indices.items():
        start, stop, _ = whole.indices(shape[0])
        at = SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
        shards.append(jax.device_put(rows[(slice(start - first_row, stop - first_row), *index)], at))
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, shards)


@functools.lru_cache(maxsize=1024)
def _reads_own_rows(sharding: NamedSharding, shape: tuple[int, ...], counts: tuple[int, ...]) -> bool:
    """Whether each device, of whichever process, holds only rows that its process has."""
    ends = list(itertools.accumulate(counts, initial=0))
    indices: dict[Any, Any] = dict(sharding.devices_indices_map(shape))
    for device, (rows, *_) in indices.items():
        start, stop, _ = rows.indices(shape[0])
        process = device.process_index
        if start < ends[process] or stop > ends[process + 1]:
            return False
    return True


@functools.cache
def _device_rows() -> Mesh:
    """As many devices of each process as every process has, a row for each."""
    of_process: dict[int, list[Any]] = {}
    for device in jax.devices():
        of_process.setdefault(device.process_index, []).append(device)
    width = min(map(len, of_process.values()))
    grid = np.array([of_process[process][:width] for process in sorted(of_process)])
    return Mesh(grid, ("process", "local"), axis_types=(AxisType.Auto,) * 2)


# Shape and type of a row, the number of rows of each process, and where all of them are wanted.
_Way = tuple[tuple[int, ...], Any, tuple[int, ...], NamedSharding]


@functools.lru_cache(maxsize=256)
def _to_stages(ways: tuple[_Way, ...]) -> Callable[[Sequence[Any]], list[Any]]:
    """A function from this process's rows of some arrays to the rows of all, each on the devices of a stage.

    None for what is wanted elsewhere. The rows of each process cross from its devices as arrays of their own; programs
    run on the devices of one process, or on those of a stage, as those of a pipeline do.
    """
    here, processes = jax.process_index(), range(jax.process_count())
    senders, crossings = [], []
    for row_shape, dtype, counts, target in ways:
        for process, (devices, count) in enumerate(zip(_device_rows().devices, counts, strict=True)):
            source = _rows_end(devices, (count, *row_shape), target)
            crossings.append(crossing((count, *row_shape), dtype, source, _whole_end(target, (count, *row_shape))))
            if process == here:
                senders.append(source.sharding)
    cross = crosser(crossings, waits_for_all("the rows of a batch"))
    join = [jax.jit(_one_after_the_other, out_shardings=target) if is_here(target) else None for *_, target in ways]

    def place(rows: Sequence[Any]) -> list[Any]:
        sent = jax.device_put(list(rows), senders)
        arrived = cross([array if p == here else None for array in sent for p in processes])
        pieces = [arrived[i : i + len(processes)] for i in range(0, len(arrived), len(processes))]
        return [None if f is None else f(*found) for f, found in zip(join, pieces, strict=True)]

    return place


def _rows_end(devices: Any, shape: tuple[int, ...], target: NamedSharding) -> End:
    """The rows of one process on its devices, split as finely as serves the way to the target."""
    mesh, logical = Mesh(devices, ("x",), axis_types=(AxisType.Auto,)), LogicalMesh(axis_sizes=(devices.size,))
    arrives = _whole_end(target, shape)
    layout, _ = refined(shape, (replicated(len(shape)), logical), (arrives.layout, arrives.logical))
    return End(layout=layout, logical=logical, mesh=mesh, sharding=named_sharding(layout, mesh))


def _one_after_the_other(*rows: Any) -> Any:
    return jax.numpy.concatenate(rows)


def _whole_end(sharding: NamedSharding, shape: Sequence[int]) -> End:
    """As a sharding has it, as far as the shape divides."""
    mesh: Any = sharding.mesh
    number = {name: i for i, name in enumerate(mesh.axis_names)}
    logical = LogicalMesh(axis_sizes=mesh.axis_sizes)
    layout = Layout(tuple(tuple(number[name] for name in names or ()) for names in dims_of(sharding.spec, len(shape))))
    if not layout.fits(tuple(shape), logical):
        layout = Layout(((), *layout.dims[1:]))
    return End(layout=layout, logical=logical, mesh=mesh, sharding=named_sharding(layout, mesh))


def _with_dtype(rows: Any, dtype: Any) -> Any:
    return rows if jax_compat.is_key_dtype(dtype) else np.asarray(rows, dtype)


def _padded(rows: Any, count: int) -> Any:
    """`count` rows: those that are there, and the last one again."""
    have = rows.shape[0]
    if have == 0:
        return np.zeros((count, *rows.shape[1:]), rows.dtype)
    return rows[np.minimum(np.arange(count), have - 1)]


@functools.lru_cache(maxsize=256)
def _without_padding(counts: tuple[int, ...], sharding: NamedSharding) -> Any:
    longest = max(counts)

    def rows_of_all(padded: Any) -> Any:
        return jax.numpy.concatenate([padded[p * longest : p * longest + n] for p, n in enumerate(counts)])

    return jax.jit(rows_of_all, out_shardings=sharding)
