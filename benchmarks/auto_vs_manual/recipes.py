"""The recipes that the search is compared with: a table, in which each is a walk over the plans that it may mean.

Most are ways of `autopar.bench`; parts of Alpa's own search are here alone. A new one is a line of `RECIPES`.
"""

import dataclasses
from collections.abc import Callable

from autopar import recipes
from autopar.ir.layout import LogicalMesh, even_layout
from autopar.plan.options import PlanRequest
from autopar.recipes import Recipe
from autopar.recipes.walks import FIRST_EXAMPLES, Attempt, Point, Problem, Walk, first_points, frontier, walk
from autopar.recipes.ways import (
    MOST_STAGES,
    data_parallel,
    expert_and_data,
    inside_host,
    megatron,
    powers,
    sequence,
    tensor_groups,
)
from autopar.search.intra_op.spmd_search import distinct_meshes

AUTO = "auto"


def auto(problem: Problem) -> Walk:
    yield Attempt(text="", options=PlanRequest())


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


def shard_the_largest(problem: Problem) -> Walk:
    """Every array that the step takes split along its largest dimension over all devices; the rest follows best."""
    mesh = LogicalMesh(axis_sizes=(problem.cluster.num_devices,))
    fixed = tuple((i, even_layout(aval.shape, mesh)) for i, aval in enumerate(problem.traced.in_avals))
    yield Attempt(text=f"mesh {mesh}", options=PlanRequest(axis_sizes=mesh.axis_sizes, fixed=fixed))


RECIPES: dict[str, Callable[[Problem], Walk]] = {
    AUTO: auto,
    "megatron grid": megatron,
    "expert and data": expert_and_data,
    "pipeline and data": lambda problem: megatron(problem, most_tp=1),
    "data parallel": data_parallel,
    "zero 1": lambda problem: data_parallel(problem, 1),
    "zero 2": lambda problem: data_parallel(problem, 2),
    "zero 3": lambda problem: data_parallel(problem, 3),
    "tensor parallel": lambda problem: tensor_groups(problem, inside_host(problem)),
    "ulysses": lambda problem: sequence(problem, "ulysses"),
    "ring attention": lambda problem: sequence(problem, "ring"),
    "equal stages": equal_stages,
    "intra-operator only": intra_operator,
    "shard the largest": shard_the_largest,
}
