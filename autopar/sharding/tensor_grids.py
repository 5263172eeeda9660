"""Tensor parallelism on a square of devices (2D), on several squares (2.5D) and on a cube (3D): the uses of the axes.

Of a product Y = X W with X of (examples, features in), on q x q devices (`square`): the row splits examples, the column
features; of W the row splits what goes in and the column what comes out, so that each device holds a block of
everything. What the broadcasts of SUMMA would send, a product gathers at once, which is as much:

    Y  = X W        gathers X along the column and W along the row
    dX = dY W^T     gathers W again, and scatters its sums along the column
    dW = X^T dY     gathers X again, and scatters its sums along the row

On q x q x q devices (`cube`) every product has its examples over depth, what layers hand on over columns, and what is
inside of them (heads, inner widths, vocabularies) over rows. Where a value has only one of the two, examples are split
over the axis of the other as well. Of the operands and the result of a product each is so split along one axis more
than the product has it: forward X and W are gathered and Y is scattered, backward dY is gathered, dX and dW are
scattered. X and W are kept as gathered (q devices hold the same of them) unless memory is short.

Sources: Xu et al., "An efficient 2D method for training super-large deep learning models", 2021; Wang et al.,
"2.5-dimensional distributed model training", 2021; Bian et al., "Maximizing parallelism in distributed training for
huge neural networks", 2021.

What cannot be split so stays whole: models that tell no widths apart (`annotate_semantics`) have no use for a cube's
columns beyond examples, and experts and positions are not split.
"""

from __future__ import annotations

from autopar.errors import InvalidArgumentError
from autopar.ir.graph import Dimension, Purpose, Side
from autopar.sharding.binding import Binding
from autopar.sharding.constraints import AxisUse
from autopar.sharding.parallelisms import EXAMPLES, MATRICES

_WEIGHTS = (
    *MATRICES, Purpose.PARAMETER, Purpose.WEIGHT_COPY, Purpose.OPTIMIZER, Purpose.UPDATE, Purpose.GRADIENT,
    Purpose.ACCUMULATOR,
)  # fmt: skip
# What each device holds its block of; the rest follows from these.
_BLOCKS = (*EXAMPLES, *MATRICES, Purpose.PARAMETER, Purpose.OPTIMIZER, Purpose.ACCUMULATOR)

_SQUARE = (
    AxisUse(
        name="row",
        dimensions=(Dimension.EXAMPLE,),
        side=Side.INPUT,
        may_shard=_WEIGHTS,
        must_shard=_BLOCKS,
        must_read_sharded=EXAMPLES,
        minor=_WEIGHTS,
        may_slice=(Dimension.EXAMPLE,),
    ),
    AxisUse(
        name="column",
        dimensions=(Dimension.FEATURE,),
        unnamed=True,
        side=Side.OUTPUT,
        must_shard=_BLOCKS,
        must_read_sharded=MATRICES,
        may_slice=(Dimension.FEATURE,),
        may_slice_unnamed=True,
    ),
)
_CUBE = (
    AxisUse(
        name="depth",
        dimensions=(Dimension.EXAMPLE,),
        may_shard=_WEIGHTS,
        must_shard=_BLOCKS,
        must_read_sharded=EXAMPLES,
        minor=_WEIGHTS,
        may_slice=(Dimension.EXAMPLE,),
        keeps_copies=True,
    ),
    AxisUse(
        name="row",
        dimensions=(Dimension.EXAMPLE,),
        unnamed=True,
        must_shard=_BLOCKS,
        must_read_sharded=MATRICES,
        may_slice=(Dimension.EXAMPLE,),
        may_slice_unnamed=True,
        keeps_copies=True,
    ),
    AxisUse(
        name="column",
        dimensions=(Dimension.EXAMPLE, Dimension.FEATURE),
        must_shard=_BLOCKS,
        must_read_sharded=MATRICES,
        may_slice=(Dimension.EXAMPLE, Dimension.FEATURE),
        keeps_copies=True,
    ),
)


def square(*, size: int | None, depth: int | None = None) -> Binding:
    """Squares of devices, `depth` of them with a part of the examples each, which sum their gradients.

    `size` devices hold a model together, and copies of it are data parallel; None: all devices.
    Raises: InvalidArgumentError where the devices make no square.
    """
    deep = () if depth is None else (_replicas("depth"),)
    depths = () if depth is None else (depth,)
    q = None if size is None else _edge(size, 2, depth or 1)
    return Binding(axes=(_replicas("data"), *deep, *_SQUARE), sizes=(_copies(size), *depths, q, q))


def cube(*, size: int | None) -> Binding:
    """A cube of devices; `size` as of a square. Raises: InvalidArgumentError where the devices make no cube."""
    q = None if size is None else _edge(size, 3, 1)
    return Binding(axes=(_replicas("data"), *_CUBE), sizes=(_copies(size), q, q, q))


def _copies(size: int | None) -> int | None:
    """Of the model; None: as many as the devices make."""
    return 1 if size is None else None


def _replicas(name: str) -> AxisUse:
    """Devices with the same weights and other examples."""
    return AxisUse(
        name=name,
        dimensions=(Dimension.EXAMPLE,),
        must_shard=EXAMPLES,
        must_read_sharded=EXAMPLES,
        may_slice=(Dimension.EXAMPLE,),
    )


def _edge(size: int, power: int, depth: int) -> int:
    """How many devices are along each axis of `depth` squares or of a cube."""
    edge = round((size / depth) ** (1 / power))
    if depth * edge**power != size:
        several = f"{depth} times " if depth > 1 else ""
        raise InvalidArgumentError(
            where="recipes.tensor_parallel(size=...)",
            expected=f"{several}a {'square' if power == 2 else 'cube'}: {depth * 2**power}, {depth * 3**power}, ...",
            got=str(size),
            hint="what the groups leave of the devices is data parallel",
        )
    return edge
