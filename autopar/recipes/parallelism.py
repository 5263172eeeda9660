"""The recipes: of one parallelism (data with ZeRO, tensor, expert, sequence), in pipeline stages, and of several
together.
"""

from __future__ import annotations

import dataclasses

from autopar.errors import InvalidArgumentError, expect_one_of, expect_type
from autopar.execute.search import check_number, check_schedule
from autopar.ir.constraints import AxisUse
from autopar.ir.parallelisms import GATHERS, cube, data_axis, square, tensor_axis
from autopar.passes.remat import FORMS, is_policy
from autopar.plan.options import PlanRequest
from autopar.recipes.recipe import (
    SEQUENCES,
    Recipe,
    bind_axes,
    check_gather,
    check_sequence,
    check_zero_stage,
    data_beside,
    hybrid_axes,
    named,
)


@named
def combine(
    *,
    dp: int | None = None,
    tp: int = 1,
    ep: int = 1,
    pp: int = 1,
    sp: int = 1,
    zero: int = 0,
    zero_size: int | None = None,
    gather: str = "after",
    sequence: str = "ulysses",
    sequence_parallel: bool = False,
    collective_matmul: bool = False,
    schedule: str | None = None,
    num_microbatches: int | None = None,
    chunks: int | None = None,
    recompute: str = "nothing",
    offload: str = "nothing",
) -> Recipe:
    """Data, sequence, expert, tensor and pipeline parallelism together, in Megatron's order: tensor groups are
    neighbours, then come sequence groups, expert groups, data groups (those that share state before those that copy
    it), and stages.

    Args:
        dp: Copies of the model; None: as many as the devices make.
        tp: Devices that share each matrix (`tensor_parallel("1d")`).
        ep: Devices that share the experts of a copy, each with examples of its own (`expert_parallel`).
        pp: Pipeline stages, each of `dp * ep * sp * tp` devices.
        sp: Devices that share each sequence, as `sequence` says. Each has a copy of the model.
        zero: The state that the copies shard, as in `zero`; all but experts over `dp * ep * sp` devices.
        zero_size: The devices that share the state, as `size` of `zero`: a multiple of `ep * sp` that divides
            `dp * ep * sp`; None is all of these. The others are copies, on a mesh axis of their own ("replica").
        gather: When `zero=1` and `zero=2` gather parameters. "after": behind the update, in their own type, and between
            steps they lie whole. "ahead": between steps they lie in parts, as master weights; in front of the first
            pass, and under it, what the passes read of them (their casts to 16 bits) is gathered once in a step, for
            all passes and micro-batches. Source: NVIDIA, Megatron-LM's distributed optimizer, with
            --overlap-param-gather. `zero=3` always gathers ahead, for each pass.
        sequence: As the kind of `sequence_parallel`: "ulysses", "ring" or "usp".
        sequence_parallel: Whether tensor groups shard positions between the matrices (norms, dropout, residuals), with
            reduce-scatters and all-gathers in place of all-reduces; with `collective_matmul` inside of products.
        schedule: As in `pipeline`; "1f1b" where there are stages.
        num_microbatches: The number of parts of the batch. None is one part, where there are no stages and chunks.
        chunks: As in `pipeline`.
        recompute: The operations that each layer repeats in its backward pass: "nothing", "matmuls" (all but matrix
            products and blockwise attention), "half matmuls" (all but these and each second product), "input" (all);
            with " every 2" behind it those of every second layer, and so on.
        offload: The arrays in the memory of the hosts (JAX's memory kind "pinned_host"): "nothing"; "optimizer", those
            that only the update reads (moments, master weights), which come to the devices for the update, a few at a
            time, and return; "activations", those that are saved for the backward pass (all that `recompute` keeps),
            which go there in the forward pass and come back shortly before they are read; "optimizer and activations".

    Sources: Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM", 2021.
    Raises: InvalidArgumentError.
    """
    _check_numbers("recipes.combine", dp=dp, tp=tp, ep=ep, sp=sp)
    check_number("recipes.combine(pp=...)", pp)
    check_sequence("recipes.combine(sequence=...)", sequence, SEQUENCES)
    check_zero_stage("recipes.combine(zero=...)", zero)
    check_gather("recipes.combine(gather=...)", gather, zero, GATHERS)
    data = [(data_axis(zero, gather), dp)]
    if zero_size is not None:
        data = hybrid_axes("recipes.combine(zero_size=...)", data_axis(zero, gather), zero, zero_size, dp, (ep, sp))
    tensor = tensor_axis(sequence_parallel, collective_matmul)
    recipe = bind_axes(data, tp=tp, sp=sp, ep=ep, zero=zero, gather=gather, sequence=sequence, tensor=tensor)
    stages = checked_stages("recipes.combine", pp, schedule, num_microbatches, chunks)
    return cut_into("recipes.combine", recipe, stages, recompute, offload)


# What may be kept in the memory of the hosts: by its text, whether that is the optimizer state, and saved activations.
_OFFLOADS = {
    "nothing": (False, False),
    "optimizer": (True, False),
    "activations": (False, True),
    "optimizer and activations": (True, True),
}


@named
def pipeline(
    stages: int, schedule: str = "1f1b", *, num_microbatches: int | None = None, chunks: int | None = None
) -> Recipe:
    """Pipeline stages of about equal arithmetic on equal groups of devices.

    `chunks` is the number of stages of each group (interleaved, zb-v and dualpipev schedules). Sources: Huang et al.,
    "GPipe", 2019; Narayanan et al., "PipeDream", 2019, and "Megatron-LM", 2021; Qi et al., "Zero bubble pipeline
    parallelism", 2024; DeepSeek-AI, "DeepSeek-V3", 2024 (dualpipev). Raises: InvalidArgumentError.
    """
    check_schedule("recipes.pipeline(schedule=...)", schedule)
    return Recipe(request=checked_stages("recipes.pipeline", stages, schedule, num_microbatches, chunks))


@named
def cut(
    recipe: Recipe,
    *,
    stages: int = 1,
    schedule: str | None = None,
    num_microbatches: int | None = None,
    chunks: int | None = None,
    recompute: str = "nothing",
    offload: str = "nothing",
) -> Recipe:
    """A recipe for one program, in stages, micro-batches and with recomputation; it holds in each stage.

    Args:
        recipe: One without stages, micro-batches or recomputation, for example
            `tensor_parallel("2d", size=4)`, `expert_parallel(2)`.
        stages: Pipeline stages, of equal groups of devices.
        schedule: As in `pipeline`; "1f1b" where there are stages.
        num_microbatches: The number of parts of the batch. None is one part, where there are no stages and chunks.
        chunks: As in `pipeline`.
        recompute: As in `combine`.
        offload: As in `combine`, beside what the recipe offloads.

    Raises: InvalidArgumentError.
    """
    hint = "call a function of autopar.recipes: cut(recipes.zero(1), ...)"
    expect_type("recipes.cut(recipe)", recipe, Recipe, "a recipe", hint)
    if recipe.request != PlanRequest(binding=recipe.request.binding):
        raise InvalidArgumentError(
            where="recipes.cut(recipe)",
            expected="a recipe for one program",
            got="one with stages, micro-batches, recomputation or pins of its own",
            hint="give all of them in one call; autopar.constrain(pins, recipe=...) pins what is cut",
        )
    stages_request = checked_stages("recipes.cut", stages, schedule, num_microbatches, chunks)
    return cut_into("recipes.cut", recipe, stages_request, recompute, offload)


def cut_into(where: str, recipe: Recipe, stages: PlanRequest, recompute: str, offload: str) -> Recipe:
    """A recipe for one program, in these stages. Raises: InvalidArgumentError."""
    if not is_policy(recompute):
        raise InvalidArgumentError(
            where=f"{where}(recompute=...)",
            expected=FORMS,
            got=repr(recompute),
            hint="leave it out to keep everything",
        )
    expect_one_of(f"{where}(offload=...)", offload, _OFFLOADS, "leave it out to keep everything on the devices")
    binding, (optimizer, activations) = recipe.request.binding, _OFFLOADS[offload]
    if optimizer or activations:
        assert binding is not None, "pipelines are not cut"
        optimizer = optimizer or binding.offloads_optimizer
        binding = dataclasses.replace(binding, offloads_optimizer=optimizer, offloads_activations=activations)
    # Only what is cut into micro-batches has the passes apart; one stage and one micro-batch will do.
    if stages.num_stages == 1 and recompute == "nothing" and not activations:
        stages = dataclasses.replace(stages, num_stages=None)
    return Recipe(request=dataclasses.replace(stages, binding=binding, recompute=recompute))


def checked_stages(
    where: str, stages: int, schedule: str | None, num_microbatches: int | None, chunks: int | None
) -> PlanRequest:
    """The request of stages and micro-batches alone. Raises: InvalidArgumentError."""
    check_number(f"{where}(stages=...)", stages)
    _check_numbers(where, num_microbatches=num_microbatches, chunks=chunks)
    if schedule is not None:
        check_schedule(f"{where}(schedule=...)", schedule)
    return PlanRequest(num_stages=stages, num_microbatches=num_microbatches, schedule=schedule, chunks=chunks)


def _check_numbers(where: str, **numbers: int | None) -> None:
    """Raises: InvalidArgumentError for one that is given and is no positive whole number."""
    for name, number in numbers.items():
        if number is not None:
            check_number(f"{where}({name}=...)", number)


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
    two in the forward pass and two in the backward pass of each layer, three in that of a layer that sorts its rows
    (`jax.lax.ragged_dot`). The remaining devices are data parallel.
    Sources: Lepikhin et al., "GShard", 2020, section 3; Rajbhandari et al., "DeepSpeed-MoE", 2022, section 5. Raises:
    InvalidArgumentError.
    """
    _check_numbers("recipes.expert_parallel", size=size)
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
      (`ops.attention.ring`). Needs no heads. Sources: Li et al., "Sequence Parallelism: Long Sequence Training from
      System Perspective", 2021; Liu et al., "Ring Attention with Blockwise Transformers", 2023.
    * "usp": as "ulysses" among as many neighbours as can share the heads of keys, and as "ring" among these groups.
      Source: Fang and Zhao, "USP: A Unified Sequence Parallelism Approach for Long Context Generative AI", 2024.

    "ulysses" over more devices than heads of keys is two mesh axes: queries are exchanged over both, keys and values
    over the first, and gathered over the second. `collective_matmul`, of "megatron": products run in pieces, which are
    gathered or scattered meanwhile (Wang et al., "Overlap Communication", 2023). Raises: InvalidArgumentError.
    """
    _check_numbers("recipes.sequence_parallel", size=size)
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
      (`autopar.ir.parallelisms`).

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
    _check_numbers("recipes.tensor_parallel", size=size, depth=depth)
    if kind == "1d":
        return bind_axes(data_beside(size), tp=size)
    return Recipe(request=PlanRequest(binding=cube(size=size) if kind == "3d" else square(size=size, depth=depth)))
