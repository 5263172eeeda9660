"""Microbenchmarks of kernels and collectives on the devices of this program, as loops inside one program.

What a call costs (dispatch, handing out to devices, memory that is new) is not in it: a sample is the difference of
many repetitions and of a first one, divided by their number. Each repetition needs a number of the one before, so that
no compiler takes it out. Every device works at once, in groups for collectives: a step leaves none idle, and devices
may share cores or wires.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from autopar.hardware.collective_cost import CollectiveKind
from autopar.hardware.kinds import Platform

# One sample should take this long: a hundred times what the clock and the end of a loop leave uncertain.
SAMPLE_S = 10e-3
# Of products and convolutions on accelerators, where power limits a card's clock after a while: an H200 multiplies at
# 803 Tflop/s in samples of 10 ms, at 650 to 660 in runs of 0.1 s, at 641 after 0.2 s, and at 593 after 6 s of nothing
# else (1.3 to 1.5 GHz at 690 W). Those of less than 0.1 ms run 2,000 times, as all that is timed does at most.
POWERED_SAMPLE_S = 0.2
MOST_REPETITIONS = 2_000
# Repetitions that stand in a row in the loop's body, where they are short: going round costs microseconds on a GPU.
UNROLLED, SHORT_S = 8, 200e-6


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRun:
    """A collective over `n` neighbours; `between_hosts`: over one device of each of `n` hosts. Bytes as in `Timing`."""

    kind: CollectiveKind
    result_bytes: int
    n: int
    between_hosts: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MatmulRun:
    """The products of a linear layer in training, of matrices of `width` numbers a side, on every device.

    Forward, gradient of the weights, gradient of the input: one operand of each of the latter is transposed.
    """

    dtype: str
    width: int

    PRODUCTS: ClassVar[int] = 3

    @property
    def flops(self) -> float:
        return self.PRODUCTS * 2.0 * self.width**3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StreamRun:
    """A kernel that reads and writes an array of `array_bytes` on every device and hardly computes."""

    array_bytes: int

    @property
    def moved_bytes(self) -> float:
        return 2.0 * self.array_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ConvolutionRun:
    """A convolution of images with kernels of 3 x 3 on every device, as many channels out as in."""

    images: int
    side: int
    channels: int
    dtype: str

    KERNEL: ClassVar[int] = 3

    @property
    def flops(self) -> float:
        return 2.0 * self.images * self.side**2 * self.KERNEL**2 * self.channels**2


Run = CollectiveRun | MatmulRun | StreamRun | ConvolutionRun


class Clock(Protocol):
    """Times runs on the devices that a measurement is of."""

    def prepare(self, run: Run) -> float:
        """Seconds of one repetition, roughly; all that is slow the first time is done."""

    def sample(self, run: Run) -> float:
        """Seconds of one repetition."""

    def slowest(self, seconds: float) -> float:
        """The most that any process of the program has to say, the same in all."""


class DeviceClock:
    """The clock of real devices. All processes of a program call it alike, and get the same seconds from it."""

    def __init__(self, devices: Sequence[Any], num_hosts: int) -> None:
        self._devices, self._num_hosts = devices, num_hosts
        self._programs: dict[Run, tuple[Callable[..., Any], Any, int]] = {}
        self._repetitions: dict[Run, int] = {}

    def prepare(self, run: Run) -> float:
        # Several streamed kernels in a row would be fused into one.
        seconds = math.inf if isinstance(run, StreamRun) else self._try(run, UNROLLED)
        if seconds > SHORT_S:
            seconds = self._try(run, 1)
        unrolled = self._programs[run][2]
        wanted = self._sample_s(run) / max(seconds, 1e-9)
        self._repetitions[run] = max(1, round(min(wanted, MOST_REPETITIONS) / unrolled)) * unrolled
        return seconds

    def _sample_s(self, run: Run) -> float:
        if isinstance(run, MatmulRun | ConvolutionRun) and self._devices[0].platform != Platform.CPU:
            return POWERED_SAMPLE_S
        return SAMPLE_S

    def sample(self, run: Run) -> float:
        return self._per_repetition_s(run, self._repetitions[run])

    def _try(self, run: Run, unrolled: int) -> float:
        self._programs[run] = self._compiled(run, unrolled)
        self._per_repetition_s(run, unrolled)
        return self._per_repetition_s(run, unrolled)

    def _per_repetition_s(self, run: Run, repetitions: int) -> float:
        program, operands, unrolled = self._programs[run]
        begun = time.perf_counter()
        jax.block_until_ready(program(1 + repetitions // unrolled, *operands))
        between = time.perf_counter()
        jax.block_until_ready(program(1, *operands))
        ended = time.perf_counter()
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

    def _compiled(self, run: Run, unrolled: int) -> tuple[Callable[..., Any], Any, int]:
        """(program of a number of rounds and operands, operands, repetitions in a round)."""
        mesh = self._mesh(run)
        repeat, operands = _work(run)

        def rounds(count: Any, *local: Any) -> Any:
            def one_round(_: Any, values: Any) -> Any:
                for _ in range(unrolled):
                    values = repeat(*values)
                return values

            return jax.lax.fori_loop(0, count, one_round, local)

        everywhere = PartitionSpec(mesh.axis_names)
        program = jax.jit(
            jax.shard_map(
                rounds,
                mesh=mesh,
                in_specs=(PartitionSpec(), *(everywhere for _ in operands)),
                out_specs=tuple(everywhere for _ in operands),
                check_vma=False,  # a sum is the same everywhere, and goes round the loop as if it were not
            )
        )
        sharding = NamedSharding(mesh, everywhere)
        return program, [_on_each_device(x, sharding, len(self._devices)) for x in operands], unrolled

    def _mesh(self, run: Run) -> Mesh:
        n = run.n if isinstance(run, CollectiveRun) else 1
        total = len(self._devices)
        stride = total // self._num_hosts if isinstance(run, CollectiveRun) and run.between_hosts else 1
        grid = np.array(self._devices).reshape(total // (n * stride), n, stride)
        return Mesh(grid, ("before", "group", "after"), axis_types=(AxisType.Auto,) * 3)


def _on_each_device(value: np.ndarray, sharding: NamedSharding, count: int) -> Any:
    shape = (count * value.shape[0], *value.shape[1:])
    return jax.make_array_from_callback(shape, sharding, lambda _: value)


def _work(run: Run) -> tuple[Callable[..., tuple[Any, ...]], list[np.ndarray]]:
    """(one repetition: values to values, the values on each device at first)."""
    match run:
        case MatmulRun():
            # A reflection: what is multiplied with it and its transpose stays as large, however often.
            normal = np.random.default_rng(0).standard_normal(run.width)
            reflection = np.eye(run.width) - 2 * np.outer(normal, normal) / (normal @ normal)
            matrix = reflection.astype(jnp.dtype(run.dtype))
            return _layer, [matrix, matrix, matrix]
        case StreamRun():
            size = max(1, run.array_bytes // 4)
            return lambda x, factor: (x * factor, factor), [np.ones(size, np.float32), np.ones(1, np.float32)]
        case CollectiveRun():
            return _collective(run)
        case ConvolutionRun():
            return _convolution(run)


def _convolution(run: ConvolutionRun) -> tuple[Callable[..., tuple[Any, ...]], list[np.ndarray]]:
    middle, dtype = run.KERNEL // 2, jnp.dtype(run.dtype)
    kernel = np.zeros((run.KERNEL, run.KERNEL, run.channels, run.channels), dtype)
    kernel[middle, middle] = np.eye(run.channels)  # images stay as they are, however often
    images = np.ones((run.images, run.side, run.side, run.channels), dtype)

    def convolved(x: Any, kernel: Any) -> tuple[Any, Any]:
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers), kernel

    return convolved, [images, kernel]


def _layer(x: Any, weights: Any, _: Any) -> tuple[Any, Any, Any]:
    """(gradient of the input, weights, their gradient), taking y for its own gradient.

    The gradient of the weights goes round the loop although nobody reads it: like all that does it is laid out row by
    row, as an optimizer wants it. If a product read it in the loop, XLA would choose the layout that suits the two.
    """
    y = x @ weights
    return y @ weights.T, weights, x.T @ y


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
