"""The mesh axes of the known parallelisms, in the terms of `autopar.sharding.constraints`.

`autopar.recipes` names the sources.
"""

from __future__ import annotations

from autopar.ir.graph import Dimension, Purpose
from autopar.sharding.constraints import AxisUse

EXAMPLES = (Purpose.BATCH, Purpose.ACTIVATION)
MATRICES = (Purpose.MATRIX, Purpose.MATRIX_COPY)
# What ZeRO lets the copies of a model share out, stage by stage; what the update computes goes with its state.
_ZERO_SPREADS: tuple[tuple[Purpose, ...], ...] = (
    (),
    (Purpose.OPTIMIZER, Purpose.UPDATE, Purpose.GRADIENT, Purpose.ACCUMULATOR),
    (Purpose.OPTIMIZER, Purpose.UPDATE, Purpose.GRADIENT, Purpose.ACCUMULATOR),
    (
        Purpose.OPTIMIZER, Purpose.UPDATE, Purpose.GRADIENT, Purpose.ACCUMULATOR, Purpose.MATRIX, Purpose.PARAMETER,
        Purpose.MATRIX_COPY, Purpose.WEIGHT_COPY,
    ),
)  # fmt: skip
_ZERO_MUSTS: tuple[tuple[Purpose, ...], ...] = (
    (),
    (Purpose.OPTIMIZER,),
    (Purpose.OPTIMIZER, Purpose.ACCUMULATOR),
    (Purpose.OPTIMIZER, Purpose.ACCUMULATOR, Purpose.MATRIX, Purpose.PARAMETER),
)


def data_axis(zero: int = 0) -> AxisUse:
    """Copies of the model, which share out what that stage of ZeRO says."""
    return AxisUse(
        name="data",
        dimensions=(Dimension.EXAMPLE,),
        spread=_ZERO_SPREADS[zero],
        must=(*EXAMPLES, *_ZERO_MUSTS[zero]),
        reads=EXAMPLES,
        keeps=(Dimension.EXAMPLE,),
    )


def sequence_axis(kind: str, zero: int = 0) -> AxisUse:
    """Positions in parts; inside of attention heads ("ulysses"), or positions there too ("ring")."""
    return AxisUse(
        name="sequence",
        dimensions=(Dimension.SEQUENCE,),
        spread=_ZERO_SPREADS[zero],
        must=(*EXAMPLES, *_ZERO_MUSTS[zero]),
        reads=EXAMPLES,
        keeps=(Dimension.SEQUENCE,),
        exchanges=(Dimension.HEAD,) if kind == "ulysses" else (),
        rings=kind == "ring",
    )


def tensor_axis(*, sequence_parallel: bool = False) -> AxisUse:
    """Matrices by columns, then by rows; with positions in parts between them where that is said."""
    positions = (Dimension.SEQUENCE,) if sequence_parallel else ()
    return AxisUse(
        name="tensor",
        dimensions=positions,
        unnamed=True,
        must=(*MATRICES, Purpose.ACTIVATION) if sequence_parallel else MATRICES,
        reads=MATRICES,
        keeps=positions,
    )


def expert_axis(zero: int = 0) -> AxisUse:
    """Experts in parts, and the examples of everything else."""
    return AxisUse(
        name="expert",
        dimensions=(Dimension.EXAMPLE, Dimension.EXPERT),
        spread=_ZERO_SPREADS[zero],
        must=(*EXAMPLES, *MATRICES, *_ZERO_MUSTS[zero]),
        reads=(*EXAMPLES, *MATRICES),
        keeps=(Dimension.EXAMPLE, Dimension.EXPERT),
        own=(Dimension.EXPERT,),
        adds=False,
    )
