"""Manual plans: recipes in the vocabulary of the search, the ways that a bench compares, layouts of an author.

In: The kinds of parallelism and their sizes; pins of layouts; text from the command line.
Out: A `Recipe`, which holds the `PlanRequest` that the search is given.
May import: common to execute, in the order of tests/test_imports.py.
"""

from autopar.recipes.parallelism import (
    combine,
    cut,
    data_parallel,
    expert_parallel,
    pipeline,
    sequence_parallel,
    tensor_parallel,
    zero,
)
from autopar.recipes.recipe import Recipe

__all__ = [
    "Recipe",
    "combine",
    "cut",
    "data_parallel",
    "expert_parallel",
    "pipeline",
    "sequence_parallel",
    "tensor_parallel",
    "zero",
]
