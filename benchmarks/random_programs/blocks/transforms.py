"""Convolutions, windows, Fourier transforms and complex numbers."""

from __future__ import annotations

from benchmarks.random_programs.blocks.registry import REAL, block, root
from benchmarks.random_programs.drafting import Draft


@block
def convolution(d: Draft) -> None:
    x = d.pick(REAL, rank=4) if d.chance(0.5) else d.data(d.size((5, 6, 8)), d.size((5, 6, 8)), d.size((2, 4, 6)))
    n, *_, c = x.shape
    groups = d.size([g for g in (1, 2, 3, 4, 6, 8) if c % g == 0]) if d.chance(0.5) else 1
    out = groups * d.size((1, 2, 3, 4))
    window = (d.size((1, 2, 3)), d.size((1, 2, 3)))
    strides, dilation = (d.size((1, 1, 2)), d.size((1, 1, 2))), (d.size((1, 1, 2)), d.size((1, 1, 2)))
    left = d.size((1, 1, 1, 2))
    batch_groups = 1
    if groups == 1 and d.chance(0.1):
        batch_groups = d.size([g for g in (2, 4) if n % g == 0] or [1])
        out *= batch_groups
    kernel = d.parameter(*window, c // groups, out)
    padding = d.one(('"SAME"', '"VALID"')) if left == 1 else "((1, 1), (0, 2))"
    extra = f", lhs_dilation=({left}, 1)" if left > 1 else ""
    extra += f", batch_group_count={batch_groups}" if batch_groups > 1 else ""
    d.emit(
        f"jnp.tanh(lax.conv_general_dilated({x.name}, {kernel}, {strides}, {padding}, rhs_dilation={dilation}, "
        f'feature_group_count={groups}, dimension_numbers=("NHWC", "HWIO", "NHWC"){extra}) * '
        f"{root(window[0] * window[1] * c // groups)})"
    )


@block
def convolution_1d(d: Draft) -> None:
    x = d.pick(REAL, rank=3) if d.chance(0.5) else d.data(d.size((6, 7, 8)), d.size((2, 3, 4)))
    width, n = d.size((1, 2, 3)), d.size((2, 3, 4, 8))
    kernel = d.parameter(width, x.shape[2], n)
    if d.chance(0.3):
        d.emit(
            f'lax.conv_transpose({x.name}, {kernel}, (2,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")) * '
            f"{root(width * x.shape[2])}"
        )
        return
    d.emit(
        f'lax.conv_general_dilated({x.name}, {kernel}, ({d.size((1, 2))},), "SAME", '
        f'dimension_numbers=("NWC", "WIO", "NWC")) * {root(width * x.shape[2])}'
    )


@block
def pooled(d: Draft) -> None:
    x = d.pick(REAL, min_rank=3)
    dims, strides = [1] * len(x.shape), [1] * len(x.shape)
    axis = 1 + d.below(len(x.shape) - 1)
    dims[axis], strides[axis] = d.size((2, 3)), d.size((1, 2))
    if d.chance(0.15):
        dims[0] = 2
    kind = d.one(("-jnp.inf, lax.max", "0.0, lax.add", "jnp.inf, lax.min"))
    d.emit(f'lax.reduce_window({x.name}, {kind}, {tuple(dims)}, {tuple(strides)}, "{d.one(("SAME", "VALID"))}")')


@block
def fourier(d: Draft) -> None:
    x = d.pick(("float32",), min_rank=1)
    n = x.shape[-1]
    f = d.emit(f"jnp.fft.rfft({x.name}, axis=-1) * {root(n)}")
    w = d.parameter(*f.shape[-1:], dtype="complex64", kind="complex")
    g = d.emit(f"{f.name} * {w}")
    if d.chance(0.5):
        d.emit(f"jnp.fft.irfft({g.name}, n={n}, axis=-1)")
    else:
        d.emit(f"jnp.{d.one(('real', 'imag'))}({g.name})")


@block
def complex_numbers(d: Draft) -> None:
    if d.chance(0.5):
        x = d.pick(("float32",), min_rank=1)
        z = d.emit(f"lax.complex({x.name}, 0.5 * jnp.cos({x.name}))")
    else:
        z = d.pick(("complex64", "complex128"))
    if z.shape and z.dtype == "complex64" and d.chance(0.6):
        n = d.size()
        w = d.parameter(z.shape[-1], n, dtype="complex64", kind="complex")
        z = d.emit(f"{z.name} @ {w} * {root(2 * z.shape[-1])}")
    axes = f"jnp.fft.fft({z.name}, axis=0)" if z.shape else z.name
    choices = (
        f"{z.name}.real + {z.name}.imag",
        f"({z.name} * {z.name}.conj()).real",
        f"jnp.exp(1j * {z.name}.real)",
        f"{axes} * 0.3",
        f"jnp.where({z.name}.real > 0, {z.name}, 0.5j)",
        f"jnp.sum({z.name}, axis=0) * 0.3" if z.shape else f"{z.name} * 1j",
    )
    d.emit_one(*choices)
