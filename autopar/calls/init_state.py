"""The initial state of a step: each device computes only its own part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from autopar.calls import nnx_objects
from autopar.calls.plans import StepPlans
from autopar.calls.step_options import StepOptions
from autopar.executables.multiprocess import make_state
from autopar.frontend.static_leaves import set_apart
from autopar.hardware.cluster import Cluster
from autopar.ir.jax_sharding import concrete_mesh, named_sharding
from autopar.ir.layout import even_layout
from autopar.ir.mesh import LogicalMesh
from autopar.runtime.execution.dispatch import turn


def init_state(
    function: Callable[..., Any], args: Sequence[Any], shardings_of: Callable[[Sequence[Any]], list[NamedSharding]]
) -> Any:
    """The result of `function(*args)`, its leaves in the shardings that `shardings_of` gives for their shapes."""
    trees: list[Any] = []
    args = set_apart(tuple(args))

    def flat(*values: Any) -> list[Any]:
        leaves, tree = jax.tree.flatten(set_apart(*nnx_objects.split((function(*values),))))
        trees.append(tree)
        return leaves

    shapes = jax.eval_shape(flat, *args)
    shardings = shardings_of(shapes)
    with turn:
        if jax.process_count() > 1 or len({s.mesh for s in shardings}) > 1:
            leaves = make_state(flat, shapes, shardings, args)
        else:
            leaves = jax.jit(flat, out_shardings=shardings)(*args)
    return nnx_objects.merged(jax.tree.unflatten(trees[0], leaves))


def state_shardings(leaves: Sequence[Any], plans: StepPlans, options: StepOptions) -> list[NamedSharding]:
    """The latest plan's shardings for a state of these shapes, or an even split where no plan has such a state."""
    shapes = [(tuple(x.shape), str(x.dtype)) for x in leaves]
    for plan in reversed(plans.all()):
        assert plan.trees is not None, "a step's plan has its trees"
        # The whole state, or one of the arguments that it is made of.
        for numbers in (plan.trees.donated, *(frozenset({i}) for i in sorted(plan.trees.donated))):
            planned = plan.argument_leaves(numbers)
            if [(v.shape, v.dtype) for v in planned] == shapes:
                plan.check_devices()
                return [plan.sharding_of(v) for v in planned]
    cluster = options.plan.cluster if options.plan else options.cluster or Cluster.local()
    line = LogicalMesh(axis_sizes=(cluster.num_devices,))
    devices = concrete_mesh(line)
    return [named_sharding(even_layout(tuple(x.shape), line), devices) for x in leaves]
