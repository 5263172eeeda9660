"""Operations element by element and along dimensions, and changes of shape."""

from __future__ import annotations

import math

from benchmarks.random_programs.blocks.registry import REAL, block, root
from benchmarks.random_programs.drafting import FLOATS, Draft, Statement, Unfit


@block
def elementwise(d: Draft) -> None:
    x = d.pick(FLOATS)
    d.emit_one(
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


@block
def sum_of_two(d: Draft) -> None:
    x, y = d.pick(REAL), d.pick(REAL)
    d.emit(f"{x.name} {d.one(('+', '*', '-'))} {y.name}")


@block
def broadcast(d: Draft) -> None:
    x = d.pick(REAL)
    n = d.size((2, 3, 4, 5))
    d.emit_one(
        f"jnp.repeat({x.name}[..., None], {n}, axis=-1)",
        f"jnp.broadcast_to({x.name}, ({n}, *{x.name}.shape))",
        f"jnp.tile({x.name}, {n})",
        f"{x.name}[..., None] * jnp.linspace(0.5, 1.0, {n})",
        f"lax.broadcast_in_dim({x.name}, (*{x.name}.shape, {n}), {tuple(range(len(x.shape)))})",
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
    d.emit_one(*choices)


@block
def reduction(d: Draft) -> None:
    x = d.pick(REAL, min_rank=1)
    axis = d.axis(x)
    n = x.shape[axis]
    keep = d.one(("", ", keepdims=True"))
    d.emit_one(
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
