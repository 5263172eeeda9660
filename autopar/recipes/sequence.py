"""Recipes of sequence parallelism: sharded positions."""

from __future__ import annotations

from autopar.recipes.axes import SEQUENCES, bind_axes, data_beside
from autopar.recipes.checks import check_number, check_sequence
from autopar.recipes.names import named
from autopar.recipes.recipe import Recipe
from autopar.sharding.parallelisms import tensor_axis


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
