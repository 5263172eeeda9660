"""The blocks that random programs are made of: each adds statements to a draft, or raises `Unfit`."""

from __future__ import annotations

import math
from collections.abc import Callable

from benchmarks.random_programs.drafting import FLOATS, Draft, Statement, Unfit

Block = Callable[[Draft], object]
BLOCKS: dict[str, Block] = {}
REAL = ("float32", "float64")
# Of which most mix the examples of the batch, or count on where they are in it.
MIXING = (
    "scattered", "updated_at", "reshaped", "einsum_of_values", "flips", "padded", "random_numbers", "whole_numbers",
    "scanned", "looped", "chosen", "complex_numbers", "dynamic_slice",
)  # fmt: skip
INTEGERS = ("int32", "int64", "uint8", "uint32")


def block(function: Block) -> Block:
    BLOCKS[function.__name__] = function
    return function


def root(n: int) -> str:
    return f"{n**-0.5:.3f}"


# Products


@block
def dense(d: Draft) -> None:
    x = d.pick(REAL, min_rank=1)
    k, n = x.shape[-1], d.size()
    y = f"{x.name} @ {d.parameter(k, n)} * {root(k)}"
    if d.chance(0.5):
        y = f"{y} + {d.parameter(n)}"
    d.emit(f"{d.one(('jnp.tanh', 'jax.nn.relu', 'jax.nn.gelu', 'jnp.sin', ''))}({y})")


@block
def einsum(d: Draft) -> None:
    """Products of odd shapes: contracted, kept, batch and summed letters of one value and a parameter."""
    x = d.pick(REAL, min_rank=1)
    letters = "abcde"[: len(x.shape)]
    sizes = dict(zip(letters, x.shape, strict=True))
    # Seldom the examples: a parameter of their number is nothing that a batch can be cut for.
    shared = [c for c in letters if d.chance(0.5) and (sizes[c] != d.examples or d.chance(0.1))][:3]
    new = "fg"[: d.below(3)]
    sizes |= {c: d.size() for c in new}
    order = [*shared, *new]
    d.random.shuffle(order)
    if not order:
        raise Unfit
    out = [c for c in [*letters, *new] if c in new or c not in shared or d.chance(0.3)]
    if d.chance(0.3):
        d.random.shuffle(out)
    summed = math.prod(sizes[c] for c in sizes if c not in out)
    w = d.parameter(*(sizes[c] for c in order))
    d.emit(f'jnp.tanh(jnp.einsum("{letters},{"".join(order)}->{"".join(out)}", {x.name}, {w}) * {root(summed)})')


@block
def einsum_of_values(d: Draft) -> None:
    x, y = d.pick(REAL, min_rank=1), d.pick(REAL, min_rank=1)
    a, b, sizes = "", "", {}
    for n in x.shape:
        a += "abcde"[len(a)]
        sizes[a[-1]] = n
    for n in y.shape:
        same = [c for c in a if sizes[c] == n and c not in b]
        b += str(d.one(same)) if same and d.chance(0.8) else "ghijk"[len(b)]
        sizes[b[-1]] = n
    out = [c for c in dict.fromkeys(a + b) if (c in a) != (c in b) or d.chance(0.4)]
    while math.prod(sizes[c] for c in out) > 1024:
        out.remove(max(out, key=sizes.__getitem__))
    summed = math.prod(sizes[c] for c in sizes if c not in out)
    d.emit(f'jnp.tanh(jnp.einsum("{a},{b}->{"".join(out)}", {x.name}, {y.name}) * {root(summed)})')


@block
def attention(d: Draft) -> None:
    x = d.pick(REAL, rank=3)
    k, h, e = x.shape[-1], d.size((1, 2, 3, 4)), d.size((2, 4, 5))
    q, key, v = (
        d.emit(f'jnp.einsum("bld,dhe->blhe", {x.name}, {d.parameter(k, h, e)}) * {root(k)}').name for _ in range(3)
    )
    scores = d.emit(f'jnp.einsum("blhe,bmhe->bhlm", {q}, {key}) * {root(e)}').name
    if d.chance(0.5):
        length = x.shape[1]
        scores = d.emit(f"jnp.where(jnp.tril(jnp.ones(({length}, {length}), bool)), {scores}, -1e9)").name
    weights = d.emit(f"jax.nn.softmax({scores}, axis=-1)").name
    mixed = d.emit(f'jnp.einsum("bhlm,bmhe->blhe", {weights}, {v})')
    out = d.parameter(h, e, k)
    d.emit(f'{x.name} + jnp.einsum("blhe,hed->bld", {mixed.name}, {out}) * {root(h * e)}')


@block
def low_precision(d: Draft) -> None:
    x = d.pick(REAL, min_rank=1)
    k, n = x.shape[-1], d.size()
    w = d.parameter(k, n, dtype="bfloat16" if d.chance(0.5) else "float32")
    y = d.emit(f"jnp.tanh({x.name}.astype(jnp.bfloat16) @ {w}.astype(jnp.bfloat16) * {root(k)})")
    if d.chance(0.7):
        d.emit(f"{y.name}.astype(jnp.float32)")


@block
def dot_general(d: Draft) -> None:
    x = d.pick(REAL, rank=2)
    w = d.parameter(d.size(), x.shape[1])
    numbers = "(((1,), (1,)), ((), ()))"
    d.emit(f"lax.dot_general({x.name}, {w}, {numbers}, preferred_element_type=jnp.float32) * {root(x.shape[1])}")


@block
def experts(d: Draft) -> None:
    x = d.pick(REAL, rank=2)
    k, e, n = x.shape[1], d.size((2, 3, 4, 8)), d.size()
    gates = d.emit(f"jax.nn.softmax({x.name} @ {d.parameter(k, e)} * {root(k)})")
    best = d.emit(f"jax.nn.one_hot(jnp.argmax({gates.name}, -1), {e}, dtype={x.name}.dtype) * {gates.name}")
    y = d.emit(f'jnp.tanh(jnp.einsum("bk,ekn->ben", {x.name}, {d.parameter(e, k, n)}) * {root(k)})')
    d.emit(f'jnp.einsum("ben,be->bn", {y.name}, {best.name})')


@block
def ragged(d: Draft) -> None:
    x = d.pick(REAL, rank=2)
    rows, k = x.shape
    groups, n = d.size((2, 3, 4)), d.size()
    sizes = [rows // groups] * (groups - 1)
    sizes.append(rows - sum(sizes))
    w = d.parameter(groups, k, n)
    d.emit(f"lax.ragged_dot({x.name}, {w}, jnp.array({sizes}, jnp.int32)) * {root(k)}")


# Element by element, and along dimensions


@block
def elementwise(d: Draft) -> None:
    x = d.pick(FLOATS)
    d.emit(
        str(
            d.one(
                (
                    f"jnp.tanh({x.name}) * 1.5",
                    f"jax.nn.sigmoid({x.name}) - 0.5",
                    f"jnp.where({x.name} > 0.1, {x.name}, 0.2 * {x.name})",
                    f"jnp.clip({x.name}, -1, 1)",
                    f"jnp.exp(-({x.name} ** 2))",
                    f"lax.rsqrt({x.name} * {x.name} + 1)",
                    f"jnp.logaddexp({x.name}, 0.0)",
                    f"jnp.sign({x.name}) * {x.name}",
                    f"jnp.minimum({x.name}, 0.5) + jnp.maximum({x.name}, -0.5)",
                    f"lax.erf({x.name})",
                    f"jnp.arctan2({x.name}, 2.0)",
                    f"jnp.nan_to_num({x.name} / (jnp.abs({x.name}) + 0.5))",
                    f"lax.stop_gradient({x.name}) * 0.5 + {x.name}",
                    f"jnp.cbrt({x.name} + 3.0)",
                    f"{x.name} ** 3 / (1 + {x.name} ** 2)",
                    f"(3 * {x.name} + 1) % 2.5",
                    f"lax.select({x.name} > 0, {x.name}, jnp.full_like({x.name}, 0.1))",
                )
            )
        )
    )


@block
def sum_of_two(d: Draft) -> None:
    x, y = d.pick(REAL), d.pick(REAL)
    d.emit(f"{x.name} {d.one(('+', '*', '-'))} {y.name}")


@block
def broadcast(d: Draft) -> None:
    x = d.pick(REAL)
    n = d.size((2, 3, 4, 5))
    d.emit(
        str(
            d.one(
                (
                    f"jnp.repeat({x.name}[..., None], {n}, axis=-1)",
                    f"jnp.broadcast_to({x.name}, ({n}, *{x.name}.shape))",
                    f"jnp.tile({x.name}, {n})",
                    f"{x.name}[..., None] * jnp.linspace(0.5, 1.0, {n})",
                    f"lax.broadcast_in_dim({x.name}, (*{x.name}.shape, {n}), {tuple(range(len(x.shape)))})",
                )
            )
        )
    )


@block
def reshaped(d: Draft) -> None:
    x = d.pick(REAL, min_rank=1)
    total = math.prod(x.shape)
    choices = [f"{x.name}.reshape(-1)", f"{x.name}.T", f"jnp.moveaxis({x.name}, -1, 0)"]
    if len(x.shape) > 1:
        choices.append(f"{x.name}.reshape({x.name}.shape[0], -1)")
        choices.append(f"{x.name}.reshape(-1, {x.shape[-1]})")
        choices.append(f"jnp.swapaxes({x.name}, 0, 1)")
    choices += [f"{x.name}.reshape({n}, {total // n})" for n in (2, 3, 4, 6, 8) if total % n == 0]
    choices += [f"{x.name}.reshape({x.name}.shape[0], {n}, -1)" for n in (2, 3, 4) if (total // x.shape[0]) % n == 0]
    d.emit(str(d.one(choices)))


@block
def reduction(d: Draft) -> None:
    x = d.pick(REAL, min_rank=1)
    axis = d.axis(x)
    n = x.shape[axis]
    keep = d.one(("", ", keepdims=True"))
    d.emit(
        str(
            d.one(
                (
                    f"jnp.mean({x.name}, axis={axis}{keep})",
                    f"jnp.sum({x.name}, axis={axis}{keep}) * {root(n)}",
                    f"jnp.max({x.name}, axis={axis}{keep})",
                    f"jnp.min({x.name}, axis={axis}{keep})",
                    f"jnp.prod(1 + 0.1 * {x.name}, axis={axis}{keep})",
                    f"jax.nn.logsumexp({x.name}, axis={axis}{keep})",
                    f"jnp.var({x.name}, axis={axis}{keep})",
                    f"jnp.linalg.norm({x.name} + 2, axis={axis}{keep}) * {root(n)}",
                    f"jnp.median({x.name}, axis={axis}{keep})",
                )
            )
        )
    )


@block
def normalised(d: Draft) -> None:
    """Layer norms and batch norms, with running statistics in the state."""
    x = d.pick(REAL, min_rank=2)
    if d.chance(0.5):
        d.emit(
            f"({x.name} - {x.name}.mean(-1, keepdims=True)) * lax.rsqrt({x.name}.var(-1, keepdims=True) + 0.1)"
            f" * {d.parameter(x.shape[-1])}"
        )
        return
    axes = tuple(range(len(x.shape) - 1)) if d.chance(0.7) else (0,)
    if not d.mixes:
        raise Unfit
    mean = d.emit(f"jnp.mean({x.name}, axis={axes})")
    var = d.emit(f"jnp.mean({x.name} ** 2, axis={axes}) - {mean.name} ** 2")
    d.emit(f"({x.name} - {mean.name}) * lax.rsqrt({var.name} + 0.1)")
    if d.chance(0.7):
        update = "0.9 * {} + 0.1 * " + f"lax.stop_gradient({mean.name})"
        d.other(*mean.shape, dtype="float32", kind="zeros", update=update)


@block
def softmax(d: Draft) -> None:
    x = d.pick(REAL, min_rank=1)
    d.emit(f"jax.nn.{d.one(('softmax', 'log_softmax', 'standardize'))}({x.name}, axis={d.axis(x)})")


@block
def cumulative(d: Draft) -> None:
    x = d.pick(REAL, min_rank=1)
    axis = d.axis(x)
    kind = d.one(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"))
    y = f"0.9 + 0.1 * {x.name}" if kind == "cumprod" else x.name
    reverse = d.one((True, False))
    scale = root(x.shape[axis]) if kind == "cumsum" else "1.0"
    d.emit(f"lax.{kind}({y}, axis={axis}, reverse={reverse}) * {scale}")


@block
def associative(d: Draft) -> None:
    x = d.pick(REAL, min_rank=1)
    axis = d.axis(x)
    d.emit(f"lax.associative_scan(lambda a, b: a * 0.5 + b, {x.name}, axis={axis})")


@block
def flips(d: Draft) -> None:
    x = d.pick(REAL, min_rank=1)
    axis = d.axis(x)
    n = x.shape[axis]
    other = d.one((f"jnp.roll({x.name}, {d.below(n)}, axis={axis})", f"jnp.flip({x.name}, axis={axis})"))
    d.emit(f"0.5 * {x.name} + {other}" if d.chance(0.5) else str(other))


@block
def padded(d: Draft) -> None:
    x = d.pick(REAL, min_rank=1)
    axis = d.axis(x)
    low, high, inside = d.below(3), d.below(3), d.below(2)
    if d.chance(0.3):
        low = -min(low, x.shape[axis] - 1)
    config = [(0, 0, 0)] * len(x.shape)
    config[axis] = (low, high, inside)
    d.emit(f"lax.pad({x.name}, jnp.array(0.25, {x.name}.dtype), {config})")


@block
def concatenated(d: Draft) -> None:
    x = d.pick(REAL, min_rank=1)
    axis = d.axis(x)

    def fits(s: Statement) -> bool:
        return len(s.shape) == len(x.shape) and all(
            a == b for i, (a, b) in enumerate(zip(s.shape, x.shape, strict=True)) if i != axis
        )

    y = d.pick((x.dtype,), where=fits)
    if x.shape == y.shape and d.chance(0.4):
        d.emit(f"jnp.stack([{x.name}, {y.name}], axis={axis})")
    else:
        d.emit(f"jnp.concatenate([{x.name}, {y.name}], axis={axis})")


@block
def sliced(d: Draft) -> None:
    x = d.pick(REAL, min_rank=1, where=lambda s: max(s.shape) > 2)
    axis = d.axis(x)
    n = x.shape[axis]
    start = d.below(max(n // 2, 1))
    stop = start + 1 + d.below(n - start)
    step = d.size((1, 1, 2, 3))
    index = ", ".join([":"] * axis + [f"{start}:{stop}:{step}"])
    d.emit(f"{x.name}[{index}]")


@block
def split(d: Draft) -> None:
    x = d.pick(REAL, min_rank=1, where=lambda s: s.shape[-1] % 2 == 0)
    d.emit(f"jnp.prod(jnp.stack(jnp.split({x.name}, 2, axis=-1)), axis=0)")


# Gathers and scatters


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
    d.emit(str(d.one(choices)))


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
    y = d.emit(str(d.one(choices)))
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


# Orders


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
    d.emit(str(d.one(choices)))


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
    d.emit(str(d.one(choices)))


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
    d.emit(str(d.one(choices)))


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
    d.emit(str(d.one(choices)))


# Convolutions, windows, transforms


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
    d.emit(str(d.one(choices)))


# Linear algebra


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
    d.emit(str(d.one(choices)))


@block
def orthogonal(d: Draft) -> None:
    n = d.size((2, 3, 4, 5))
    w = d.parameter(n, n)
    x = d.pick(("float32",), min_rank=1, where=lambda s: s.shape[-1] == n)
    d.emit(f"{x.name} @ jnp.linalg.qr({w} + 3 * jnp.eye({n}, dtype=jnp.float32))[0]")


# Control


@block
def scanned(d: Draft) -> None:
    """Over a stack of layers, over positions, over the examples; with remat or not."""
    x = d.pick(("float32",), min_rank=1)
    kind = d.below(4)
    reverse = d.one(("", ", reverse=True", ", unroll=2"))
    k = x.shape[-1]
    if kind == 0:
        w = d.parameter(d.size((2, 3, 4)), k, k)
        body = f"lambda c, w: (jnp.tanh(c @ w * {root(k)}), None)"
        if d.chance(0.4):
            body = f"jax.checkpoint({body})"
        d.emit(f"lax.scan({body}, {x.name}, {w}{reverse})[0]")
    elif kind == 1:
        first = f"jnp.zeros({x.name}.shape[1:])"
        d.emit(f"lax.scan(lambda c, w: (0.5 * c + w, jnp.tanh(c) * w), {first}, {x.name}{reverse})[1]")
    elif kind == 2 and len(x.shape) > 1:
        w = d.parameter(k, k)
        d.emit(
            f"lax.scan(lambda c, y: (jnp.tanh(c @ {w} * {root(k)} + y), c), jnp.zeros_like({x.name}[:, 0]), "
            f"jnp.swapaxes({x.name}, 0, 1){reverse})[{d.below(2)}]"
        )
    else:
        d.emit(
            f"lax.scan(lambda c, i: ((jnp.sin(c[0] + i), c[1] + i), c[1]), ({x.name}, 0), jnp.arange(3){reverse})[0][0]"
        )


@block
def looped(d: Draft) -> None:
    x = d.pick(("float32",))
    n = d.size((2, 3, 5))
    choices = [
        f"lax.fori_loop(0, {n}, lambda i, c: jnp.cos(c) * 0.9 + 0.1 * i, {x.name})",
        f"lax.while_loop(lambda c: c[0] < {n}, lambda c: (c[0] + 1, lax.stop_gradient(jnp.sin(c[1]))), "
        f"(0, lax.stop_gradient({x.name})))[1]",
        f"lax.map(lambda y: jnp.tanh(y) * jnp.sum(y), {x.name})" if x.shape else f"{x.name} * 2",
        f"jax.vmap(lambda y: jnp.sum(y ** 2) * 0.1)({x.name})" if x.shape else f"{x.name} * 2",
    ]
    d.emit(str(d.one(choices)))


@block
def chosen(d: Draft) -> None:
    x = d.pick(("float32",))
    first = f"{x.name}.reshape(-1)[0] > 0"
    counter = d.counter()
    choices = [
        f"lax.cond({first}, jnp.sin, lambda y: y * 0.5, {x.name})",
        f"lax.switch({counter} % 3, [jnp.sin, jnp.cos, lambda y: 0.5 * y], {x.name})",
        f"lax.cond({counter} > 0, lambda y: jnp.tanh(y), lambda y: y, {x.name})",
        f"lax.cond(jnp.sum({x.name}) > 0, lambda y: y * 2, lambda y: y - 1, {x.name})",
    ]
    if x.shape:
        w = d.parameter(x.shape[-1], x.shape[-1])
        choices.append(f"lax.cond({counter} % 2 == 0, lambda y, w: jnp.tanh(y @ w), lambda y, w: y, {x.name}, {w})")
    d.emit(str(d.one(choices)))


@block
def inner_jit(d: Draft) -> None:
    x = d.pick(REAL)
    choices = [
        f"jax.jit(lambda y, c: y * c + c)({x.name}, 0.5)",
        f"jax.jit(lambda y, c, n: jnp.where(y > c, y, c) * n)({x.name}, 0.25, 2)",
        f"jax.jit(lambda y: (jnp.sin(y), 1.0))({x.name})[0]",
        f"jax.jit(lambda y: (jnp.sin(y), jnp.sum(y), 3))({x.name})[1] * 0.1",
        f"jax.checkpoint(lambda y: jnp.tanh(jnp.sin(y) * 1.5))({x.name})",
        f"jax.checkpoint(jax.jit(lambda y, c: jnp.tanh(y * c)))({x.name}, 1.5)",
        f"jax.checkpoint(lambda y: jnp.exp(-y * y) * y, policy=jax.checkpoint_policies.dots_saveable)({x.name})",
    ]
    if x.shape:
        w = d.parameter(x.shape[-1], x.shape[-1])
        choices.append(f"jax.checkpoint(lambda y, w: jnp.tanh(y @ w * {root(x.shape[-1])}) @ w.T)({x.name}, {w}) * 0.3")
    d.emit(str(d.one(choices)))


@block
def own_gradient(d: Draft) -> None:
    x = d.pick(REAL)
    choices = (f"scaled_gradient({x.name}) * 0.5", f"clipped_gradient({x.name}, 0.01)", f"soft_abs({x.name})")
    d.emit(str(d.one(choices)))


@block
def inner_gradient(d: Draft) -> None:
    x = d.pick(("float32",), min_rank=1)
    w = d.parameter(x.shape[-1])
    d.emit(f"jax.grad(lambda y: jnp.sum(jnp.tanh(y * {w}) ** 2))({x.name})")


@block
def random_numbers(d: Draft) -> None:
    x = d.pick(("float32",), min_rank=1)
    key = f"jax.random.fold_in(jax.random.key(7), {d.counter()})"
    d.emit(
        str(
            d.one(
                (
                    f"jnp.where(jax.random.bernoulli({key}, 0.8, {x.name}.shape), {x.name} / 0.8, 0)",
                    f"{x.name} + 0.1 * jax.random.normal({key}, {x.name}.shape)",
                    f"jax.random.permutation({key}, {x.name})",
                    f"{x.name} * jax.random.uniform({key}, {x.name}.shape[-1:])",
                )
            )
        )
    )


# The state beside what is trained


@block
def counted(d: Draft) -> None:
    rows = d.size()
    t = d.integers(rows)
    kind = d.below(5)
    if kind == 0:
        d.other(rows, dtype="int32", kind="zeros", update="{}.at[" + t.name + "].add(1)")
    elif kind == 1:
        d.other(rows, dtype="bool", kind="bools", update="{}.at[" + t.name + "].set(True)")
    elif kind == 2:
        d.other(rows, dtype="int32", kind="integers", update="jnp.maximum({}, jnp.max(" + t.name + "))", bound=3)
    elif kind == 3:
        d.other(dtype="bool", kind="bools", update="{} | jnp.any(" + t.name + " == 1)")
    else:
        update = f"{{}} + jnp.sum(jax.nn.one_hot({t.name}, {rows}, dtype=jnp.int32), axis=0)"
        d.other(rows, dtype="int32", kind="zeros", update=update)


@block
def remembered(d: Draft) -> None:
    """A value that is kept in the state: a moving average, the last one, a buffer's row, one unchanged."""
    x = d.pick(("float32", "complex64", "bfloat16", "int32"))
    value = f"lax.stop_gradient({x.name})"
    kind = d.below(6)
    how = "complex" if x.dtype == "complex64" else "integers" if x.dtype == "int32" else "normal"
    if kind == 0 and x.dtype != "int32":
        d.other(*x.shape, dtype=x.dtype, kind=how, update="(0.5 * {} + 0.5 * " + value + f").astype(jnp.{x.dtype})")
    elif kind == 1:
        d.other(*x.shape, dtype=x.dtype, kind=how, update=value)
    elif kind == 2 and len(x.shape) >= 1:
        here = d.other(4, *x.shape, dtype=x.dtype, kind=how, update="{}.at[" + d.counter() + " % 4].set(" + value + ")")
        if x.dtype == "float32":
            d.emit(f"{x.name} * jnp.mean({here}, axis=0)")
    elif kind == 3:
        here = d.other(*x.shape, dtype=x.dtype, kind=how, update="{}")
        if x.dtype == "float32":
            d.emit(f"0.5 * {x.name} + {here}")
    elif kind == 4:
        d.other(3, 2, dtype="float32", kind="normal", update="{}")
    else:
        update = "jnp.roll({}, 1, axis=0).at[0].set(jnp.sum(" + value + ").real.astype(jnp.float32))"
        d.other(5, dtype="float32", kind="zeros", update=update)


@block
def data_leaf(d: Draft) -> None:
    shapes = ((), (d.size(),), (d.size(), d.size((2, 3, 4))), (d.size((4, 6)), d.size((4, 5)), d.size((2, 3))))
    d.data(*shapes[d.below(len(shapes))])


@block
def repeated_layers(d: Draft) -> None:
    """A stack of equal layers with named scopes, which the search folds into one."""
    x = d.pick(REAL, min_rank=2)
    k, n = x.shape[-1], d.size()
    for _ in range(d.size((2, 3))):
        up, down = d.parameter(k, n), d.parameter(n, k)
        x = d.emit(f"{x.name} + jnp.tanh({x.name} @ {up} * {root(k)}) @ {down} * {root(n)}")
