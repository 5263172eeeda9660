"""A network of e3nn-jax whose features turn with its input: scalars and vectors, joined by tensor products."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.zoo.case import Case, PyTree
from benchmarks.zoo.data import Batch
from benchmarks.zoo.training import training_case


def e3nn_points(*, channels: int = 8, points: int = 4, batch: int = 8) -> Case:
    """One number of a cloud of points, by spherical harmonics of the points and equivariant linear layers."""
    import e3nn_jax as e3nn
    import flax.linen as nn

    class Network(nn.Module):
        @nn.compact
        def __call__(self, positions: jax.Array) -> jax.Array:
            x = e3nn.spherical_harmonics("0e + 1o + 2e", positions, normalize=True)
            hidden = f"{channels}x0e + {channels}x1o"
            x = e3nn.flax.Linear(hidden)(x)
            x = e3nn.flax.Linear(hidden)(e3nn.tensor_square(x))
            x = e3nn.sum(x, axis=1)
            return e3nn.flax.Linear("1x0e")(e3nn.tensor_square(x)).array[:, 0]

    network = Network()
    example = jnp.ones((batch, points, 3))

    def loss(params: PyTree, batch: PyTree) -> jax.Array:
        return jnp.mean((network.apply(params, batch["positions"]) - batch["targets"]) ** 2)

    def make_batch(seed: int) -> Batch:
        positions = np.random.default_rng(seed).standard_normal((batch, points, 3), dtype=np.float32)
        return {"positions": positions, "targets": np.square(positions).sum((1, 2)) / 10}

    return training_case(
        name="e3nn_points",
        init_params=lambda key: network.init(key, example),
        loss=loss,
        batch=make_batch,
        optimizer=optax.sgd(1e-5, momentum=0.9),  # products of products: larger steps diverge
    )


CASES = (e3nn_points,)
