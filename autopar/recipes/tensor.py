"""Recipes of tensor parallelism: sharded matrices."""

from __future__ import annotations

from autopar.errors import InvalidArgumentError
from autopar.plan.options import PlanRequest
from autopar.recipes.axes import bind_axes, data_beside
from autopar.recipes.checks import check_number
from autopar.recipes.names import named
from autopar.recipes.recipe import Recipe
from autopar.sharding.tensor_grids import cube, square


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
    if kind not in ("1d", "2d", "2.5d", "3d"):
        raise InvalidArgumentError(
            where="recipes.tensor_parallel(kind)",
            expected="'1d', '2d', '2.5d' or '3d'",
            got=repr(kind),
            hint="leave it out for '1d', Megatron's; size=8 is the number of devices",
        )
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
