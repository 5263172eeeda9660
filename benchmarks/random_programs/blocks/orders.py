"""Sorts, the largest of a row, and whole numbers."""

from __future__ import annotations

from benchmarks.random_programs.blocks.registry import INTEGERS, REAL, block
from benchmarks.random_programs.drafting import Draft


@block
def ordered(d: Draft) -> None:
    x = d.pick(REAL, min_rank=1)
    axis = d.axis(x)
    k = 1 + d.below(min(x.shape[-1], 4))
    choices = [
        f"jnp.sort({x.name}, axis={axis})",
        f"lax.top_k({x.name}, {k})[0]",
        f"jnp.sort({x.name}, axis={axis}, descending=True)",
        f"lax.sort_key_val({x.name}, jnp.cos({x.name}), dimension={axis})[1]",
        f"jnp.take_along_axis({x.name}, jnp.argsort({x.name}, axis={axis}), axis={axis})",
        f"jnp.quantile({x.name}, 0.3, axis={axis})",
    ]
    d.emit_one(*choices)


@block
def best_numbers(d: Draft) -> None:
    """Whole numbers: the largest's, orders, comparisons."""
    x = d.pick(REAL, min_rank=1)
    axis = d.axis(x)
    k = 1 + d.below(min(x.shape[-1], 4))
    choices = [
        f"jnp.argmax({x.name}, axis={axis})",
        f"jnp.argmin({x.name}, axis={axis})",
        f"lax.top_k({x.name}, {k})[1]",
        f"jnp.argsort({x.name}, axis={axis})",
        f"({x.name} > 0.1).astype(jnp.int32)",
        f"jnp.sum({x.name} > 0, axis={axis})",
        f"jnp.searchsorted(jnp.linspace(-1, 1, 7), {x.name})",
        f"jnp.digitize({x.name}, jnp.array([-0.5, 0.0, 0.5]))",
    ]
    d.emit_one(*choices)


@block
def whole_numbers(d: Draft) -> None:
    t = d.pick(INTEGERS)
    choices = [
        f"{t.name} * 3 + 1",
        f"{t.name} // 2",
        f"{t.name} % 3",
        f"{t.name} << 2",
        f"{t.name} ^ 5",
        f"lax.population_count({t.name})",
        f"{t.name}.astype(jnp.uint8)",
        f"{t.name}.astype(jnp.float32) * 0.1",
        f"{t.name} == 1",
        f"jnp.cumsum({t.name}, axis=-1)",
        f"jnp.sort({t.name}, axis=-1)",
        f"jax.nn.one_hot({t.name}, 5)",
        f"jnp.bincount({t.name}.reshape(-1), length=6)",
        f"jnp.max({t.name})",
        f"jnp.sum({t.name}, axis=0)",
        f"jnp.sum({t.name}) // 3",
        f"lax.convert_element_type({t.name}, jnp.int32)",
        f"lax.clamp(1, {t.name}, 3)" if t.dtype == "int32" else f"jnp.clip({t.name}, 1, 3)",
    ]
    d.emit_one(*choices)


@block
def truths(d: Draft) -> None:
    x = d.pick(REAL)
    b = d.emit(f"{x.name} {d.one(('>', '<', '>='))} {d.one((0, 0.25, -0.5))}")
    choices = [f"~{b.name}", f"jnp.logical_xor({b.name}, {x.name} < 0.3)", f"jnp.where({b.name}, {x.name}, -0.5)"]
    if b.shape:
        axis = d.axis(b)
        choices += [
            f"jnp.any({b.name}, axis={axis})",
            f"jnp.all({b.name}, axis={axis})",
            f"jnp.count_nonzero({b.name}, axis={axis})",
            f"jnp.sum({b.name})",
            f"lax.cumsum({b.name}.astype(jnp.int32), axis={axis})",
            f"{b.name}.mean(axis={axis})",
            f"jnp.sum(jnp.where({b.name}, {x.name}, 0)) / jnp.maximum(jnp.sum({b.name}), 1)",
        ]
    d.emit_one(*choices)
