"""Constants of links and of devices from timings: least absolute relative error, by linear programs.

The time of a collective is a sum of constants, each times something known (`time_s`): overhead, steps times
latency, bytes times seconds per byte. So is overhead + work / rate. With the error of a timing as
|predicted/measured - 1| the constants of least total error, all zero or more, are a linear program. Least absolute
errors leave outliers alone, where least squares would follow them, and a program has one optimum to find, without a
starting point.

What a switched link has beyond that (`SwitchDetail`) is added constant by constant, each only if it makes the error
clearly smaller. Where a collective takes the faster of two ways, the number of devices from which it takes the other is
tried out: the time is a sum again once the way is known. The constants of permutes are tried out, from each timing.

Not done: no error bars, and no check that the timings are of an idle machine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from autopar.common.text import text_of_bytes
from autopar.errors import InvalidArgumentError
from autopar.hardware.collective_cost import (
    CollectiveKind,
    Fabric,
    Link,
    SwitchDetail,
    kept_bytes,
    ring_steps,
    steps,
    time_s,
    wire_bytes,
)

Array = NDArray[np.float64]

# A constant more must take away this part of the error, or it describes the noise; the two of permutes, which are
# picked among many and are real where a permute runs at a fraction of the link's rate, a large one.
_WORTH, _WORTH_OF_PAIRS = 0.02, 0.25
# Errors below this, for each timing, are the solver's.
_ROUNDING = 1e-9
_NEVER = float("inf")


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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """Which constants a link has, and from which number of devices an all-reduce takes the tree, or the switch."""

    keeps: bool = False
    tree_from: float = _NEVER
    switch_from: float = _NEVER


def fit_link(timings: Iterable[Timing], *, fabric: Fabric, source: str) -> LinkFit:
    """The link whose `time_s` is nearest to the timings.

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
    permutes = [t for t in given if t.kind is CollectiveKind.COLLECTIVE_PERMUTE]
    others = [t for t in given if t.kind is not CollectiveKind.COLLECTIVE_PERMUTE]
    # On a switched fabric permutes have ways of their own, which must not bend the constants of the rest.
    fitted = others if others and fabric is Fabric.SWITCHED else given
    form = _Form()
    link = _link(fitted, form, fabric, source)
    if link is None:
        largest = max(timing.result_bytes for timing in fitted)
        raise _unusable("fit_link", "times that grow with the size", f"none up to {text_of_bytes(largest)}")
    if fabric is Fabric.SWITCHED:
        for forms in (_keeping, _through_a_tree, _in_the_switch):
            least = (1.0 - _WORTH) * _error(link, fitted) - _ROUNDING * len(fitted)
            for tried in forms(form, fitted):
                other = _link(fitted, tried, fabric, source)
                if other is not None and _error(other, fitted) < least:
                    form, link, least = tried, other, _error(other, fitted)
        link = _with_pairs(link, permutes) if others else link
    predicted = _predicted(link, given)
    median, worst, ratio = _quality(predicted, _seconds(given))
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
        raise _unusable("fit_rate", "times that grow with the work", f"none up to {float(np.max(work)):.3g}")
    median, worst, ratio = _quality(overhead_s + work * s_per_unit, seconds)
    return RateFit(overhead_s=overhead_s, rate_per_s=1.0 / s_per_unit, median_error=median, worst=(given[worst], ratio))


def _keeping(form: _Form, timings: Sequence[Timing]) -> Iterator[_Form]:
    """Parts kept are told from parts sent by their shares, which are the same for equal numbers of devices."""
    if len({timing.n for timing in timings}) > 1:
        yield dataclasses.replace(form, keeps=True)


def _in_the_switch(form: _Form, timings: Sequence[Timing]) -> Iterator[_Form]:
    for n in _reduced(timings):
        yield dataclasses.replace(form, switch_from=n)


def _through_a_tree(form: _Form, timings: Sequence[Timing]) -> Iterator[_Form]:
    """Between two devices a tree is a ring, so that three are the least."""
    for n in _reduced(timings):
        if n > 2:
            yield dataclasses.replace(form, tree_from=n)


def _reduced(timings: Sequence[Timing]) -> list[int]:
    """Numbers of devices of the all-reduces, if there is another kind that they can be told from."""
    kinds = {timing.kind for timing in timings}
    return sorted({t.n for t in timings if t.kind is CollectiveKind.ALL_REDUCE}) if len(kinds) > 1 else []


def _link(timings: Sequence[Timing], form: _Form, fabric: Fabric, source: str) -> Link | None:
    """The best link of a form, without what it has for permutes; None if it would take no time to send bytes."""
    columns = _of_each_kind(timings, lambda kind, size, n: _unit_times(kind, size, n, form, fabric))
    overhead, latency, tree, sent, kept, switch = _least_relative(columns, _seconds(timings))
    if not sent > 0:
        return None
    detail = SwitchDetail(
        tree_latency_s=tree or None,
        kept_bytes_per_s=1.0 / kept if kept else None,
        switch_bytes_per_s=1.0 / switch if switch else None,
    )
    return Link(
        overhead_s=overhead,
        latency_s=latency,
        bytes_per_s=1.0 / sent,
        fabric=fabric,
        source=source,
        detail=None if detail == SwitchDetail() else detail,
    )


def _unit_times(kind: CollectiveKind, size: Array, n: Array, form: _Form, fabric: Fabric) -> Array:
    """What the constants of `_link` are multiplied with in the times of collectives, a column each, in its order."""
    reduces = kind is CollectiveKind.ALL_REDUCE
    tree, switch = reduces & (n >= form.tree_from), reduces & (n >= form.switch_from)
    direct = steps(kind, n, fabric)
    if reduces and form.tree_from < _NEVER:
        direct = np.where(tree, direct, ring_steps(n))
    kept = kept_bytes(kind, size, n) if form.keeps else np.zeros_like(size)
    columns = (
        np.ones_like(size),
        np.where(tree, 0.0, direct),
        np.where(tree, direct, 0.0),
        np.where(switch, 0.0, wire_bytes(kind, size, n, fabric)),
        np.where(switch, 0.0, kept),
        np.where(switch, size, 0.0),
    )
    return np.stack(columns, axis=1)


def _with_pairs(link: Link, permutes: Sequence[Timing]) -> Link:
    """The link with a rate of few channels and a time at which more are given, if permutes show them."""
    seconds, sizes = _seconds(permutes), np.array([timing.result_bytes for timing in permutes])
    net = seconds - link.overhead_s - link.latency_s
    known = (net > 0) & (sizes > 0)
    best, least = link, (1.0 - _WORTH_OF_PAIRS) * _error(link, permutes) - _ROUNDING * len(permutes)
    for rate in sizes[known] / net[known]:
        ramps = net[known][:, None]
        moved = np.maximum(sizes / link.bytes_per_s, np.minimum(sizes / rate, ramps))
        errors = np.abs((seconds - net + moved) / seconds - 1.0).sum(axis=1)
        if errors.min() < least:
            least = errors.min()
            detail = dataclasses.replace(
                link.detail or SwitchDetail(),
                pair_bytes_per_s=float(rate),
                pair_ramp_s=float(ramps[errors.argmin(), 0]),
            )
            best = dataclasses.replace(link, detail=detail)
    return best


def _error(link: Link, timings: Sequence[Timing]) -> float:
    return float(np.abs(_predicted(link, timings) / _seconds(timings) - 1.0).sum())


def _predicted(link: Link, timings: Sequence[Timing]) -> Array:
    return _of_each_kind(timings, lambda kind, size, n: time_s(kind, size, n, link))


def _of_each_kind(timings: Sequence[Timing], of: Callable[[CollectiveKind, Array, Array], Array]) -> Array:
    """`of(kind, bytes of the results, devices)` for the timings of each kind at once, in the order of the timings."""
    if not timings:
        return np.zeros(0)
    kinds = np.array([t.kind for t in timings], dtype=object)
    sizes, devices = np.array([(float(t.result_bytes), float(t.n)) for t in timings]).T
    places = [(kind, np.flatnonzero(kinds == kind)) for kind in dict.fromkeys(kinds)]
    order = np.argsort(np.concatenate([at for _, at in places]))
    return np.concatenate([of(kind, sizes[at], devices[at]) for kind, at in places])[order]


def _least_relative(columns: Array, seconds: Array) -> list[float]:
    """Constants x >= 0 of the least sum of |columns @ x / seconds - 1|.

    As a linear program: one slack above and one below for each row, columns @ x / seconds + below - above = 1 less what
    is known, and their sum is least. Columns are scaled to a largest entry of one: bytes beside steps span fifteen
    decades. A column of zeros has no say, and its constant is zero.
    """
    rows = columns / seconds[:, None]
    used = rows.max(axis=0) > 0
    scale = rows[:, used].max(axis=0)
    count, unknowns = rows.shape[0], int(used.sum())
    from scipy.optimize import linprog  # takes a third of a second to import

    slack = sparse.eye_array(count)
    solved = linprog(
        c=np.concatenate([np.zeros(unknowns), np.ones(2 * count)]),
        A_eq=sparse.hstack([sparse.csr_array(rows[:, used] / scale), slack, -slack]),
        b_eq=np.ones(count),
        bounds=(0, None),
        method="highs",
    )
    assert solved.success, f"all programs of this form have x = 0 among their points: {solved.message}"
    constants = np.zeros(rows.shape[1])
    constants[used] = solved.x[:unknowns] / scale
    return [float(x) for x in constants]


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
