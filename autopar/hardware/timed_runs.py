"""The runs that calibrate a device and its links: each kind of run with its sizes and its work."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from autopar.hardware.collective_cost import CollectiveKind


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRun:
    """A collective over `n` neighbours; `between_hosts`: over one device of each of `n` hosts. Bytes as in `Timing`."""

    kind: CollectiveKind
    result_bytes: int
    n: int
    between_hosts: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MatmulRun:
    """The products of a linear layer in training, of `rows` rows and `width` columns, on every device.

    Forward, gradient of the weights, gradient of the input: one operand of each of the latter is transposed, which
    costs up to a third of their rate on CPU. `rows=None`: all are square.
    """

    dtype: str
    width: int
    rows: int | None = None
    in_step: int = 1

    PRODUCTS: ClassVar[int] = 3

    @property
    def flops(self) -> float:
        return self.PRODUCTS * 2.0 * (self.rows or self.width) * self.width**2

    @property
    def operand_bytes(self) -> float:
        """Of all three: the rows that come in, those that go out and the weights, each twice."""
        rows = self.rows or self.width
        return jnp.dtype(self.dtype).itemsize * (4.0 * rows * self.width + 2.0 * self.width**2)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StreamRun:
    """A kernel that reads and writes an array of `array_bytes` on every device and hardly computes."""

    array_bytes: int

    @property
    def moved_bytes(self) -> float:
        return 2.0 * self.array_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowsRun:
    """A softmax over rows of an array of `array_bytes` on every device.

    On CPU, where the vector units and not the memory bound such work, it stands for all that is no matrix product.
    """

    array_bytes: int
    in_step: int = 1

    @property
    def moved_bytes(self) -> float:
        """As `cost.roofline` counts: what two reductions read, and half of what four fused operations would write."""
        return (2 + 4 / 2) * self.array_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TransposeRun:
    """Copies of square matrices of `width` numbers a side, rows to columns, on every device."""

    width: int
    in_step: int = 1

    COPIES: ClassVar[int] = 2

    @property
    def row_bytes(self) -> float:
        return 4.0 * self.width

    @property
    def copied_bytes(self) -> float:
        return self.COPIES * self.width * self.row_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ConvolutionRun:
    """A convolution of images with kernels of 3 x 3 on every device, as many channels out as in.

    Of a step's three it is the forward one: XLA's CPU compiler makes another kernel of the gradients in a loop, as runs
    are timed here, than outside of one.
    """

    images: int
    side: int
    channels: int
    dtype: str
    in_step: int = 1

    KERNEL: ClassVar[int] = 3

    @property
    def flops(self) -> float:
        return 2.0 * self.images * self.side**2 * self.KERNEL**2 * self.channels**2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FreshRun:
    """A program's memory for temporary values had anew and written to for the first time, on every device at once."""

    nbytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CallRun:
    """A task of a pipeline that does next to nothing, called on one half of the devices, then on the other, and so on.

    It takes and makes `arrays` arrays of `array_bytes` on each device, which are handed on to the other half. What
    counts is the processor time, as a part of all that the host has: while it is under way other tasks may run.
    """

    arrays: int
    array_bytes: int


# `in_step` devices of a host wait for each other after every repetition of these, as in a step with collectives.
# Virtual devices of one CPU need that to be timed rightly: left alone, one of them runs many repetitions with its
# operands in the caches before another has its turn, and none ever waits for another that has no core.
Kernel = MatmulRun | RowsRun | TransposeRun | ConvolutionRun
Repeated = CollectiveRun | MatmulRun | StreamRun | RowsRun | TransposeRun | ConvolutionRun | FreshRun
Run = Repeated | CallRun
