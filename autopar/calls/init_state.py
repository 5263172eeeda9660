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
from autopar.executables.padded_arrays import PaddedArray
from autopar.frontend.pad_state import store
from autopar.frontend.static_leaves import set_apart
from autopar.hardware.cluster import Cluster
from autopar.ir.jax_sharding import concrete_mesh, named_sharding
from autopar.ir.layout import even_layout
from autopar.ir.mesh import LogicalMesh
from autopar.ir.padded import PaddedForm
from autopar.runtime.execution.dispatch import turn

# The sharding of a leaf as it is stored, and its form where it is stored padded.
Place = tuple[NamedSharding, PaddedForm | None]


def init_state(
    function: Callable[..., Any], args: Sequence[Any], places_of: Callable[[Sequence[Any]], list[Place]]
) -> Any:
    """The result of `function(*args)`, its leaves in the places that `places_of` gives for their shapes."""
    trees: list[Any] = []
    args = set_apart(tuple(args))

    def flat(*values: Any) -> list[Any]:
        leaves, tree = jax.tree.flatten(set_apart(*nnx_objects.split((function(*values),))))
        trees.append(tree)
        return leaves

    shapes = jax.eval_shape(flat, *args)
    shardings, forms = zip(*places_of(shapes), strict=True) if shapes else ((), ())

    def stored(*values: Any) -> list[Any]:
        leaves = flat(*values)
        return [x if form is None else store(x, form) for x, form in zip(leaves, forms, strict=True)]

    if any(forms):
        shapes = jax.eval_shape(stored, *args)
    with turn:
        if jax.process_count() > 1 or len({s.mesh for s in shardings}) > 1:
            leaves = make_state(stored, shapes, list(shardings), args)
        else:
            leaves = jax.jit(stored, out_shardings=list(shardings))(*args)
    leaves = [x if form is None else PaddedArray(x, form) for x, form in zip(leaves, forms, strict=True)]
    return nnx_objects.merged(jax.tree.unflatten(trees[0], leaves))


def state_places(leaves: Sequence[Any], plans: StepPlans, options: StepOptions) -> list[Place]:
    """The latest plan's places for a state of these shapes, or an even split where no plan has such a state."""
    shapes = [(tuple(x.shape), str(x.dtype)) for x in leaves]
    for plan in reversed(plans.all()):
        assert plan.trees is not None, "a step's plan has its trees"
        # The whole state, or one of the arguments that it is made of.
        for numbers in (plan.trees.donated, *(frozenset({i}) for i in sorted(plan.trees.donated))):
            planned = plan.argument_leaves(numbers)
            if [(v.code_shape or v.shape, v.dtype) for v in planned] == shapes:
                plan.check_devices()
                return [(plan.sharding_of(v), v.form) for v in planned]
    cluster = options.plan.cluster if options.plan else options.cluster or Cluster.local()
    line = LogicalMesh(axis_sizes=(cluster.num_devices,))
    devices = concrete_mesh(line)
    return [(named_sharding(even_layout(tuple(x.shape), line), devices), None) for x in leaves]
