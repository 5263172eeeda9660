"""Matrix products, attention, and experts."""

from __future__ import annotations

import math

from benchmarks.random_programs.blocks.registry import REAL, block, root
from benchmarks.random_programs.drafting import Draft, Unfit


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
