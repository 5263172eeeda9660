"""Loops, branches, and functions with gradients of their own."""

from __future__ import annotations

from benchmarks.random_programs.blocks.registry import REAL, block, root
from benchmarks.random_programs.drafting import Draft


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
def summed_in_a_loop(d: Draft) -> None:
    """A sum that a loop carries from a number on: an auxiliary loss of layers, a loss in chunks, a count."""
    x = d.pick(("float32",), min_rank=2)
    k = x.shape[-1]
    start = d.one(("0.0", "1.5", f"jnp.zeros((), {x.name}.dtype)"))
    term = d.one(("jnp.sum(h ** 2) * 0.01", "jnp.mean(jnp.tanh(h))", "jnp.mean(h ** 2, axis=0).sum()"))
    w = d.parameter(d.size((2, 3)), k, k)
    choices = [
        f"lax.scan(lambda c, w: ((h := jnp.tanh(c[0] @ w * {root(k)}), c[1] + {term}), None), "
        f"({x.name}, {start}), {w})[0][1]",
        f"lax.scan(lambda c, w: ((h := jnp.tanh(c[0] @ w * {root(k)}), c[1] + 1), {term}), "
        f"({x.name}, 0), {w})[1].sum()",
        f"lax.scan(lambda a, y: (a + (lambda h: {term})(y @ {w}[0] * {root(k)}), None), {start}, "
        f"jnp.swapaxes({x.name}, 0, 1))[0]",
        f"lax.fori_loop(0, {w}.shape[0], lambda i, a: a + (lambda h: {term})({x.name} @ {w}[i] * {root(k)}), {start})",
    ]
    d.emit(f"{x.name} + 0.1 * {d.one(choices)}")


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
    d.emit_one(*choices)


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
    d.emit_one(*choices)


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
    d.emit_one(*choices)


@block
def own_gradient(d: Draft) -> None:
    x = d.pick(REAL)
    choices = (f"scaled_gradient({x.name}) * 0.5", f"clipped_gradient({x.name}, 0.01)", f"soft_abs({x.name})")
    d.emit_one(*choices)


@block
def inner_gradient(d: Draft) -> None:
    x = d.pick(("float32",), min_rank=1)
    w = d.parameter(x.shape[-1])
    d.emit(f"jax.grad(lambda y: jnp.sum(jnp.tanh(y * {w}) ** 2))({x.name})")


@block
def random_numbers(d: Draft) -> None:
    x = d.pick(("float32",), min_rank=1)
    key = f"jax.random.fold_in(jax.random.key(7), {d.counter()})"
    d.emit_one(
        f"jnp.where(jax.random.bernoulli({key}, 0.8, {x.name}.shape), {x.name} / 0.8, 0)",
        f"{x.name} + 0.1 * jax.random.normal({key}, {x.name}.shape)",
        f"jax.random.permutation({key}, {x.name})",
        f"{x.name} * jax.random.uniform({key}, {x.name}.shape[-1:])",
    )
