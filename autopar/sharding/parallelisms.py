"""The mesh axes of the known parallelisms, in the terms of `autopar.sharding.constraints`.

`autopar.recipes` names the sources.
"""

from __future__ import annotations

import dataclasses

from autopar.errors import InvalidArgumentError
from autopar.ir.graph import Dimension, Purpose
from autopar.sharding.constraints import AxisUse

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


def replica_axis() -> AxisUse:
    """Groups of a data axis that each have all of the state (hybrid sharding): copies, like plain data parallelism."""
    return dataclasses.replace(data_axis(), name="replica")


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
        name="tensor",
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
