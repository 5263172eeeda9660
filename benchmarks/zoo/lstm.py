"""Long short-term memory over a sequence by `lax.scan`, in plain jax.numpy."""

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.zoo.case import Case, PyTree
from benchmarks.zoo.data import Batch
from benchmarks.zoo.training import training_case


def lstm_cell(params: PyTree, carry: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One time step: carry is (hidden, cell), both (batch, width); x is (batch, features)."""
    hidden, cell = carry
    gates = x @ params["input"] + hidden @ params["recurrent"] + params["bias"]
    input_gate, forget_gate, candidate, output_gate = jnp.split(gates, 4, axis=-1)
    cell = jax.nn.sigmoid(forget_gate + 1) * cell + jax.nn.sigmoid(input_gate) * jnp.tanh(candidate)
    return jax.nn.sigmoid(output_gate) * jnp.tanh(cell), cell


def lstm(*, width: int = 32, features: int = 8, length: int = 20, batch: int = 8) -> Case:
    """Regression of a value at every time step; sequences are (time, batch, features) inside the scan."""

    def make_batch(seed: int) -> Batch:
        series = np.random.default_rng(seed).standard_normal((batch, length, features), dtype=np.float32)
        return {"series": series, "targets": np.cumsum(series.mean(axis=-1), axis=1)}

    def init_params(key: jax.Array) -> PyTree:
        initializer = jax.nn.initializers.glorot_normal()
        input_key, recurrent_key, readout_key = jax.random.split(key, 3)
        return {
            "cell": {
                "input": initializer(input_key, (features, 4 * width)),
                "recurrent": initializer(recurrent_key, (width, 4 * width)),
                "bias": jnp.zeros(4 * width),
            },
            "readout": initializer(readout_key, (width, 1)),
        }

    def loss(params: PyTree, batch: PyTree) -> jax.Array:
        def advance(carry, x):
            carry = lstm_cell(params["cell"], carry, x)
            return carry, carry[0]

        zeros = jnp.zeros((batch["series"].shape[0], width))
        _, hidden = jax.lax.scan(advance, (zeros, zeros), batch["series"].swapaxes(0, 1))
        predictions = (hidden @ params["readout"])[..., 0].swapaxes(0, 1)
        return jnp.mean((predictions - batch["targets"]) ** 2)

    return training_case(name="lstm", init_params=init_params, loss=loss, batch=make_batch)
