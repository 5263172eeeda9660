"""Recipes of several kinds of parallelism together."""

from __future__ import annotations

from autopar.calls.search import check_number
from autopar.recipes.axes import SEQUENCES, bind_axes, hybrid_axes
from autopar.recipes.recipe import Recipe, check_gather, check_sequence, check_zero_stage, named
from autopar.recipes.stages import checked_stages, cut_into
from autopar.sharding.parallelisms import GATHERS, data_axis, tensor_axis


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
    for name, number in (("dp", dp), ("tp", tp), ("ep", ep), ("sp", sp)):
        if number is not None:
            check_number(f"recipes.combine({name}=...)", number)
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
