"""Microbenchmarks of kernels and collectives on the devices of this program, as loops inside one program.

What a call costs (dispatch, handing out to devices, memory that is new) is not in it: a sample is the difference of
many repetitions and of a first one, divided by their number. Two sorts of runs are about just that: memory that is new
(the first repetition), and calls of programs that do next to nothing (no loop, many calls). Each other
repetition needs a number of the one before, so that no compiler takes it out. Every device works at once, in groups for
collectives: a step leaves none idle, and devices may share cores or wires.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from autopar.hardware.collective_cost import CollectiveKind
from autopar.hardware.kinds import Platform
from autopar.hardware.timed_runs import (
    CallRun,
    CollectiveRun,
    ConvolutionRun,
    FreshRun,
    Kernel,
    MatmulRun,
    Repeated,
    RowsRun,
    Run,
    StreamRun,
    TransposeRun,
)

# One sample should take this long: a hundred times what the clock and the end of a loop leave uncertain; more where
# devices wait for each other, and so for whoever else has a core.
SAMPLE_S, IN_STEP_SAMPLE_S = 10e-3, 40e-3
# Of products and convolutions on accelerators, where power limits a card's clock after a while: an H200 multiplies at
# 803 Tflop/s in samples of 10 ms, at 650 to 660 in runs of 0.1 s, at 641 after 0.2 s, and at 593 after 6 s of nothing
# else (1.3 to 1.5 GHz at 690 W). Those of less than 0.1 ms run 2,000 times, as all that is timed does at most.
POWERED_SAMPLE_S = 0.2
_AGAIN = 2  # how often a block of fresh memory is filled again
CALLS = 40  # of one sample
MOST_REPETITIONS = 2_000
_ROW = 256  # numbers in a row that is normalised
# Repetitions that stand in a row in the loop's body, where they are short: going round costs microseconds on a GPU.
UNROLLED, SHORT_S = 8, 200e-6


class Clock(Protocol):
    """Times runs on the devices that a measurement is of."""

    def prepare(self, run: Run) -> float:
        """Seconds of one repetition, roughly; all that is slow the first time is done."""

    def sample(self, run: Run) -> float:
        """Seconds of one repetition."""

    def slowest(self, seconds: float) -> float:
        """The most that any process of the program has to say, the same in all."""


class DeviceClock:
    """The clock of real devices. All processes of a program call it alike, and get the same seconds from it.

    `now` tells the time in seconds. Where CPU devices keep all cores busy and other work shares them, the processor
    time of the process divided by the cores is what they would take alone, but for what they wait.
    """

    def __init__(self, devices: Sequence[Any], num_hosts: int, now: Callable[[], float] = time.perf_counter) -> None:
        self._devices, self._num_hosts, self._now = devices, num_hosts, now
        self._programs: dict[Repeated, tuple[Callable[..., Any], Any, int]] = {}
        self._repetitions: dict[Repeated, int] = {}
        self._chains: dict[CallRun, Callable[[int], None]] = {}

    def prepare(self, run: Run) -> float:
        if isinstance(run, CallRun):
            self._chains[run] = _chain(run, self._devices)
            return self._call_s(run)
        # Several streamed kernels in a row would be fused into one, two transposes would be none.
        alone = isinstance(run, StreamRun | TransposeRun | FreshRun)
        in_step = _in_step(run) > 1
        seconds = math.inf if alone or in_step else self._try(run, UNROLLED)
        if seconds > SHORT_S:
            seconds = self._try(run, 1)
        unrolled = self._programs[run][2]
        wanted = self._sample_s(run) / max(seconds, 1e-9)
        self._repetitions[run] = max(1, round(min(wanted, MOST_REPETITIONS) / unrolled)) * unrolled
        return seconds

    def _sample_s(self, run: Repeated) -> float:
        if isinstance(run, MatmulRun | ConvolutionRun) and self._devices[0].platform != Platform.CPU:
            return POWERED_SAMPLE_S
        return IN_STEP_SAMPLE_S if _in_step(run) > 1 else SAMPLE_S

    def sample(self, run: Run) -> float:
        if isinstance(run, FreshRun):
            return self._first_s(run)
        if isinstance(run, CallRun):
            return self._call_s(run)
        return self._per_repetition_s(run, self._repetitions[run])

    def _first_s(self, run: FreshRun) -> float:
        """What the first repetition of a program takes longer than those behind it."""
        program, operands, _ = self._programs[run]
        # Memory that nobody had for seconds is slow to get the first time: a virtual machine's host takes it back.
        jax.block_until_ready(program(0, *operands))
        begun = self._now()
        jax.block_until_ready(program(0, *operands))
        between = self._now()
        jax.block_until_ready(program(_AGAIN, *operands))
        again_s = max(0.0, self._now() - between - (between - begun)) / _AGAIN
        seconds = between - begun - again_s
        return self.slowest(seconds if seconds > 0 else between - begun)  # as in `_per_repetition_s`

    def _call_s(self, run: CallRun) -> float:
        begun = time.process_time()
        self._chains[run](CALLS)
        return self.slowest((time.process_time() - begun) / CALLS / (os.cpu_count() or 1))

    def _try(self, run: Repeated, unrolled: int) -> float:
        self._programs[run] = self._compiled(run, unrolled)
        self._per_repetition_s(run, unrolled)
        return self._per_repetition_s(run, unrolled)

    def _per_repetition_s(self, run: Repeated, repetitions: int) -> float:
        program, operands, unrolled = self._programs[run]
        begun = self._now()
        jax.block_until_ready(program(1 + repetitions // unrolled, *operands))
        between = self._now()
        jax.block_until_ready(program(1, *operands))
        ended = self._now()
        seconds = (between - begun) - (ended - between)
        # A short run that other work disturbed may come out at nothing: then what it cost with the call counts.
        return self.slowest(seconds if seconds > 0 else between - begun) / repetitions

    def slowest(self, seconds: float) -> float:
        if jax.process_count() == 1:
            return seconds
        mesh = Mesh(np.array(self._devices), ("d",), axis_types=(AxisType.Auto,))
        own = np.full((1,), seconds, np.float32)
        seen = jax.make_array_from_callback(
            (len(self._devices),), NamedSharding(mesh, PartitionSpec("d")), lambda _: own
        )
        return float(jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))(seen))

    def _compiled(self, run: Repeated, unrolled: int) -> tuple[Callable[..., Any], Any, int]:
        """(program of a number of rounds and operands, operands, repetitions in a round)."""
        mesh = self._mesh(run)
        repeat, operands = _work(run)
        in_step = _in_step(run) > 1

        def rounds(count: Any, *local: Any) -> Any:
            if isinstance(run, FreshRun):
                return _filled(count, local[0], run.nbytes // 4)

            def one_round(_: Any, values: Any) -> Any:
                for _ in range(unrolled):
                    values = repeat(*values)
                return values

            def one_in_step(i: Any, values_and_beat: Any) -> Any:
                values, beat = values_and_beat
                values = one_round(i, values)
                # Nobody goes round again before all have got as far; values that change would be copied.
                first = values[0]
                number = first[(slice(0, 1), *[0] * (first.ndim - 1))].astype(jnp.float32)
                return values, jax.lax.psum(number + beat, "group") * 0.0

            if in_step:
                values, beat = jax.lax.fori_loop(0, count, one_in_step, (local, jnp.zeros(1)))
                return *values, beat
            return jax.lax.fori_loop(0, count, one_round, local)

        everywhere = PartitionSpec(mesh.axis_names)
        program = jax.jit(
            jax.shard_map(
                rounds,
                mesh=mesh,
                in_specs=(PartitionSpec(), *(everywhere for _ in operands)),
                out_specs=tuple(everywhere for _ in range(len(operands) + in_step)),
                check_vma=False,  # a sum is the same everywhere, and goes round the loop as if it were not
            )
        )
        sharding = NamedSharding(mesh, everywhere)
        return program, [_on_each_device(x, sharding, len(self._devices)) for x in operands], unrolled

    def _mesh(self, run: Repeated) -> Mesh:
        n = run.n if isinstance(run, CollectiveRun) else _in_step(run)
        total = len(self._devices)
        stride = total // self._num_hosts if isinstance(run, CollectiveRun) and run.between_hosts else 1
        grid = np.array(self._devices).reshape(total // (n * stride), n, stride)
        return Mesh(grid, ("before", "group", "after"), axis_types=(AxisType.Auto,) * 3)


def _in_step(run: Repeated) -> int:
    return run.in_step if isinstance(run, Kernel) else 1


def _on_each_device(value: np.ndarray, sharding: NamedSharding, count: int) -> Any:
    shape = (count * value.shape[0], *value.shape[1:])
    return jax.make_array_from_callback(shape, sharding, lambda _: value)


def _work(run: Repeated) -> tuple[Callable[..., tuple[Any, ...]], list[np.ndarray]]:
    """(one repetition: values to values, the values on each device at first)."""
    match run:
        case MatmulRun():
            # A reflection: what is multiplied with it and its transpose stays as large, however often.
            normal = np.random.default_rng(0).standard_normal(run.width)
            reflection = np.eye(run.width) - 2 * np.outer(normal, normal) / (normal @ normal)
            matrix = reflection.astype(jnp.dtype(run.dtype))
            return _layer, [matrix[: run.rows], matrix, matrix]
        case StreamRun():
            size = max(1, run.array_bytes // 4)
            return lambda x, factor: (x * factor, factor), [np.ones(size, np.float32), np.ones(1, np.float32)]
        case RowsRun():
            rows = max(1, run.array_bytes // (4 * _ROW))
            return lambda x: (jax.nn.softmax(x) * _ROW,), [np.ones((rows, _ROW), np.float32)]
        case CollectiveRun():
            return _collective(run)
        case TransposeRun():
            matrix = np.ones((run.width, run.width), np.float32)
            return lambda x, y: (y.T, x.T), [matrix, matrix]
        case ConvolutionRun():
            return _convolution(run)
        case FreshRun():
            return lambda x: (x,), [np.ones(1, np.float32)]


def _convolution(run: ConvolutionRun) -> tuple[Callable[..., tuple[Any, ...]], list[np.ndarray]]:
    middle, dtype = run.KERNEL // 2, jnp.dtype(run.dtype)
    kernel = np.zeros((run.KERNEL, run.KERNEL, run.channels, run.channels), dtype)
    kernel[middle, middle] = np.eye(run.channels)  # images stay as they are, however often
    images = np.ones((run.images, run.side, run.side, run.channels), dtype)

    def convolved(x: Any, kernel: Any) -> tuple[Any, Any]:
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers), kernel

    return convolved, [images, kernel]


def _filled(count: Any, number: Any, size: int) -> tuple[Any]:
    """Fills a block once, and `count` times more. Devices wait for each other, so that all have theirs at once."""
    fill = lambda i, block: jnp.broadcast_to(number + i, block.shape)  # noqa: E731
    block = jax.lax.fori_loop(0, count, fill, jnp.broadcast_to(number, (size,)))
    return (jax.lax.psum(block[size // 2 : size // 2 + 1], ("before", "group", "after")) * 0.0 + 1.0,)


def _layer(x: Any, weights: Any, _: Any) -> tuple[Any, Any, Any]:
    """(gradient of the input, weights, their gradient), taking y for its own gradient.

    The gradient of the weights goes round the loop although nobody reads it: like all that does it is laid out row by
    row, as an optimizer wants it. If a product read it in the loop, XLA would choose the layout that suits the two.
    """
    y = x @ weights
    return y @ weights.T, weights, x.T @ y


def _chain(run: CallRun, devices: Sequence[Any]) -> Callable[[int], None]:
    """So many calls, each of what the one before has made. The first half of the devices begins."""
    half = len(devices) // 2
    meshes = [
        Mesh(np.array(part), ("d",), axis_types=(AxisType.Auto,)) for part in (devices[:half], devices[half : 2 * half])
    ]
    shardings = [NamedSharding(mesh, PartitionSpec("d")) for mesh in meshes]
    rows = max(1, run.array_bytes // (4 * _ROW))
    first = [_on_each_device(np.ones((rows, _ROW), np.float32), shardings[0], half) for _ in range(run.arrays)]
    task = jax.jit(lambda arrays: [x + 1.0 for x in arrays])
    tasks = [task.lower(jax.device_put(first, sharding)).compile() for sharding in shardings]

    def calls(count: int) -> None:
        arrays = first
        for i in range(count):
            arrays = jax.device_put(tasks[i % 2](arrays), shardings[(i + 1) % 2])
        jax.block_until_ready(arrays)

    return calls


def _collective(run: CollectiveRun) -> tuple[Callable[..., tuple[Any, ...]], list[np.ndarray]]:
    n = run.n
    size = max(1, run.result_bytes // 4)

    def fed_back(collective: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, ...]]:
        """Where the result is larger or smaller than the operand, one number of it goes into the next operand."""
        return lambda x: (x.at[0].set(collective(x)[0]),)

    match run.kind:
        case CollectiveKind.ALL_REDUCE:
            return lambda x: (jax.lax.psum(x, "group"),), [np.zeros(size, np.float32)]
        case CollectiveKind.ALL_GATHER:
            gather = fed_back(lambda x: jax.lax.all_gather(x, "group", tiled=True))
            return gather, [np.zeros(math.ceil(size / n), np.float32)]
        case CollectiveKind.REDUCE_SCATTER:
            scatter = fed_back(lambda x: jax.lax.psum_scatter(x, "group", tiled=True))
            return scatter, [np.zeros(size * n, np.float32)]
        case CollectiveKind.ALL_TO_ALL:
            exchange = lambda x: (jax.lax.all_to_all(x, "group", 0, 0, tiled=True),)  # noqa: E731
            return exchange, [np.zeros(math.ceil(size / n) * n, np.float32)]
        case CollectiveKind.COLLECTIVE_PERMUTE:
            ring = [(i, (i + 1) % n) for i in range(n)]
            return lambda x: (jax.lax.ppermute(x, "group", ring),), [np.zeros(size, np.float32)]
        case _:
            raise AssertionError(f"plans use no {run.kind}, so that none is measured")
