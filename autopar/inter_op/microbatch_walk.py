"""In which numbers of micro-batches one stage, or several, are tried next, by what they came to in others."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence

# Numbers of micro-batches for several stages differ by this factor at least: a table is made for each.
APART = 1.5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """One stage in some number of micro-batches.

    Attributes:
        step_time_s: inf where it does not fit.
        peak_bytes: None where it was not built.
        most_bytes: The peak by the tables, which is an upper bound; None where that is not known.
        policies: What each layer recomputes, or all of them; empty where that is not known.
    """

    step_time_s: float
    peak_bytes: int | None = None
    most_bytes: int | None = None
    policies: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class BestStages:
    """The fastest pipeline of several stages so far: its number of micro-batches, and the devices of each stage."""

    num_microbatches: int
    sizes: Sequence[int]


def next_numbers(
    numbers: Sequence[int], tried: Mapping[int, Tried], limit_bytes: int, largest: int, whole: Collection[int] = ()
) -> list[int]:
    """The numbers to try next: fewer micro-batches than the fastest so far has, and more of them, by two times at
    least. Nothing where the fastest lies between numbers that are slower.

    With fewer micro-batches parameters are gathered, and gradients added up, less often. So the fewest are tried first
    that surely fit with the same recomputation: a peak is a part that stays and a part in proportion to the examples of
    a micro-batch. For the same reason more are left out where a larger number with the same recomputation is slower.

    Where all devices get examples of a micro-batch, nothing else need be split, so that a number of which this holds
    may be faster than one of which it does not, whatever numbers between the two come to.

    Args:
        numbers: All that the batch admits, in rising order.
        tried: By the number of micro-batches; not empty.
        largest: Numbers from this on are left to the search over stages.
        whole: The numbers whose micro-batches have examples for all devices, equally many for each.
    """
    best = min(tried, key=lambda m: tried[m].step_time_s)
    fewer, more = (
        [m for m in numbers if (m < best) == is_fewer and _may_be_faster(m, best, tried, whole)]
        for is_fewer in (True, False)
    )
    more = [m for m in more if m < largest]
    above = min((m for m in tried if m > best), default=None)
    found = []
    if fewer:
        fitting = [m for m in fewer if largest_peak_bytes(tried, best, m) <= limit_bytes]
        found.append(min(fitting, default=max(fewer)))
    if above is not None and tried[best].policies and tried[above].policies == tried[best].policies:
        more = [m for m in more if _gains_devices(m, best, whole)]
    if more:
        found.append(min(more))
    return found


def _gains_devices(m: int, best: int, whole: Collection[int]) -> bool:
    """Whether all devices get examples in m micro-batches and not in the best number."""
    return m in whole and best not in whole


def _may_be_faster(m: int, best: int, tried: Collection[int], whole: Collection[int]) -> bool:
    """Whether m is far enough from the fastest number, and beyond none that says it is slower too."""
    gains_devices = _gains_devices(m, best, whole)
    if not gains_devices and max(m, best) < 2 * min(m, best):
        return False
    low, high = (m, best - 1) if m < best else (best + 1, m)
    return not any(low <= n <= high and (not gains_devices or n in whole) for n in tried)


def numbers_within(numbers: Sequence[int], tried: Mapping[int, Tried], longest_s: float) -> list[int]:
    """The numbers in which one stage may take at most so long. A larger micro-batch takes no less than a smaller one,
    so of fewer the step takes its share of the time at least; of more, which need no recomputation, half of it.

    Args:
        tried: As in `next_numbers`.
    """
    best = min(tried, key=lambda m: tried[m].step_time_s)
    fastest_s = tried[best].step_time_s
    return [m for m in numbers if math.isinf(fastest_s) or fastest_s * (m / best if m < best else 0.5) <= longest_s]


def largest_peak_bytes(tried: Mapping[int, Tried], best: int, m: int) -> float:
    """The most that one stage needs in m micro-batches, fewer than `best`, with the recomputation of that number: by a
    line over the examples of a micro-batch through another number, else as if all of the peak grew with them.
    """
    peak_bytes, most_bytes = tried[best].peak_bytes, tried[best].most_bytes
    if peak_bytes is None:
        return math.inf if most_bytes is None else most_bytes * best / m
    alike = {n: t.peak_bytes for n, t in tried.items() if n != best and t.policies == tried[best].policies}
    other = min((n for n, peak in alike.items() if peak is not None), key=lambda n: abs(n - best), default=None)
    if other is None:
        return peak_bytes * best / m
    of_other = alike[other]
    assert of_other is not None, "it was built"
    return peak_bytes + (of_other - peak_bytes) * (1 / m - 1 / best) / (1 / other - 1 / best)


def next_for_stages(numbers: Sequence[int], tried: Collection[int], best: int) -> list[int]:
    """The numbers in which several stages are tried next: those midway between the fastest so far and the next ones on
    either side, by their ratio; then half of it where none is below, and double where none is above. So a number that
    is found between two spares a look beyond them.

    Args:
        numbers: All that the batch admits, in rising order.
        tried: Those tried.
        best: The fastest of them.
    """
    below, above = max((m for m in tried if m < best), default=None), min((m for m in tried if m > best), default=None)
    found = []
    for low, high in ((below, best), (best, above)):
        if low is not None and high is not None:
            between = [m for m in numbers if APART * low <= m <= high / APART]
            found += sorted(between, key=lambda m: abs(math.log(m * m / (low * high))))[:1]
    if below is None:
        found += [m for m in numbers if 2 * m <= best][-1:]
    if above is None:
        found += [m for m in numbers if m >= 2 * best][:1]
    return found
