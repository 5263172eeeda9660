"""Placement of a step's arguments: their present layouts, copies, moves to the layouts of the plan; and an initial
state that is computed where it is to lie.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from autopar.common import jax_compat
from autopar.execute import nnx_objects
from autopar.execute.call_arguments import StepOptions
from autopar.execute.compiled_step import CompiledStep
from autopar.execute.plan_sources import StepPlans
from autopar.execute.step_leaves import copied, make_state
from autopar.frontend.static_leaves import set_apart
from autopar.hardware.cluster import Cluster
from autopar.ir.jax_sharding import HOST_MEMORY, concrete_mesh, named_sharding
from autopar.ir.layout import LogicalMesh, even_layout
from autopar.runtime.execute import turn


def put_copies(leaves: Sequence[Any], compiled: CompiledStep) -> list[Any]:
    """The leaves in the layouts of the plan; donated ones are copies, which share no memory with the arguments."""

    def put_copy(leaf: Any, sharding: Any) -> Any:
        # `jax.device_put` may share memory with what it is given, with may_alias=False too: jaxlib 0.10 and 0.12 then
        # delete both. One leaf after the other, so that no more than one is there once too often.
        return jax.block_until_ready(jax.device_put(copied(leaf), sharding))

    return [
        put_copy(leaf, sharding) if i in compiled.donated else jax.device_put(leaf, sharding)
        for i, (leaf, sharding) in enumerate(zip(leaves, compiled.leaf_shardings, strict=True))
    ]


def copy_of(args: Sequence[Any]) -> list[Any]:
    """Arguments whose arrays are copies, so that donating them leaves the originals."""
    return [jax.tree.map(copied, a) for a in args]


def has_sharding(leaf: Any, sharding: Any) -> bool:
    """Whether a leaf is an array with an equivalent sharding."""
    return isinstance(leaf, jax.Array) and leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


def put_leaves(leaves: Sequence[Any], compiled: CompiledStep) -> list[Any]:
    """The leaves in the layouts of the plan."""
    if compiled.across is not None:
        return list(leaves)  # it brings them there itself, in the same order in all processes
    out, shardings = list(leaves), compiled.leaf_shardings
    astray = [i for i, leaf in enumerate(leaves) if not has_sharding(leaf, shardings[i])]
    moved = jax.device_put([out[i] for i in astray], [shardings[i] for i in astray])
    for i, array in zip(astray, moved, strict=True):
        out[i] = array
    return out


def is_distributed(array: jax.Array) -> bool:
    """Whether an array lies on several devices or in the memory of the host."""
    return len(array.devices()) > 1 or array.sharding.memory_kind == HOST_MEMORY


def on_default_device(array: Any) -> Any:
    """An array on one device, uncommitted, so that shardings in the code that reads it still apply."""
    if not isinstance(array, jax.Array):
        return array
    if not array.is_fully_addressable:
        return jax.device_put(array, jax.devices()[0])
    if jax_compat.is_key_dtype(array.dtype):
        return jax_compat.key_of(np.asarray(jax.random.key_data(array)), array.dtype)
    return jnp.asarray(np.asarray(array))


def on_one_device(args: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments with their arrays on the default device, where any is distributed; static ones unchanged."""
    if not any(isinstance(x, jax.Array) and is_distributed(x) for x in jax.tree.leaves(tuple(args))):
        return tuple(args)
    return tuple(_moved(arg) for arg in args)


def _moved(arg: Any) -> Any:
    leaves, tree = jax.tree.flatten(arg)
    if not any(isinstance(x, jax.Array) for x in leaves):
        return arg
    return jax.tree.unflatten(tree, [on_default_device(x) if isinstance(x, jax.Array) else x for x in leaves])


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
