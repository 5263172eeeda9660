"""State beside what is trained, leaves of the batch, and repeated layers."""

from __future__ import annotations

from benchmarks.random_programs.blocks.registry import REAL, block, root
from benchmarks.random_programs.drafting import Draft


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
def set_to_a_literal(d: Draft) -> None:
    """A flag, a count or an array that each step begins anew."""
    kind, dtype, value = (("bools", "bool", "False"), ("integers", "int32", "0"), ("normal", "float32", "1.5"))[
        d.below(3)
    ]
    shape = (d.size(),) if d.chance(0.3) else ()
    d.other(*shape, dtype=dtype, kind=kind, update=f"jnp.full({shape}, {value})" if shape else value)


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
