"""What the other modules of the public API ask of a step: its inputs, its plans, the same step under other options."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jax.sharding import Mesh

from autopar.errors import UnsupportedError, expect_type
from autopar.execute import nnx_objects
from autopar.execute.compiled_step import LoweredWhole, lower_whole
from autopar.execute.plan_sources import PlanningProblem, check_leaves_plan_open
from autopar.execute.search import FollowedStep, Search
from autopar.execute.smaller_batch import peak_of_other_batch
from autopar.frontend.static_leaves import set_apart
from autopar.frontend.tracing import checked_when_traced_again
from autopar.hardware.cluster import Cluster
from autopar.plan.options import PlanRequest
from autopar.plan.plan import Plan
from autopar.step import BoundStep, Step, keep_instance_alive


def lower_on(step: Step, mesh: Mesh, *args: Any) -> LoweredWhole:
    """Lowers a step for the devices of a mesh, which may be absent; then the compiled result cannot run."""
    traced, plan = step._planned(args)
    if plan.record.pipeline is not None:
        raise UnsupportedError(
            where=step.__name__,
            expected="a plan without stages",
            got=f"{len(plan.record.pipeline.stages)} stages",
            hint="compile for other hardware under a plan of one stage and one micro-batch",
        )
    return lower_whole(traced, plan, mesh, step._sources.rules())


def planning_problem_of(step: Step, *args: Any) -> PlanningProblem:
    """The inputs of the search for a step's plan for these arguments, which have to be arrays.

    Raises: InvalidArgumentError where the step has a plan, a recipe or another step's layout already, or gets shapes;
    DonatedStateError, UnsupportedError.
    """
    args = nnx_objects.split(args)
    check_leaves_plan_open(step.__name__, step._options)
    step._arguments.check_usable(step._arguments.dynamic(args), step._arguments.dynamic_names(len(args)))
    problem = problem_of_shapes(step, *args)
    problem.traced.is_pure()  # what is measured is not compiled by the step
    return problem


def problem_of_shapes(step: Step, *args: Any) -> PlanningProblem:
    """As `planning_problem_of`, for arrays or shapes, which are not run."""
    args = nnx_objects.split(args)
    check_leaves_plan_open(step.__name__, step._options)
    traced, trees = step._traced(args)
    traced = checked_when_traced_again(traced, step._warn)
    cluster, request = step._sources.request(traced)
    return PlanningProblem(
        traced=traced,
        trees=trees,
        cluster=cluster,
        request=request,
        rules=step._sources.rules(),
        arguments=tuple(step._arguments.dynamic(args)),
        show_progress=step._options.show_progress,
    )


def check_is_step(where: str, step: object) -> None:
    """Raises: InvalidArgumentError for a value that `parallelize` did not return."""
    hint = f"decorate the function first: {where.rpartition('.')[2]}(autopar.parallelize(fun), ...)"
    expect_type(where, step, Step, "a step made by autopar.parallelize", hint)


def save_rules(step: Step) -> None:
    """Saves the sharding rules of a step's operations to disk."""
    step._sources.save_rules()


def call_split(step: Step, args: Sequence[Any]) -> Any:
    """The results of a step, with NNX objects split, on arguments that are split."""
    return step._run(*args)


def followed(step: Step) -> FollowedStep:
    """The view of a step for steps that follow it."""
    return FollowedStep(step.__name__, step._plans.latest, step._function)


def on_cluster(step: Step, cluster: Cluster) -> Step:
    """The same step, planned for a cluster."""
    return Step(function_of(step), dataclasses.replace(step._options, cluster=cluster))


def cluster_of(step: Step) -> Cluster:
    """The cluster that a step is planned for."""
    return step._options.cluster or Cluster.local()


def alone_on(step: Step, cluster: Cluster) -> Step:
    """The same step, planned for a cluster by a free search, its batch in one micro-batch."""
    search = step._options.search.without("schedule").updated(Search(num_microbatches=1))
    free = dataclasses.replace(step._options, plan=None, recipe=PlanRequest(), follow=None)
    return Step(function_of(step), dataclasses.replace(free, cluster=cluster, search=search))


def with_plan(step: Step, plan: Plan) -> Step:
    """The same step under a plan."""
    return Step(function_of(step), dataclasses.replace(step._options, plan=plan, cluster=plan.cluster))


def with_whole_batch(step: Step) -> Step:
    """The same step without its plans, its batch in one micro-batch unless its options name stages or micro-batches."""
    search = step._options.search
    if not step._options.request.names_pipeline:
        search = search.updated(Search(num_microbatches=1))
    return Step(function_of(step), dataclasses.replace(step._options, search=search))


def beside(step: Step, plan: Plan) -> Step:
    """The same step on other batches, its state where a plan of it has it, unless its options say where it lies."""
    options = step._options
    is_free = options.plan is None and options.follow is None and not options.has_recipe
    follow = FollowedStep(step.__name__, lambda: plan, donates=True) if is_free else options.follow
    return Step(function_of(step), dataclasses.replace(options, follow=follow))


def microbatches_named_by(step: Step) -> int:
    """The number of micro-batches that a step's options name, by which each batch divides; 1 where they name none."""
    return step._options.request.num_microbatches or 1


def peak_on_other_batch(step: Step, args: Sequence[Any], others: Sequence[Any]) -> int | None:
    """Bytes of a device for the step on other arguments, a batch of another size, in the layouts of its plan for
    `args`; None where these cannot be kept.
    """
    args, others = nnx_objects.split(tuple(args)), nnx_objects.split(tuple(others))
    planned, plan = step._planned(args)
    return peak_of_other_batch(plan, planned, step._traced(others)[0], step._sources.rules())


def batch_argnums_of(step: Step, args: Sequence[Any]) -> tuple[int, ...]:
    """The numbers of the arguments that hold examples."""
    return step._arguments.batch_argnums(args)


def argument_names_of(step: Step, args: Sequence[Any]) -> list[str]:
    """The names of the arguments in the step's signature."""
    return step._arguments.names(len(args))


def batch_axes_of(step: Step, args: Sequence[Any]) -> dict[int, list[int | None]]:
    """The numbers of the arguments that hold examples, and of each of their leaves the dimension that counts them."""
    numbers = batch_argnums_of(step, args)
    batch = [set_apart(args[i]) for i in numbers if i < len(args)]
    return dict(zip(numbers, step._arguments.axes_of(batch), strict=False))


def function_of(step: Step) -> Callable[..., Any]:
    """The function that a step was made of."""
    return keep_instance_alive(step._function, step._instance) if isinstance(step, BoundStep) else step._function
