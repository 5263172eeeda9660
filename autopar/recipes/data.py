"""Recipes of data parallelism: copies of the model, and the state that they shard (ZeRO, FSDP)."""

from __future__ import annotations

from autopar.plan.options import PlanRequest
from autopar.recipes.axes import bind_axes, hybrid_axes
from autopar.recipes.checks import check_gather, check_zero_stage
from autopar.recipes.combined import combine
from autopar.recipes.names import named
from autopar.recipes.recipe import Recipe
from autopar.recipes.stages import cut_into
from autopar.sharding.constraints import AxisUse
from autopar.sharding.parallelisms import GATHERS, data_axis


@named
def data_parallel() -> Recipe:
    """Every device has the whole model and a part of the batch; one all-reduce sums the gradients.

    Sources: PyTorch DDP (Li et al., "PyTorch Distributed", 2020); Sergeev and Del Balso, "Horovod", 2018.
    """
    return combine()


@named
def zero(stage: int, *, size: int | None = None, gather: str = "after", offload: str = "nothing") -> Recipe:
    """Data parallelism with sharded optimizer state (1), gradient accumulators too (2), parameters too (3).

    `size` neighbours share the state, all devices where it is None; the others are copies (hybrid sharding, HSDP: with
    the devices of a host or a slice as `size`, parameters are gathered inside of it, and between hosts goes one
    all-reduce of each device's part of the gradients). `gather` and `offload` are those of `combine`. Sources:
    Rajbhandari et al., "ZeRO", 2020, section 5; Ren et al., "ZeRO-Offload", 2021; Zhao et al., "PyTorch FSDP", 2023,
    section 3.2.2. Raises: InvalidArgumentError.
    """
    check_zero_stage("recipes.zero(stage)", stage)
    check_gather("recipes.zero(gather=...)", gather, stage, GATHERS)
    data: list[tuple[AxisUse, int | None]] = [(data_axis(stage, gather), None)]
    if size is not None:
        data = hybrid_axes("recipes.zero(size=...)", data_axis(stage, gather), stage, size)
    return cut_into(
        "recipes.zero", bind_axes(data, zero=stage, gather=gather), PlanRequest(num_stages=1), "nothing", offload
    )
