"""Constants of links and of devices from timings: least absolute relative error, as a linear program.

The time of a collective is a sum of constants, each times something known (`collectives.time_s`): overhead, steps times
latency, bytes times seconds per byte. So is overhead + work / rate. With the error of a timing as |predicted/measured -
1| the constants of least total error, all zero or more, are a linear program. Least absolute errors leave outliers
alone, where least squares would follow them, and a program has one optimum to find, without a starting point.

Not done: no error bars, and no check that the timings are of an idle machine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from autopar.collectives import CollectiveKind, Fabric, Link, steps, time_s, wire_bytes
from autopar.errors import InvalidArgumentError

Array = NDArray[np.float64]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One measured collective.

    Attributes:
        kind: Which.
        result_bytes: Bytes of the result on each device, as `collectives.sent_bytes` counts them.
        n: Devices that took part, two or more.
        seconds: How long it took, more than zero.
    """

    kind: CollectiveKind
    result_bytes: float
    n: int
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LinkFit:
    """A link and how well it gives back the timings that it was fitted to.

    Attributes:
        link: The link.
        median_error: Median of |predicted / measured - 1|.
        worst: The timing furthest off, by factor, and its predicted / measured.
    """

    link: Link
    median_error: float
    worst: tuple[Timing, float]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RateFit:
    """Time = overhead + work / rate, and how well it gives back the points that it was fitted to.

    Attributes:
        overhead_s: Seconds at no work.
        rate_per_s: Work in a second: flops or bytes.
        median_error: Median of |predicted / measured - 1|.
        worst: The (work, seconds) furthest off, by factor, and its predicted / measured.
    """

    overhead_s: float
    rate_per_s: float
    median_error: float
    worst: tuple[tuple[float, float], float]


def fit_link(timings: Iterable[Timing], *, fabric: Fabric, source: str) -> LinkFit:
    """The link whose `collectives.time_s` is nearest to the timings.

    Timings over one number of devices and of one kind cannot tell overhead from latency: their sum is right then, and
    other numbers of devices are a guess. Time small arrays for these two and large ones for the rate.

    Raises:
        InvalidArgumentError: No timings; one of a single device or of no time; or all so small that no rate shows.
    """
    given = list(timings)
    for timing in given:
        if timing.n < 2 or not timing.seconds > 0:
            raise _unusable("fit_link", "timings over two devices or more that took time", repr(timing))
    if not given:
        raise _unusable("fit_link", "one timing or more", "none")
    columns = [_unit_times(timing, fabric) for timing in given]
    overhead_s, latency_s, s_per_byte = _least_relative(np.array(columns), _seconds(given))
    if not s_per_byte > 0:
        largest = max(timing.result_bytes for timing in given)
        raise _unusable("fit_link", "times that grow with the size", f"none up to {largest:.0f} bytes")
    link = Link(overhead_s=overhead_s, latency_s=latency_s, bytes_per_s=1.0 / s_per_byte, fabric=fabric, source=source)
    predicted = [float(time_s(t.kind, t.result_bytes, t.n, link)) for t in given]
    median, worst, ratio = _quality(np.array(predicted), _seconds(given))
    return LinkFit(link=link, median_error=median, worst=(given[worst], ratio))


def fit_rate(points: Iterable[tuple[float, float]]) -> RateFit:
    """The overhead and the rate whose time is nearest to (work, seconds) points; work in flops or in bytes.

    Raises:
        InvalidArgumentError: Fewer than two amounts of work; a point of no time; or times that do not grow with work.
    """
    given = [(float(work), float(seconds)) for work, seconds in points]
    for point in given:
        if not (point[0] >= 0 and point[1] > 0):
            raise _unusable("fit_rate", "work of zero or more that took time", repr(point))
    if len({work for work, _ in given}) < 2:
        raise _unusable("fit_rate", "two different amounts of work or more", f"{len(given)} points")
    work, seconds = np.array(given).T
    overhead_s, s_per_unit = _least_relative(np.stack([np.ones_like(work), work], axis=1), seconds)
    if not s_per_unit > 0:
        raise _unusable("fit_rate", "times that grow with the work", f"none up to {work.max():.3g}")
    median, worst, ratio = _quality(overhead_s + work * s_per_unit, seconds)
    return RateFit(overhead_s=overhead_s, rate_per_s=1.0 / s_per_unit, median_error=median, worst=(given[worst], ratio))


def _unit_times(timing: Timing, fabric: Fabric) -> list[float]:
    """What overhead, latency and seconds per byte are multiplied with in the time of one collective."""
    return [
        1.0,
        float(steps(timing.kind, timing.n, fabric)),
        float(wire_bytes(timing.kind, timing.result_bytes, timing.n, fabric)),
    ]


def _least_relative(columns: Array, seconds: Array) -> list[float]:
    """Constants x >= 0 of the least sum of |columns @ x / seconds - 1|.

    As a linear program: one slack above and one below for each row, columns @ x / seconds + below - above = 1, and
    their sum is least. Columns are scaled to a largest entry of one: bytes beside steps span fifteen decades.
    """
    rows = columns / seconds[:, None]
    scale = np.maximum(rows.max(axis=0), np.finfo(float).tiny)
    count, unknowns = rows.shape
    slack = np.eye(count)
    solved = linprog(
        c=np.concatenate([np.zeros(unknowns), np.ones(2 * count)]),
        A_eq=np.hstack([rows / scale, slack, -slack]),
        b_eq=np.ones(count),
        bounds=(0, None),
        method="highs",
    )
    assert solved.success, f"x = 0 fits every program of this form: {solved.message}"
    return [float(x) for x in solved.x[:unknowns] / scale]


def _seconds(timings: Sequence[Timing]) -> Array:
    return np.array([timing.seconds for timing in timings])


def _quality(predicted: Array, seconds: Array) -> tuple[float, int, float]:
    """Median relative error, index of the point that is off by the greatest factor, and its predicted / measured."""
    ratio = predicted / seconds
    worst = int(np.argmax(np.abs(np.log(np.maximum(ratio, np.finfo(float).tiny)))))
    return float(np.median(np.abs(ratio - 1.0))), worst, float(ratio[worst])


def _unusable(where: str, expected: str, got: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        where=where,
        expected=expected,
        got=got,
        hint="time sizes from a few kilobytes to as many megabytes as the devices hold, over all the devices",
    )
