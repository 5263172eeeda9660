"""The recipes that the search is compared with: a table, in which each is a walk over the plans that it may mean.

A new one is a function here and a line of `RECIPES`.
"""

import dataclasses
from collections.abc import Callable

from autopar import recipes
from autopar.intra_op.logical_meshes import distinct_meshes
from autopar.ir.layout import even_layout
from autopar.ir.mesh import LogicalMesh
from autopar.plan.options import PlanRequest
from autopar.recipes import Recipe
from benchmarks.auto_vs_manual.settings import Attempt, Point, Problem, Walk
from benchmarks.auto_vs_manual.walks import FIRST_EXAMPLES, first_points, frontier, walk

AUTO = "auto"
TIMED = "auto, timed"  # the fastest by the clock of the plans that the search predicts to be the best (`autopar.tune`)
MOST_STAGES = 16


def cut(m: int, pp: int = 1) -> int | None:
    """The number of micro-batches to ask for: none where nothing is cut."""
    return m if m > 1 or pp > 1 else None


# The recipes


def auto(problem: Problem) -> Walk:
    yield Attempt(text="", options=PlanRequest())


def data_parallel(problem: Problem, zero: int = 0, offload: str = "nothing", zero_size: int | None = None) -> Walk:
    return frontier(
        problem,
        lambda p, m: recipes.combine(
            zero=zero, zero_size=zero_size, num_microbatches=cut(m), recompute=p.recompute, offload=offload
        ),
        zero=zero,
    )


def hybrid_sharded(problem: Problem) -> Walk:
    """The devices of a host share the whole state (ZeRO-3), hosts are copies. On one host that is ZeRO-3 itself."""
    return data_parallel(problem, 3, zero_size=problem.cluster.domain_devices)


def tensor_parallel(problem: Problem) -> Walk:
    """All devices of a host share each matrix, hosts are copies."""
    tp = min(problem.cluster.domain_devices, problem.cluster.num_devices)
    return frontier(
        problem,
        lambda p, m: recipes.combine(tp=tp, num_microbatches=cut(m), recompute=p.recompute),
        tp=tp,
    )


def megatron(problem: Problem, most_tp: int | None = None) -> Walk:
    """Every product of tensor (inside of a host), pipeline and data parallelism; the optimiser's state in parts.

    Those with most tensor parallelism come first: they are the likeliest to fit, where a walk is ended early.
    """
    n, inside = problem.cluster.num_devices, problem.cluster.domain_devices
    starts = [
        point
        for tp in reversed(powers(most_tp or inside))
        for pp in powers(MOST_STAGES)
        if n % (tp * pp) == 0 and inside % tp == 0
        for point in first_points(problem, tp=tp, pp=pp, zero=1 if tp * pp < n else 0)
    ]
    return walk(
        problem,
        starts,
        lambda p, m: recipes.combine(
            tp=p.tp, pp=p.pp, zero=p.zero, num_microbatches=cut(m, p.pp), recompute=p.recompute
        ),
    )


def expert_and_data(problem: Problem) -> Walk:
    """Experts in parts over as many devices as divide them, examples over all; ZeRO-2 for what is not of experts.

    Source: Rajbhandari et al., "DeepSpeed-MoE", 2022, section 5; Lepikhin et al., "GShard", 2020, section 3.
    """
    n = problem.cluster.num_devices
    experts = problem.model.sizes.get("experts", 1)
    ep = max(d for d in range(1, n + 1) if n % d == 0 and experts % d == 0)

    for zero in (2, 0, 3):
        yield from frontier(
            problem,
            lambda p, m: recipes.combine(ep=ep, zero=p.zero, num_microbatches=cut(m), recompute=p.recompute),
            zero=zero,
        )


def sequence(problem: Problem, kind: str) -> Walk:
    """The devices of a host share each sequence, hosts are copies."""
    sp = min(problem.cluster.domain_devices, problem.cluster.num_devices)
    return frontier(
        problem,
        lambda p, m: recipes.combine(sp=sp, sequence=kind, num_microbatches=cut(m), recompute=p.recompute),
        tp=sp,
    )


def grid_of_devices(problem: Problem, kind: str) -> Walk:
    """Tensor parallelism on a square or a cube of all devices, where they make one."""
    n, depth = problem.cluster.num_devices, 2 if kind == "2.5d" else None
    sizes = {"2d": [q * q for q in range(2, 65)], "2.5d": [2 * q * q for q in range(2, 65)]}
    if n in sizes.get(kind, [q**3 for q in range(2, 17)]):
        recipe = recipes.tensor_parallel(kind, size=n, depth=depth)
        yield Attempt(text=f"{kind}, {n} devices", options=recipe.request)


def unbound(point: Point, m: int) -> Recipe:
    """Stages of equal arithmetic, or one; inside of each the integer program is free."""
    recipe = recipes.pipeline(point.pp, num_microbatches=m)
    return dataclasses.replace(recipe, request=dataclasses.replace(recipe.request, recompute=point.recompute))


def intra_operator(problem: Problem) -> Walk:
    """One program on all devices, without stages, laid out by the integer program."""
    for mesh in distinct_meshes(problem.cluster, 2):
        if problem.examples <= problem.cluster.num_devices * FIRST_EXAMPLES:
            yield Attempt(text=f"mesh {mesh}", options=PlanRequest(axis_sizes=mesh.axis_sizes))
    yield from frontier(problem, unbound)


def equal_stages(problem: Problem) -> Walk:
    """Two stages or more of equal arithmetic on equal submeshes."""
    sizes = [pp for pp in powers(MOST_STAGES) if pp > 1 and problem.cluster.num_devices % pp == 0]
    return walk(problem, [point for pp in sizes for point in first_points(problem, pp=pp)], unbound)


def inter_operator(problem: Problem) -> Walk:
    """As many stages as devices."""
    return walk(problem, first_points(problem, pp=problem.cluster.num_devices), unbound)


def shard_the_largest(problem: Problem) -> Walk:
    """Every array that the step takes split along its largest dimension over all devices; the rest follows best."""
    mesh = LogicalMesh(axis_sizes=(problem.cluster.num_devices,))
    fixed = tuple((i, even_layout(aval.shape, mesh)) for i, aval in enumerate(problem.traced.in_avals))
    yield Attempt(text=f"mesh {mesh}", options=PlanRequest(axis_sizes=mesh.axis_sizes, fixed=fixed))


def powers(most: int) -> list[int]:
    """Powers of two up to a number."""
    return [2**i for i in range(most.bit_length()) if 2**i <= most]


RECIPES: dict[str, Callable[[Problem], Walk]] = {
    AUTO: auto,
    "data parallel": data_parallel,
    "zero 1": lambda problem: data_parallel(problem, 1),
    "zero 2": lambda problem: data_parallel(problem, 2),
    "zero 3": lambda problem: data_parallel(problem, 3),
    "zero 2 offload": lambda problem: data_parallel(problem, 2, offload="optimizer"),
    "hybrid sharded": hybrid_sharded,
    "tensor parallel": tensor_parallel,
    "megatron grid": megatron,
    "pipeline and data": lambda problem: megatron(problem, most_tp=1),
    "expert and data": expert_and_data,
    "ulysses": lambda problem: sequence(problem, "ulysses"),
    "ring attention": lambda problem: sequence(problem, "ring"),
    "2d tensor parallel": lambda problem: grid_of_devices(problem, "2d"),
    "2.5d tensor parallel": lambda problem: grid_of_devices(problem, "2.5d"),
    "3d tensor parallel": lambda problem: grid_of_devices(problem, "3d"),
    "equal stages": equal_stages,
    "inter-operator only": inter_operator,
    "intra-operator only": intra_operator,
    "shard the largest": shard_the_largest,
}
NAMES = (AUTO, TIMED, *(name for name in RECIPES if name != AUTO))  # of all rows, in the order of tables
