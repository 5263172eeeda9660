"""Products of operands in blocks, each with a scale: `jax.lax.scaled_dot`, `jax.nn.scaled_matmul`, and
`jax.nn.scaled_dot_general`, which rounds its operands and calls the latter.

Batches, rows and columns may be split, and the blocks of the inner dimension: each device then makes a summand. Within
a block nothing is split. XLA's partitioner does not see the blocks; each device runs the same product on its part.

Formats that matrix units take: MXFP8 and MXFP4 (OCP Microscaling Formats, 2023: blocks of 32, scales of eight bits of
exponent), NVFP4 (NVIDIA: blocks of 16, scales of float8). For a B200 XLA calls cuDNN for `jax.nn.scaled_matmul`, and
makes a kernel by Triton of `jax.lax.scaled_dot` (jaxlib 0.10.2). What a device, or a format, has no units for is
multiplied in bfloat16, after its scales. On CPU jax has the latter alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from autopar.ir.graph import Factor, FactorKind, Rule
from autopar.ir.primitives import SCALED_DOT, SCALED_PRODUCTS, is_inexact, product_dimension_numbers

MXFP8, MXFP4, NVFP4 = "mxfp8", "mxfp4", "nvfp4"
# (type of operands, type of scales, numbers of a block) -> format.
_FORMATS = {
    ("float8_e4m3fn", "float8_e8m0fnu", 32): MXFP8,
    ("float8_e5m2", "float8_e8m0fnu", 32): MXFP8,
    ("float4_e2m1fn", "float8_e8m0fnu", 32): MXFP4,
    ("float4_e2m1fn", "float8_e4m3fn", 16): NVFP4,
}


def is_scaled_product(eqn: Any) -> bool:
    return eqn is not None and eqn.primitive.name in SCALED_PRODUCTS


def scaled_rule(eqn: Any) -> Rule:
    """A factor for each batch, for rows and for columns, and of each inner dimension one for blocks and one within."""
    shapes = [v.aval.shape for v in eqn.invars]
    (summed, batches) = product_dimension_numbers(eqn)
    sum_kind = FactorKind.SUM if is_inexact(eqn.outvars[0].aval.dtype) else FactorKind.FIXED
    factors: list[Factor] = []

    def new(size: int, kind: FactorKind) -> tuple[int, ...]:
        if size == 1:
            return ()
        factors.append(Factor(size, kind))
        return (len(factors) - 1,)

    dims: list[list[tuple[int, ...]]] = [[()] * len(shape) for shape in shapes]
    made = []
    for left, right in zip(*batches, strict=True):
        batch = new(shapes[0][left], FactorKind.PASS)
        for array, d in ((0, left), (1, right), (2, left), (3, right)):
            dims[array][d] = batch
        made.append(batch)
    for left, right in zip(*summed, strict=True):
        blocks = math.gcd(shapes[2][left], shapes[3][right])
        of_blocks = new(blocks, sum_kind)
        inside = new(shapes[0][left] // blocks, FactorKind.FIXED)
        for array, d in ((0, left), (1, right)):
            dims[array][d] = (*of_blocks, *inside)
        for array, d in ((2, left), (3, right)):
            dims[array][d] = (*of_blocks, *new(shapes[array][d] // blocks, FactorKind.FIXED))
    for side in (0, 1):
        for d in range(len(shapes[side])):
            if d not in summed[side] and d not in batches[side]:
                dims[side][d] = dims[2 + side][d] = new(shapes[side][d], FactorKind.PASS)
                made.append(dims[side][d])
    return Rule(tuple(factors), tuple(map(tuple, dims)), (tuple(made),))


def scaled_type(eqn: Any) -> str:
    """What a product runs as where matrix units take it, by the names of `DeviceKind.peak_flops`: a format of both
    operands, else bfloat16.
    """
    (summed, _) = product_dimension_numbers(eqn)
    left, right = (
        _FORMATS.get((of.aval.dtype.name, scale.aval.dtype.name, of.aval.shape[dims[-1]] // scale.aval.shape[dims[-1]]))
        for of, scale, dims in zip(eqn.invars[:2], eqn.invars[2:], summed, strict=True)
    )
    return left if left is not None and left == right else "bfloat16"


def run_scaled(eqn: Any, parts: Sequence[Any]) -> Sequence[Any]:
    """The product on one device's part: below the partitioner of its own that jax puts around cuDNN's call."""
    if eqn.primitive.name == SCALED_DOT:
        return [eqn.primitive.bind(*parts, **eqn.params)]
    made: Sequence[Any] = eqn.primitive.impl(*parts, **eqn.params)
    return made
