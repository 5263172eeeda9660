"""Deep equilibrium model: a layer's fixed point by `lax.while_loop`, differentiated by a `custom_vjp`.

S. Bai, J. Z. Kolter, V. Koltun, "Deep Equilibrium Models", 2019. Plain iteration takes the place of Broyden's method;
the layer is made a contraction so that it converges.
"""

import jax
import jax.numpy as jnp

from benchmarks.zoo.case import Case, PyTree
from benchmarks.zoo.data import vector_batch
from benchmarks.zoo.training import cross_entropy, training_case

RESIDUAL = 1e-7
MAX_ITERATIONS = 60


def iterate(f, z: jax.Array) -> jax.Array:
    """`f` applied to `z` until it stays where it is."""

    def unfinished(carry):
        iteration, z, previous = carry
        return (iteration < MAX_ITERATIONS) & (jnp.max(jnp.abs(z - previous)) > RESIDUAL)

    def advance(carry):
        iteration, z, _ = carry
        return iteration + 1, f(z), z

    return jax.lax.while_loop(unfinished, advance, (1, f(z), z))[1]


def layer(params: PyTree, x: jax.Array, z: jax.Array) -> jax.Array:
    return jnp.tanh(0.5 * z @ params["recurrent"] + x)


@jax.custom_vjp
def equilibrium(params: PyTree, x: jax.Array) -> jax.Array:
    """z such that z = layer(params, x, z)."""
    return iterate(lambda z: layer(params, x, z), jnp.zeros_like(x))


def equilibrium_forward(params: PyTree, x: jax.Array):
    z = equilibrium(params, x)
    return z, (params, x, z)


def equilibrium_backward(residuals, cotangent: jax.Array):
    """By the implicit function theorem: u = cotangent + u dlayer/dz, then u dlayer/d(params, x)."""
    params, x, z = residuals
    _, vjp_z = jax.vjp(lambda z: layer(params, x, z), z)
    u = iterate(lambda u: cotangent + vjp_z(u)[0], cotangent)
    _, vjp_inputs = jax.vjp(lambda params, x: layer(params, x, z), params, x)
    return vjp_inputs(u)


equilibrium.defvjp(equilibrium_forward, equilibrium_backward)


def fixed_point(*, width: int = 64, features: int = 32, classes: int = 16, batch: int = 16) -> Case:
    """The number of iterations depends on the data."""

    def init_params(key: jax.Array) -> PyTree:
        initializer = jax.nn.initializers.orthogonal()
        encode_key, recurrent_key, head_key = jax.random.split(key, 3)
        return {
            "encode": initializer(encode_key, (features, width)),
            "layer": {"recurrent": initializer(recurrent_key, (width, width))},
            "head": initializer(head_key, (width, classes)),
        }

    def loss(params: PyTree, batch: PyTree) -> jax.Array:
        z = equilibrium(params["layer"], batch["inputs"] @ params["encode"])
        return cross_entropy(z @ params["head"], batch["labels"])

    make_batch = vector_batch(batch=batch, features=features, classes=classes)
    return training_case(name="fixed_point", init_params=init_params, loss=loss, batch=make_batch)
