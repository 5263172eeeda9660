"""The rate at which a matrix product runs: by the type of its operands, and by the precision that it asks for.

What a product adds up in, or returns (`preferred_element_type`), does not slow it: bfloat16 operands with float32
results run at bfloat16's rate, int8 ones with int32 results at int8's.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import numpy as np

from autopar.hardware.kinds import FULL_FLOAT32, Platform
from autopar.ir.graph import OpGraph
from autopar.ir.primitives import MATRIX_PRODUCTS

# Passes in bfloat16 that XLA's TPU compiler makes of a float32 product at each `jax.lax.Precision` (bfloat16_3x and
# bfloat16_6x among the names that jax has for them).
_TPU_PASSES = {jax.lax.Precision.DEFAULT: 1, jax.lax.Precision.HIGH: 3, jax.lax.Precision.HIGHEST: 6}
# First word of a `jax.lax.DotAlgorithmPreset` -> the type that operands are rounded to. Products of TF32 are what
# `DeviceKind` calls float32, as jax allows them for float32 operands.
_ALGORITHMS = {
    "ANY": "float8", "BF16": "bfloat16", "F16": "float16", "TF32": "float32", "F32": FULL_FLOAT32, "F64": "float64",
}  # fmt: skip

_REAL_PARTS = {"complex64": "float32", "complex128": "float64"}
_REAL_PRODUCTS = 4


@dataclasses.dataclass(frozen=True, slots=True)
class ProductRate:
    """A product runs as `passes` products of `dtype`, one of those that `DeviceKind.peak_flops` may list."""

    dtype: str
    passes: int = 1


def product_rate(eqn: Any, platform: Platform) -> ProductRate:
    """Of a product or convolution, whose operands are its first two."""
    operand = _operand_type(*(v.aval.dtype for v in eqn.invars[:2]))
    if operand in _REAL_PARTS:  # four products of real and imaginary parts
        real = product_rate_of(_REAL_PARTS[operand], eqn.params["precision"], platform)
        return ProductRate(real.dtype, _REAL_PRODUCTS * real.passes)
    return product_rate_of(operand, eqn.params["precision"], platform)


def product_rate_of(operand: str, precision: Any, platform: Platform) -> ProductRate:
    """Of a product of operands of one type at a precision."""
    levels = precision if isinstance(precision, tuple) else (precision,)
    if all(level is None or isinstance(level, jax.lax.Precision) for level in levels):
        return _at_precision(operand, [level for level in levels if level is not None], platform)
    return _of_algorithm(operand, precision, platform)


def _operand_type(left: np.dtype, right: np.dtype) -> str:
    """The name under which devices list products of these operands; of two types the wider."""
    names = {"float8" if t.name.startswith("float8") else t.name.replace("uint", "int") for t in (left, right)}
    if len(names) == 1:
        return names.pop()
    return max((left, right), key=lambda t: t.itemsize).name if left.itemsize != right.itemsize else "float32"


def _at_precision(operand: str, levels: list[jax.lax.Precision], platform: Platform) -> ProductRate:
    """Levels concern float32 only. GPUs round to TF32 for all but the highest (google/jax 18934), CPUs never do."""
    highest = max(levels, key=lambda level: _TPU_PASSES[level], default=jax.lax.Precision.DEFAULT)
    if operand != "float32":
        return ProductRate(operand)
    match platform:
        case Platform.TPU:
            return ProductRate(operand, _TPU_PASSES[highest])
        case Platform.GPU:
            return ProductRate(FULL_FLOAT32 if highest is jax.lax.Precision.HIGHEST else operand)
        case Platform.CPU:
            return ProductRate(operand)


def _of_algorithm(operand: str, algorithm: Any, platform: Platform) -> ProductRate:
    if isinstance(algorithm, jax.lax.DotAlgorithm):
        rounded = np.dtype(algorithm.lhs_precision_type), np.dtype(algorithm.rhs_precision_type)
        dtype, passes = _operand_type(*rounded), algorithm.num_primitive_operations
        dtype = FULL_FLOAT32 if dtype == "float32" else dtype
    elif algorithm is jax.lax.DotAlgorithmPreset.DEFAULT:
        return _at_precision(operand, [], platform)
    else:
        found = re.fullmatch(r"([A-Z]+\d*)_.*?(?:_X(\d+))?", algorithm.name)
        assert found is not None, f"an algorithm named otherwise than its types: {algorithm.name}"
        dtype, passes = _ALGORITHMS[found[1]], int(found[2] or 1)
    if dtype == FULL_FLOAT32 and platform is Platform.TPU:
        return ProductRate("float32", _TPU_PASSES[jax.lax.Precision.HIGHEST])
    return ProductRate(dtype, passes)


def main_dtype(graph: OpGraph) -> str:
    """The type of the operands of the largest matrix product, by which peak arithmetic is counted."""
    products = [op for op in graph.ops() if op.primitive in MATRIX_PRODUCTS]
    if not products:
        return "float32"
    largest = max(products, key=lambda op: max(v.aval.size for v in (*op.eqn.invars, *op.eqn.outvars)))
    return str(largest.eqn.invars[0].aval.dtype)
