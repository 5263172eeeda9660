"""The mesh axes of the known parallelisms, in the terms of `autopar.ir.constraints`.

`autopar.recipes` names the sources.

Tensor parallelism on a square of devices is 2D, on several squares 2.5D, on a cube 3D. Of a product Y = X W with X of
(examples, features in), on q x q devices (`square`): the row splits examples, the column features; of W the row splits
what goes in and the column what comes out, so that each device holds a block of everything. What the broadcasts of
SUMMA would send, a product gathers at once, which is as much:

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

import dataclasses

from autopar.errors import InvalidArgumentError
from autopar.ir.binding import Binding
from autopar.ir.constraints import AxisUse
from autopar.ir.graph import Dimension, Purpose, Side

EXAMPLES = (Purpose.BATCH, Purpose.ACTIVATION)
MATRICES = (Purpose.MATRIX, Purpose.MATRIX_COPY)
# What ZeRO lets the copies of a model share out, stage by stage; what the update computes goes with its state.
_ZERO_MAY_SHARD: tuple[tuple[Purpose, ...], ...] = (
    (),
    (Purpose.OPTIMIZER, Purpose.UPDATE, Purpose.GRADIENT, Purpose.ACCUMULATOR),
    (Purpose.OPTIMIZER, Purpose.UPDATE, Purpose.GRADIENT, Purpose.ACCUMULATOR),
    (
        Purpose.OPTIMIZER, Purpose.UPDATE, Purpose.GRADIENT, Purpose.ACCUMULATOR, Purpose.MATRIX, Purpose.PARAMETER,
        Purpose.MATRIX_COPY, Purpose.WEIGHT_COPY,
    ),
)  # fmt: skip
_ZERO_MUST_SHARD: tuple[tuple[Purpose, ...], ...] = (
    (),
    (Purpose.OPTIMIZER,),
    (Purpose.OPTIMIZER, Purpose.ACCUMULATOR),
    # Copies of matrices too (casts): they are gathered for the layer that reads them in each pass, and not kept whole.
    (Purpose.OPTIMIZER, Purpose.ACCUMULATOR, Purpose.MATRIX, Purpose.PARAMETER, Purpose.MATRIX_COPY),
)
# When stages 1 and 2 gather parameters: after the update, or ahead of the first pass that reads them.
GATHERS = ("after", "ahead")


def _shared_state(zero: int, gather: str) -> tuple[tuple[Purpose, ...], tuple[Purpose, ...], bool]:
    """What copies of a model may shard of its state, what they must, and whether what is gathered may be kept whole.

    Gathered ahead, parameters are master weights: between steps they lie as the optimizer's state does, and a step
    gathers what its passes read of them, such as casts, once.
    """
    if gather == "after" or zero not in (1, 2):
        return _ZERO_MAY_SHARD[zero], _ZERO_MUST_SHARD[zero], False
    return _ZERO_MAY_SHARD[3], (*_ZERO_MUST_SHARD[zero], Purpose.MATRIX, Purpose.PARAMETER), True


def data_axis(zero: int = 0, gather: str = "after") -> AxisUse:
    """Copies of the model, which share out what that stage of ZeRO says."""
    may_shard, must_shard, keeps_copies = _shared_state(zero, gather)
    return AxisUse(
        name="data",
        dimensions=(Dimension.EXAMPLE,),
        may_shard=may_shard,
        must_shard=(*EXAMPLES, *must_shard),
        must_read_sharded=EXAMPLES,
        may_slice=(Dimension.EXAMPLE,),
        keeps_copies=keeps_copies,
    )


def replica_axis(name: str = "replica") -> AxisUse:
    """Groups of devices that each have all of the state, and other examples: copies, like plain data parallelism."""
    return dataclasses.replace(data_axis(), name=name)


def sequence_axis(kind: str, zero: int = 0, gather: str = "after") -> AxisUse:
    """Positions in parts; inside of attention heads ("ulysses"), or positions there too ("ring"), or both, heads as far
    as they go ("usp").
    """
    may_shard, must_shard, keeps_copies = _shared_state(zero, gather)
    return AxisUse(
        name="sequence",
        dimensions=(Dimension.SEQUENCE,),
        may_shard=may_shard,
        must_shard=(*EXAMPLES, *must_shard),
        must_read_sharded=EXAMPLES,
        may_slice=(Dimension.SEQUENCE,),
        keeps_copies=keeps_copies,
        exchanges=(Dimension.HEAD,) if kind != "ring" else (),
        ring_attention=kind != "ulysses",
    )


def tensor_axis(sequence_parallel: bool = False, collective_matmul: bool = False) -> AxisUse:
    """Matrices by columns, then by rows; with positions in parts between them where that is said, which products then
    gather and scatter while they run, where that is said too.

    Raises: InvalidArgumentError for products in pieces without positions in parts.
    """
    if collective_matmul and not sequence_parallel:
        raise InvalidArgumentError(
            where="recipe, collective_matmul=True",
            expected="positions in parts between the matrices, which products gather and scatter "
            "(sequence_parallel=True, or the kind 'megatron')",
            got="tensor parallelism with all-reduces, or positions in parts everywhere",
            hint="add sequence_parallel=True, or leave collective_matmul out",
        )
    positions = (Dimension.SEQUENCE,) if sequence_parallel else ()
    return AxisUse(
        name="model",
        dimensions=positions,
        unnamed=True,
        must_shard=(*MATRICES, Purpose.ACTIVATION) if sequence_parallel else MATRICES,
        must_read_sharded=MATRICES,
        may_slice=positions,
        collective_matmul=collective_matmul,
    )


def expert_axis(zero: int = 0, gather: str = "after") -> AxisUse:
    """Experts in parts, and the examples of everything else."""
    may_shard, must_shard, keeps_copies = _shared_state(zero, gather)
    return AxisUse(
        name="expert",
        dimensions=(Dimension.EXAMPLE, Dimension.EXPERT),
        may_shard=may_shard,
        must_shard=(*EXAMPLES, *MATRICES, *must_shard),
        keeps_copies=keeps_copies,
        must_read_sharded=(*EXAMPLES, *MATRICES),
        may_slice=(Dimension.EXAMPLE, Dimension.EXPERT),
        owned_dimensions=(Dimension.EXPERT,),
        may_be_partial_sum=False,
    )


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
    deep = () if depth is None else (replica_axis("depth"),)
    depths = () if depth is None else (depth,)
    q = None if size is None else _edge(size, 2, depth or 1)
    return Binding(axes=(data_axis(), *deep, *_SQUARE), sizes=(_copies(size), *depths, q, q))


def cube(*, size: int | None) -> Binding:
    """A cube of devices; `size` as of a square. Raises: InvalidArgumentError where the devices make no cube."""
    q = None if size is None else _edge(size, 3, 1)
    return Binding(axes=(data_axis(), *_CUBE), sizes=(_copies(size), q, q, q))


def _copies(size: int | None) -> int | None:
    """Of the model; None: as many as the devices make."""
    return 1 if size is None else None


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
