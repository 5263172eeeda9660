"""Products of 16-bit operands with wider results on CPUs, where XLA cannot run all: jax's private parts for it."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.interpreters import mlir


@functools.cache
def run_wide_products_on_cpus() -> None:
    """Has jax give XLA's CPU compiler products of 16-bit operands with wider results as products of wide operands.

    XLA ends such a product with "Unsupported element type for DotThunk::Execute: BF16 x BF16 = F32" where a transpose
    follows it, which it folds into the product after it has decided that operands may stay narrow (jaxlib 0.10.2).
    Elsewhere its CPU compiler widens them itself: the numbers are the same. Other platforms are left alone.
    """
    primitive = jax.lax.dot_general_p
    original = mlir._platform_specific_lowerings["cpu"][primitive].rule

    def rule(ctx: Any, lhs: Any, rhs: Any, **params: Any) -> Any:
        of_lhs, of_rhs = ctx.avals_in
        (result,) = ctx.avals_out
        operands = {jnp.dtype(of_lhs.dtype), jnp.dtype(of_rhs.dtype)}
        if operands <= {jnp.dtype("bfloat16"), jnp.dtype("float16")} and result.dtype in ("float32", "float64"):
            wide = [aval.update(dtype=result.dtype) for aval in (of_lhs, of_rhs)]
            lhs, rhs = (mlir.convert_hlo(ctx, x, a, w) for x, a, w in zip((lhs, rhs), ctx.avals_in, wide, strict=True))
            ctx = ctx.replace(avals_in=wide)
        return original(ctx, lhs, rhs, **params)

    mlir.register_lowering(primitive, rule, platform="cpu")
