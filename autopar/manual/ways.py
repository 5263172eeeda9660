"""Manual ways to run a step, by name: each goes through the settings that it leaves open.

A new one is a function here and a line of `WAYS`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from autopar import recipes
from autopar.manual.walks import Problem, Walk, first_points, frontier, walk
from autopar.recipes.parse import ALIASES

MOST_STAGES = 16
# Beside 1F1B: the zero-bubble schedule that needs no more memory, and several stages on each group of devices.
SCHEDULES = ("zb-h1", "interleaved")


def cut(m: int, pp: int = 1) -> int | None:
    """The number of micro-batches to ask for: none where nothing is cut."""
    return m if m > 1 or pp > 1 else None


def powers(most: int) -> list[int]:
    """Powers of two up to a number."""
    return [2**i for i in range(most.bit_length()) if 2**i <= most]


def inside_host(problem: Problem) -> int:
    """The devices that the fastest links join."""
    return min(problem.cluster.domain_devices, problem.cluster.num_devices)


def groups(problem: Problem) -> Iterator[int]:
    """The sizes of groups of devices inside of a host, the largest first."""
    inside, n = inside_host(problem), problem.cluster.num_devices
    return (size for size in range(inside, 1, -1) if inside % size == 0 and n % size == 0)


def data_parallel(problem: Problem, zero: int = 0, offload: str = "nothing", zero_size: int = 0) -> Walk:
    return frontier(
        problem,
        lambda p, m: recipes.combine(
            zero=zero, zero_size=zero_size or None, num_microbatches=cut(m), recompute=p.recompute, offload=offload
        ),
        zero=zero,
        zero_size=zero_size,
    )


def hybrid_sharded(problem: Problem) -> Walk:
    """The devices of a host share the whole state (ZeRO-3), hosts are copies. On one host that is ZeRO-3 itself."""
    return data_parallel(problem, 3, zero_size=problem.cluster.domain_devices)


def tensor_groups(problem: Problem, tp: int, zero: int = 0) -> Walk:
    """So many devices of a host share each matrix; all such groups are copies, which share the state as ZeRO says."""
    return frontier(
        problem,
        lambda p, m: recipes.combine(tp=p.tp, zero=p.zero, num_microbatches=cut(m), recompute=p.recompute),
        tp=tp,
        zero=zero,
    )


def tensor_parallel(problem: Problem, zero: int = 0) -> Walk:
    """Groups of each size inside of a host, the largest first; where the state is shared, there are several of them."""
    for tp in groups(problem):
        if not zero or tp < problem.cluster.num_devices:
            yield from tensor_groups(problem, tp, zero)


def megatron(
    problem: Problem,
    most_tp: int | None = None,
    least_tp: int = 1,
    least_pp: int = 1,
    schedules: Sequence[str] = (),
) -> Walk:
    """Every product of tensor (inside of a host), pipeline and data parallelism; the optimiser's state in parts.

    Those with most tensor parallelism come first: they are the likeliest to fit, where a walk is ended early.
    """
    n, inside = problem.cluster.num_devices, problem.cluster.domain_devices
    starts = [
        point
        for tp in reversed(powers(most_tp or inside))
        for pp in powers(MOST_STAGES)
        if n % (tp * pp) == 0 and inside % tp == 0 and tp >= least_tp and pp >= least_pp
        for point in first_points(problem, tp=tp, pp=pp, zero=1 if tp * pp < n else 0)
    ]
    return walk(
        problem,
        starts,
        lambda p, m: recipes.combine(
            tp=p.tp,
            pp=p.pp,
            zero=p.zero,
            schedule=p.schedule or None,
            num_microbatches=cut(m, p.pp),
            recompute=p.recompute,
        ),
        schedules,
    )


def expert_and_data(problem: Problem) -> Walk:
    """Experts in parts over as many devices as divide them, examples over all; ZeRO-2 for what is not of experts.

    Source: Rajbhandari et al., "DeepSpeed-MoE", 2022, section 5; Lepikhin et al., "GShard", 2020, section 3.
    """
    n = problem.cluster.num_devices
    ep = max(d for d in range(1, n + 1) if n % d == 0 and problem.experts % d == 0)

    for zero in (2, 0, 3):
        yield from frontier(
            problem,
            lambda p, m: recipes.combine(ep=ep, zero=p.zero, num_microbatches=cut(m), recompute=p.recompute),
            zero=zero,
        )


def sequence(problem: Problem, kind: str, zero: int = 0) -> Walk:
    """Groups of each size inside of a host share a sequence, the largest first; the groups are copies, and all devices
    share the state as ZeRO says.
    """
    for sp in groups(problem):
        yield from frontier(
            problem,
            lambda p, m: recipes.combine(
                sp=p.sp, sequence=kind, zero=zero, num_microbatches=cut(m), recompute=p.recompute
            ),
            sp=sp,
            zero=zero,
        )


# In the order in which they are planned.
WAYS: dict[str, Callable[[Problem], Walk]] = {
    "data parallel": data_parallel,
    "ZeRO-1": functools.partial(data_parallel, zero=1),
    "ZeRO-2": functools.partial(data_parallel, zero=2),
    "ZeRO-3 (FSDP)": functools.partial(data_parallel, zero=3),
    "hybrid sharded": hybrid_sharded,
    "tensor parallel": tensor_parallel,
    "tensor and FSDP": functools.partial(tensor_parallel, zero=3),
    "pipeline": functools.partial(megatron, most_tp=1, least_pp=2, schedules=SCHEDULES),
    "pipeline and tensor": functools.partial(megatron, least_tp=2, least_pp=2, schedules=SCHEDULES),
    "sequence": functools.partial(sequence, kind="ulysses", zero=3),
    "expert": expert_and_data,
}


# The way that leaves open what a call of a recipe leaves to its defaults.
_OF_RECIPE: dict[tuple[str, tuple[Any, ...]], str] = {
    ("data_parallel", ()): "data parallel",
    ("zero", (1,)): "ZeRO-1",
    ("zero", (2,)): "ZeRO-2",
    ("zero", (3,)): "ZeRO-3 (FSDP)",
    ("tensor_parallel", ()): "tensor parallel",
    ("pipeline", ()): "pipeline",
    ("sequence_parallel", ()): "sequence",
    ("expert_parallel", ()): "expert",
}
# Hybrid sharding has a name in PyTorch, and no recipe of its own without the devices of a host.
SHORT = {alias: _OF_RECIPE[call] for alias, call in ALIASES.items()} | {"hsdp": "hybrid sharded"}
QUICK = ("data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3 (FSDP)", "hybrid sharded")  # one mesh, one number of parts each
NOT_BY_DEFAULT = "ZeRO-2"  # lies between its neighbours


def way_called(name: str) -> str | None:
    """The way of a name or a short name, in whatever case; None where there is none."""
    known = {way.lower(): way for way in WAYS} | SHORT
    return known.get(name.lower().replace("_", " "))


def applicable(problem: Problem) -> list[str]:
    """The names of the ways that are ways of their own for a step on a cluster."""
    n, inside = problem.cluster.num_devices, inside_host(problem)
    if n == 1:
        return ["data parallel"]  # what is left is how much is recomputed, and in how many micro-batches
    missing = {NOT_BY_DEFAULT: True, "hybrid sharded": inside in (1, n), "expert": problem.experts == 1}
    missing |= dict.fromkeys(("tensor parallel", "tensor and FSDP", "pipeline and tensor"), inside == 1)
    missing["sequence"] = inside == 1 or not problem.attends
    return [name for name in WAYS if not missing.get(name, False)]
