"""The space of the search over stages: meshes, schedules, and the numbers of micro-batches that are tried next."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence

from autopar.errors import InvalidArgumentError, expect_one_of
from autopar.hardware.cluster import Cluster
from autopar.ir.layout import LogicalMesh
from autopar.ir.traced_step import TracedStep
from autopar.passes.smaller_step import num_examples
from autopar.passes.split_scan import SplitStep, divisors
from autopar.plan.context import Rejection
from autopar.plan.options import PlanRequest
from autopar.search.inter_op.pipeline_candidate import SOURCE
from autopar.search.inter_op.staged import default_chunks
from autopar.search.intra_op.spmd_search import LONG_STEP, distinct_meshes
from autopar.solver import Schedule as SearchedSchedule

NEAR_THE_BEST = 1.15  # the error of the tables: what takes up to so many times as long as the best may be the best
SEARCHED_SCHEDULES = ("1f1b", "eager-1f1b", "zb-h1", "zb-2p", "interleaved")
# Examples of a micro-batch: the smallest on many devices, how many sizes are searched first, and their ratio.
SMALLEST_MICROBATCH, MICROBATCH_SIZES, MICROBATCH_RATIO = 4, 3, 4
MICROBATCHES_A_STAGE = 16  # leave next to no bubble
MOST_PARTS = 128  # of the devices, as the smallest stages cut them: the search over stages takes minutes for more
MOST_CHUNKS = 8  # stages of a group of devices that interleave: deeper pipelines gain next to nothing
FEW_MESHES = 4  # those of hosts of eight devices


def is_long(traced: TracedStep) -> bool:
    """Whether a step is so long that every pass over it takes long."""
    return len(traced.jaxpr.eqns) > LONG_STEP


def microbatch_numbers(traced: TracedStep, cluster: Cluster, request: PlanRequest) -> list[int]:
    """The numbers of micro-batches to search, largest first.

    The largest number leaves a few examples for the devices of a stage, and makes bubbles small for any number of
    stages. The smaller numbers have larger micro-batches, which read parameters less often. Micro-batches of the
    largest number split over powers of two of devices, as most stages have; others also over odd numbers of hosts.
    """
    if request.num_microbatches is not None:
        return [request.num_microbatches]
    examples = num_examples(traced)
    smallest = min(SMALLEST_MICROBATCH, max(1, cluster.num_devices // 16))
    largest = min(examples / smallest, MICROBATCHES_A_STAGE * cluster.num_devices)
    groups = examples // odd_part(examples, cluster)
    stages_are_odd = _odd(cluster.num_devices) > MOST_PARTS
    most = nearest_divisor(groups if stages_are_odd else examples, largest)
    several = 2 if is_long(traced) else MICROBATCH_SIZES  # each size is traced and priced anew
    others = (nearest_divisor(groups, max(1.0, largest / MICROBATCH_RATIO**i)) for i in range(1, several))
    return list(dict.fromkeys((most, *others)))


def _odd(n: int) -> int:
    """A number without its factors of two."""
    return n // (n & -n)


def odd_part(examples: int, cluster: Cluster) -> int:
    """The largest odd number of devices over which examples are split, up to a small bound: with micro-batches of a
    power of two, stages of three or nine hosts would have no data parallelism.
    """
    largest = MICROBATCH_RATIO * SMALLEST_MICROBATCH
    return max(d for d in _divisor_chain(_odd(cluster.num_devices)) if examples % d == 0 and d <= largest)


def stage_numbers(step: SplitStep, cluster: Cluster, chunks: int = 1) -> list[int]:
    """The numbers of groups of devices, with so many stages each, that divide scans over layers, and the devices, into
    equal parts.
    """
    return [s for s in _equal_groups(step, cluster) if step.divides(s * chunks)]


def uneven_stages(step: SplitStep, cluster: Cluster) -> list[Rejection]:
    """What is not searched of a scan over layers: numbers of stages that divide the devices, and not the layers."""
    numbers = [s for s in _equal_groups(step, cluster) if not step.divides(s)] if step.parts > 1 else []
    if not numbers:
        return []
    why = (
        f"not searched: they do not divide the {step.trips} layers, whose arrays would lie on fewer of the stages; "
        "autopar.recipes.pipeline(stages=...) asks for it"
    )
    return [Rejection(source=SOURCE, text=f"{', '.join(map(str, numbers))} stages of the scan's layers", why=why)]


def _equal_groups(step: SplitStep, cluster: Cluster) -> list[int]:
    n, total = cluster.domain_devices, cluster.num_devices
    sizes = {s: total // s for s in divisors(total) if s <= step.parts}
    return [s for s, size in sizes.items() if size % n == 0 or n % size == 0]


def few_bubbles(traced: TracedStep, num_stages: int, parts: int = 1) -> int:
    """The divisor of the batch nearest to four micro-batches for each stage, among the divisors whose micro-batches can
    be split into `parts`, where the batch can be.
    """
    if num_stages == 1:
        return 1
    examples = num_examples(traced)
    return nearest_divisor(examples // parts if examples % parts == 0 else examples, 4 * num_stages)


def nearest_divisor(n: int, target: float) -> int:
    """The divisor of n whose ratio to the target is nearest to one."""
    return min(divisors(n), key=lambda m: abs(math.log(m / target)))


def schedules_of(request: PlanRequest, cluster: Cluster) -> tuple[str, ...]:
    """The schedules to search; one device does everything in turn, whatever the order.

    Raises: InvalidArgumentError for a schedule without a model in the search over stages.
    """
    if request.schedule is None:
        return SEARCHED_SCHEDULES if cluster.num_devices > 1 else SEARCHED_SCHEDULES[:1]
    known = [s.value for s in SearchedSchedule]
    where = f"schedule={request.schedule!r} without a number of stages"
    hint = f"name the stages: plan=autopar.recipes.pipeline(4, {request.schedule!r})"
    expect_one_of(where, request.schedule, known, hint, f"one of {', '.join(known)}")
    return (request.schedule,)


def chunk_numbers(request: PlanRequest, name: str, num_layers: int) -> tuple[int, ...]:
    """The numbers of stages on each group of devices to search under a schedule, the smallest first: 1, or where it
    interleaves stages all up to `MOST_CHUNKS`, as far as two groups have layers for them.
    """
    fewest = request.chunks or default_chunks(name)
    if request.chunks is not None or fewest == 1:
        return (fewest,)
    return (fewest, *range(fewest + 1, min(MOST_CHUNKS, num_layers // 2) + 1))


def submesh_sizes(cluster: Cluster, request: PlanRequest, num_layers: int) -> list[int]:
    """Powers of two inside a host, then whole hosts by powers of two, and all devices; where a small odd number divides
    the hosts, that number of hosts by powers of two as well, as data parallelism over 48 devices needs it. Sizes that
    would need more stages than there are layers are left out, except where devices would be left over. If this would
    cut many hosts into small parts, each size divides the next larger one instead.
    """
    n, total = cluster.domain_devices, cluster.num_devices
    if request.num_stages is not None:
        if total % request.num_stages:
            raise InvalidArgumentError(
                where="pipeline",
                expected=f"a number of stages that divides {total} devices",
                got=f"{request.num_stages} stages",
                hint="ask for a number of stages that divides the devices",
            )
        return [total // request.num_stages]
    inside = [size for size in (2**i for i in range(n.bit_length())) if n % size == 0]
    hosts = [n * 2**i for i in range(cluster.num_domains.bit_length()) if 2**i <= cluster.num_domains]
    sizes = sorted({*inside, *hosts, total})
    enough = [size for size in sizes if size * num_layers >= total]
    # Where the devices are no multiple of the smallest of these, smaller stages make up the rest.
    for size in reversed(sizes[: -len(enough)]):
        if total % enough[0] == 0:
            break
        enough.insert(0, size)
    if total // enough[0] <= MOST_PARTS:
        odd = next((d for d in divisors(cluster.num_domains) if d % 2 and d > 1), 0)
        of_odd = [n * d for d in divisors(cluster.num_domains) if odd and _odd(d) == odd]
        return sorted({*enough, *(size for size in of_odd if size * num_layers >= total)})
    chain = [*inside, *(n * of_hosts for of_hosts in _divisor_chain(cluster.num_domains))]
    return sorted({size for size in chain if size * num_layers >= total})


def _divisor_chain(n: int) -> list[int]:
    """1 and n, with numbers between them of which each divides the next, by the smallest possible factor."""
    chain = [1]
    while chain[-1] < n:
        quotient = n // chain[-1]
        chain.append(chain[-1] * divisors(quotient)[1])
    return chain


def meshes_inside(part: Cluster) -> list[LogicalMesh]:
    """The logical meshes of a stage, of at most two axes, the inner of which stays inside a host."""
    meshes = distinct_meshes(part, 2)
    return [m for m in meshes if len(m.axis_sizes) == 1 or m.axis_sizes[-1] <= part.domain_devices]


def own_meshes(cluster: Cluster, best: LogicalMesh) -> list[LogicalMesh]:
    """The meshes on which one stage is decided by itself: all where there are few; else that which is best by the
    tables: among many they differ by more than the tables err.
    """
    meshes = meshes_inside(cluster)
    return meshes if len(meshes) <= FEW_MESHES else [best]


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
    """The numbers in which several stages are tried next: double of the fastest so far where none is above, in which
    they wait less for one another; half where none is below; then those midway between it and the next ones on either
    side, by their ratio.

    Args:
        numbers: All that the batch admits, in rising order.
        tried: Those tried.
        best: The fastest of them.
    """
    below, above = max((m for m in tried if m < best), default=None), min((m for m in tried if m > best), default=None)
    found = []
    if above is None:
        found += [m for m in numbers if m >= 2 * best][:1]
    if below is None:
        found += [m for m in numbers if 2 * m <= best][-1:]
    for low, high in ((below, best), (best, above)):
        if low is not None and high is not None:
            between = [m for m in numbers if low < m < high]
            found += sorted(between, key=lambda m: abs(math.log(m * m / (low * high))))[:1]
    return found
