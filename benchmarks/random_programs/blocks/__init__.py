"""The blocks that random programs are made of: each adds statements to a draft, or raises `Unfit`."""

from __future__ import annotations

from benchmarks.random_programs.blocks import (
    along_dimensions,
    control,
    indexing,
    linear_algebra,
    orders,
    products,
    state,
    transforms,
)
from benchmarks.random_programs.blocks.registry import REGISTERED, Block

# Of which most mix the examples of the batch, or count on where they are in it.
MIXING = (
    "scattered", "updated_at", "reshaped", "einsum_of_values", "flips", "padded", "random_numbers", "whole_numbers",
    "scanned", "summed_in_a_loop", "looped", "chosen", "complex_numbers", "dynamic_slice",
)  # fmt: skip
# By name, in an order that stays, for a program is drawn by it.
_MODULES = (products, along_dimensions, indexing, orders, transforms, linear_algebra, control, state)
BLOCKS: dict[str, Block] = {
    function.__name__: function
    for module in _MODULES
    for function in REGISTERED
    if function.__module__ == module.__name__
}
