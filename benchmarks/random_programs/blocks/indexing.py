"""Gathers, scatters, and slices at indices."""

from __future__ import annotations

from benchmarks.random_programs.blocks.registry import REAL, block
from benchmarks.random_programs.drafting import Draft


@block
def embedded(d: Draft) -> None:
    rows, n = d.size(), d.size()
    shape = (d.size((2, 3, 4, 5)),) if d.chance(0.5) else ()
    t = d.integers(rows, shape)
    table = d.parameter(rows, n)
    mode = d.one(("", ', mode="clip"', ', mode="wrap"', ', mode="fill", fill_value=0.0'))
    d.emit(f"{table}[{t.name}]" if d.chance(0.4) else f"jnp.take({table}, {t.name}, axis=0{mode})")


@block
def taken(d: Draft) -> None:
    """Of a value along one dimension, by indices that are fixed, of the batch or of the state."""
    x = d.pick(REAL, min_rank=1)
    axis = d.axis(x)
    n = x.shape[axis]
    if d.chance(0.5):
        indices = f"jnp.array({[d.below(n) for _ in range(d.size((1, 2, 3, 5)))]})"
    else:
        indices = d.integers(n).name
    mode = d.one(("clip", "wrap", "fill"))
    bigger = " + 1" if mode == "clip" and d.chance(0.5) else ""
    fill = ", fill_value=0.5" if mode == "fill" else ""
    d.emit(f'jnp.take({x.name}, {indices}{bigger}, axis={axis}, mode="{mode}"{fill})')


@block
def taken_along(d: Draft) -> None:
    x = d.pick(REAL, min_rank=2, where=lambda s: s.shape[0] == d.examples)
    t = d.integers(x.shape[-1])
    index = "[:, " + ", ".join(["None"] * (len(x.shape) - 1)) + "]"
    y = d.emit(f"jnp.take_along_axis({x.name}, {t.name}{index}, axis=-1)")
    if d.chance(0.5):
        d.emit(f"{y.name}[..., 0]")


@block
def indexed_by_rows(d: Draft) -> None:
    x = d.pick(REAL, min_rank=2, where=lambda s: s.shape[0] == d.examples)
    t = d.integers(x.shape[1])
    d.emit(f"{x.name}[jnp.arange({x.name}.shape[0]), {t.name}]")


@block
def updated_at(d: Draft) -> None:
    """`.at[]` of a value: a fixed place, places of the batch, slices."""
    x = d.pick(REAL, min_rank=1)
    n = x.shape[0]
    kind = d.one(("set", "add", "multiply", "max", "min"))
    mode = d.one(("", ', mode="drop"', ', mode="clip"', ", unique_indices=False"))
    choices = [
        f"{x.name}.at[{d.below(n)}].{kind}(0.5{mode})",
        f"{x.name}.at[-1].{kind}(0.25)",
        f"{x.name}.at[..., 0].{kind}(0.5{mode})",
        f"{x.name}.at[{n // 3}:{n - n // 4}].{kind}(0.75)",
        f"{x.name}.at[..., ::2].{kind}(2.0)",
        f"{x.name}.at[jnp.array({[d.below(n) for _ in range(3)]})].{kind}(0.5{mode})",
    ]
    if d.chance(0.5):
        t = d.integers(n)
        choices = [f"{x.name}.at[{t.name}].{kind}(0.5{mode})"]
    d.emit_one(*choices)


@block
def scattered(d: Draft) -> None:
    """Rows of a value into fewer or more rows, by numbers of the batch."""
    x = d.pick(REAL, min_rank=1, where=lambda s: s.shape[0] == d.examples)
    groups = d.size()
    t = d.integers(groups)
    choices = [
        f"jax.ops.segment_sum({x.name}, {t.name}, num_segments={groups})",
        f"jnp.nan_to_num(jax.ops.segment_max({x.name}, {t.name}, num_segments={groups}), neginf=-1.0)",
        f"jnp.zeros({(groups, *x.shape[1:])}).at[{t.name}].add({x.name})",
        f"jnp.ones({(groups, *x.shape[1:])}).at[{t.name}].multiply(1 + 0.1 * {x.name})",
        f"jnp.zeros({(groups, *x.shape[1:])}).at[{t.name}].max({x.name})",
        f"jnp.zeros({(groups, *x.shape[1:])}).at[{t.name}].min({x.name})",
        f'jnp.zeros({(groups, *x.shape[1:])}).at[{t.name} + 1].add({x.name}, mode="drop")',
        f"{d.parameter(groups, *x.shape[1:])}.at[{t.name}].add(0.1 * {x.name})",
    ]
    y = d.emit_one(*choices)
    if d.chance(0.4):
        d.emit(f"{y.name}[{t.name}]")


@block
def dynamic_slice(d: Draft) -> None:
    x = d.pick(REAL, min_rank=1, where=lambda s: max(s.shape) > 2)
    axis = d.axis(x)
    n = x.shape[axis]
    length = 1 + d.below(n)
    start = d.one((f"jnp.argmax({x.name}.reshape(-1)) % {n}", str(d.below(n)), f"{d.counter()} % {n}"))
    if d.chance(0.5):
        d.emit(f"lax.dynamic_slice_in_dim({x.name}, {start}, {length}, axis={axis})")
    else:
        d.emit(
            f"lax.dynamic_update_slice_in_dim({x.name}, 0.5 * lax.slice_in_dim({x.name}, 0, {length}, axis={axis}), "
            f"{start}, axis={axis})"
        )


@block
def dynamic_index(d: Draft) -> None:
    x = d.pick(REAL, min_rank=1)
    axis = d.axis(x)
    d.emit(f"lax.dynamic_index_in_dim({x.name}, {d.counter()} % {x.shape[axis]}, axis={axis}, keepdims=False)")
