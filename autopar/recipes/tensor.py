"""Recipes of one parallelism each: data with ZeRO, tensor, expert and sequence parallelism."""

from __future__ import annotations

from autopar.calls.search import check_number
from autopar.errors import InvalidArgumentError, expect_one_of
from autopar.plan.options import PlanRequest
from autopar.recipes.axes import SEQUENCES, bind_axes, data_beside, hybrid_axes
from autopar.recipes.combined import combine
from autopar.recipes.recipe import Recipe, check_gather, check_sequence, check_zero_stage, named
from autopar.recipes.stages import cut_into
from autopar.sharding.constraints import AxisUse
from autopar.sharding.parallelisms import GATHERS, data_axis, tensor_axis
from autopar.sharding.tensor_grids import cube, square

# Recipes of data parallelism: copies of the model, and the state that they shard (ZeRO, FSDP).


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


# Recipes of expert parallelism: sharded experts.


@named
def expert_parallel(size: int | None = None) -> Recipe:
    """Sharded experts: `size` devices share the experts of each layer, all devices where it is None.

    Each of them has all other parameters and its own examples; tokens travel to their experts and back by all-to-alls,
    two in the forward pass and two in the backward pass of each layer. The remaining devices are data parallel.
    Sources: Lepikhin et al., "GShard", 2020, section 3; Rajbhandari et al., "DeepSpeed-MoE", 2022, section 5. Raises:
    InvalidArgumentError.
    """
    if size is not None:
        check_number("recipes.expert_parallel(size=...)", size)
    return bind_axes(data_beside(size), ep=size)


# Recipes of sequence parallelism: sharded positions.


@named
def sequence_parallel(kind: str = "megatron", *, size: int | None = None, collective_matmul: bool = False) -> Recipe:
    """Sharded positions: each device has a part of every sequence.

    `size` devices share a sequence, all of them where it is None; the remaining ones are data parallel. The kinds:

    * "megatron": between the matrices of `tensor_parallel("1d")`. Source: Korthikanti et al., "Reducing activation
      recomputation in large transformer models", 2022, section 4.2.2.
    * "ulysses": everywhere but inside attention, which is split by heads; all-to-alls exchange positions for heads and
      back. Parameters are whole (`combine(sp=..., zero=...)` shards them). Source: Jacobs et al., "DeepSpeed Ulysses",
      2023, section 3.
    * "ring": everywhere, also inside attention: keys, values and the sums of their gradients circulate in blocks
      (`autopar.attention.ring`). Needs no heads. Sources: Li et al., "Sequence Parallelism: Long Sequence Training from
      System Perspective", 2021; Liu et al., "Ring Attention with Blockwise Transformers", 2023.
    * "usp": as "ulysses" among as many neighbours as can share the heads of keys, and as "ring" among these groups.
      Source: Fang and Zhao, "USP: A Unified Sequence Parallelism Approach for Long Context Generative AI", 2024.

    "ulysses" over more devices than heads of keys is two mesh axes: queries are exchanged over both, keys and values
    over the first, and gathered over the second. `collective_matmul`, of "megatron": products run in pieces, which are
    gathered or scattered meanwhile (Wang et al., "Overlap Communication", 2023). Raises: InvalidArgumentError.
    """
    if size is not None:
        check_number("recipes.sequence_parallel(size=...)", size)
    if kind == "megatron" or collective_matmul:
        return bind_axes(data_beside(size), tp=size, tensor=tensor_axis(kind == "megatron", collective_matmul))
    check_sequence("recipes.sequence_parallel(kind)", kind, ("megatron", *SEQUENCES))
    return bind_axes(data_beside(size), sp=size, sequence=kind)


@named
def tensor_parallel(kind: str = "1d", *, size: int | None = None, depth: int | None = None) -> Recipe:
    """Sharded matrices, on a row of devices, a square, several squares or a cube.

    * "1d": by columns, then by rows, with an all-reduce behind each pair; attention by heads. Source: Shoeybi et al.,
      "Megatron-LM", 2019, section 3. Over more devices than key and value heads it is two mesh axes: queries are split
      over both, keys and values by heads over the first alone.
    * "2d", "2.5d" with `depth` squares, "3d": blocks of every array, gathered for each product
      (`autopar.sharding.tensor_grids`).

    `size` devices hold a copy of the model, all of them where it is None; the remaining ones are data parallel. A mesh
    has three axes, so "2.5d" and "3d" leave none for that (more depth of "2.5d" has the same effect).

    Raises: InvalidArgumentError.
    """
    kinds, hint = ("1d", "2d", "2.5d", "3d"), "leave it out for '1d', Megatron's; size=8 is the number of devices"
    expect_one_of("recipes.tensor_parallel(kind)", kind, kinds, hint, "'1d', '2d', '2.5d' or '3d'")
    if (kind == "2.5d") != (depth is not None):
        raise InvalidArgumentError(
            where="recipes.tensor_parallel(depth=...)",
            expected="a depth of '2.5d', and of nothing else",
            got=f"{kind!r} with depth={depth}",
            hint="'2.5d' of depth 1 is '2d'",
        )
    for name, number in (("size", size), ("depth", depth)):
        if number is not None:
            check_number(f"recipes.tensor_parallel({name}=...)", number)
    if kind == "1d":
        return bind_axes(data_beside(size), tp=size)
    return Recipe(request=PlanRequest(binding=cube(size=size) if kind == "3d" else square(size=size, depth=depth)))
