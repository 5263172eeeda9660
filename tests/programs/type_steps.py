"""Small training steps whose products are of 8 and 4 bits, and of complex numbers."""

import jax
import jax.numpy as jnp
import numpy as np

EXAMPLES, WIDTH, INNER, LAYERS = 16, 32, 64, 4


def scaled(x, largest):
    """(x in units of its largest value, that unit)."""
    unit = jax.lax.stop_gradient(jnp.max(jnp.abs(x)) / largest + 1e-12)
    return x / unit, unit


def in_float8(x, w):
    """Operands of e4m3 forward; gradients of e5m2 backward, as in Micikevicius et al., arXiv:2209.05433."""

    @jax.custom_vjp
    def product(x, w):
        return forward(x, w)[0]

    def forward(x, w):
        small = x.astype(jnp.float8_e4m3fn), w.astype(jnp.float8_e4m3fn)
        return jnp.dot(*small, preferred_element_type=jnp.float32), small

    def backward(kept, change):
        x, w = kept
        change = change.astype(jnp.float8_e5m2)
        return (
            jax.lax.dot_general(change, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32),
            jax.lax.dot_general(x, change, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32),
        )

    product.defvjp(forward, backward)
    return product(x, w)


def in_integers(dtype, largest):
    """Operands rounded to integers by the row and the column, as AQT does; gradients pass straight through."""

    def product(x, w):
        (a, by_row), (b, by_column) = rows(x, -1), rows(w, 0)
        # XLA has no products of 4 bits for CPUs: there, they are of 8 bits, and what is kept has 4.
        a, b = (i.astype(dtype).astype(jnp.int8) for i in (a, b))
        exact = jnp.dot(a, b, preferred_element_type=jnp.int32)
        rounded = exact.astype(jnp.float32) * by_row * by_column
        through = x @ w
        return through + jax.lax.stop_gradient(rounded - through)

    def rows(x, axis):
        unit = jax.lax.stop_gradient(jnp.max(jnp.abs(x), axis, keepdims=True) / largest + 1e-12)
        return jnp.round(x / unit), unit

    return product


def in_complex(x, w):
    """The real part of a product of complex numbers, with phases that depend on the position."""
    phases = jnp.exp(1j * jnp.arange(w.shape[0], dtype=jnp.float32))
    return jnp.real((x * phases).astype(jnp.complex64) @ (w * jnp.conj(phases)[:, None]).astype(jnp.complex64))


PRODUCTS = {
    "float8": in_float8,
    "int8": in_integers(jnp.int8, 127.0),
    "int4": in_integers(jnp.int4, 7.0),
    "complex64": in_complex,
}


def training_step(product):
    def step(state, batch):
        def loss(state):
            x = batch["x"]
            for p in state:
                x = x + product(jnp.tanh(product(x, p["a"])), p["b"])
            return jnp.mean((x - batch["y"]) ** 2)

        value, gradients = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients), value

    return step


def arguments():
    random = np.random.default_rng(0)
    state = [
        {n: (0.3 * random.normal(size=s)).astype("f") for n, s in {"a": (WIDTH, INNER), "b": (INNER, WIDTH)}.items()}
        for _ in range(LAYERS)
    ]
    return state, {n: random.normal(size=(EXAMPLES, WIDTH)).astype("f") for n in "xy"}
