"""A normalizing flow of Distrax: masked affine couplings, fitted by maximum likelihood."""

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.zoo.case import Case, PyTree
from benchmarks.zoo.data import Batch
from benchmarks.zoo.mlp import init_mlp
from benchmarks.zoo.training import training_case


def distrax_flow(*, layers: int = 2, width: int = 32, dimensions: int = 8, batch: int = 16) -> Case:
    import distrax

    def conditioner(params: PyTree):
        def apply(x: jax.Array) -> jax.Array:
            *hidden, last = params
            for layer in hidden:
                x = jnp.tanh(x @ layer["weight"] + layer["bias"])
            return 0.1 * (x @ last["weight"] + last["bias"])

        return apply

    def affine(params: jax.Array):
        shift, log_scale = jnp.split(params, 2, axis=-1)
        return distrax.ScalarAffine(shift=shift, log_scale=log_scale)

    def loss(params: PyTree, batch: PyTree) -> jax.Array:
        couplings = [
            distrax.MaskedCoupling(
                mask=jnp.arange(dimensions) % 2 == i % 2, bijector=affine, conditioner=conditioner(layer)
            )
            for i, layer in enumerate(params)
        ]
        base = distrax.MultivariateNormalDiag(jnp.zeros(dimensions), jnp.ones(dimensions))
        flow = distrax.Transformed(base, distrax.Inverse(distrax.Chain(couplings)))
        return -jnp.mean(flow.log_prob(batch["points"]))

    def make_batch(seed: int) -> Batch:
        points = np.random.default_rng(seed).standard_normal((batch, dimensions), dtype=np.float32)
        return {"points": 1 + 2 * points}

    return training_case(
        name="distrax_flow",
        init_params=lambda key: [
            init_mlp(k, (dimensions, width, 2 * dimensions)) for k in jax.random.split(key, layers)
        ],
        loss=loss,
        batch=make_batch,
    )


CASES = (distrax_flow,)
