"""Recipes of expert parallelism: sharded experts."""

from __future__ import annotations

from autopar.recipes.axes import bind_axes, data_beside
from autopar.recipes.checks import check_number
from autopar.recipes.names import named
from autopar.recipes.recipe import Recipe


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
