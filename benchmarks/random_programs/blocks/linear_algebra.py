"""Linear algebra."""

from __future__ import annotations

from benchmarks.random_programs.blocks.registry import block
from benchmarks.random_programs.drafting import Draft


@block
def positive_definite(d: Draft) -> None:
    x = d.pick(("float32",), min_rank=2, where=lambda s: max(s.shape[-2:]) <= 9)
    n = x.shape[-1]
    squares = f'jnp.einsum("...ij,...ik->...jk", {x.name}, {x.name}) * {1 / x.shape[-2]:.3f}'
    a = d.emit(f"{squares} + 2 * jnp.eye({n}, dtype=jnp.float32)")
    choices = [
        f"jnp.linalg.cholesky({a.name})",
        f"jnp.linalg.inv({a.name})",
        f"jnp.linalg.slogdet({a.name})[1]",
        f"jnp.linalg.solve({a.name}, {x.name}.mT)",
        f"jax.scipy.linalg.cho_solve((jnp.linalg.cholesky({a.name}), True), {x.name}.mT)",
        f"lax.linalg.triangular_solve({a.name}, {x.name}, left_side=False, lower=True)",
        f"jnp.linalg.matrix_power({a.name} * 0.3, 3)",
        f"jnp.trace({a.name}, axis1=-2, axis2=-1)",
        f"jnp.linalg.eigvalsh({a.name})",
        f"jnp.tril({a.name})",
    ]
    d.emit_one(*choices)


@block
def orthogonal(d: Draft) -> None:
    n = d.size((2, 3, 4, 5))
    w = d.parameter(n, n)
    x = d.pick(("float32",), min_rank=1, where=lambda s: s.shape[-1] == n)
    d.emit(f"{x.name} @ jnp.linalg.qr({w} + 3 * jnp.eye({n}, dtype=jnp.float32))[0]")
