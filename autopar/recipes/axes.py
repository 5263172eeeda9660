"""The mesh axes of a recipe, in Megatron's order, and their sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.calls.search import check_number
from autopar.errors import InvalidArgumentError
from autopar.plan.options import PlanRequest
from autopar.recipes.recipe import Recipe
from autopar.sharding.binding import Binding
from autopar.sharding.constraints import AxisUse
from autopar.sharding.parallelisms import data_axis, expert_axis, replica_axis, sequence_axis, tensor_axis

# The ways in which an axis of its own splits positions.
SEQUENCES = ("ulysses", "ring", "usp")


def data_beside(size: int | None) -> list[tuple[AxisUse, int | None]]:
    """The data axis beside an axis of so many devices, or of all of them."""
    return [(data_axis(), None if size is not None else 1)]


def hybrid_axes(
    where: str,
    shares: AxisUse,
    stage: int,
    size: int,
    dp: int | None = None,
    others: tuple[int | None, ...] = (),
) -> list[tuple[AxisUse, int | None]]:
    """The data axes of hybrid sharding: copies of the state, and the devices that share it beside the others' axes."""
    check_number(where, size)
    if stage == 0:
        raise InvalidArgumentError(
            where=where,
            expected="a stage of ZeRO, which the devices of a group share",
            got=f"{size} with stage 0",
            hint="take stage 1, 2 or 3, or leave the size out",
        )
    if None in others or size % math.prod(n for n in others if n is not None):
        raise InvalidArgumentError(
            where=where,
            expected="a multiple of ep * sp, the devices that share the state beside the data axis",
            got=f"{size} with ep * sp = {' * '.join(map(str, others))}",
            hint="zero_size counts all devices that share one copy of the state",
        )
    shared = size // math.prod(n for n in others if n is not None)
    if dp is not None and dp % shared:
        raise InvalidArgumentError(
            where=where,
            expected=f"groups that make up the {dp} copies of the model",
            got=f"{shared} copies of it in a group",
            hint="zero_size divides dp * ep * sp",
        )
    return [(replica_axis(), None if dp is None else dp // shared), (shares, shared)]


def bind_axes(
    data: Sequence[tuple[AxisUse, int | None]],
    *,
    tp: int | None = 1,
    sp: int | None = 1,
    ep: int | None = 1,
    zero: int = 0,
    gather: str = "after",
    sequence: str = "ulysses",
    tensor: AxisUse | None = None,
) -> Recipe:
    """The recipe of one program on these axes: data, experts and sequences where several devices share them, tensor."""
    uses = ((expert_axis(zero, gather), ep), (sequence_axis(sequence, zero, gather), sp))
    shared = [(use, size) for use, size in uses if size != 1]
    axes, sizes = zip(*data, *shared, (tensor or tensor_axis(), tp), strict=True)
    binding = Binding(axes=axes, sizes=sizes)
    return Recipe(request=PlanRequest(binding=binding))
