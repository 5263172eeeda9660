"""A neural ordinary differential equation solved by Diffrax, with an adaptive step and its checkpointed adjoint."""

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.zoo.case import Case, PyTree
from benchmarks.zoo.data import Batch
from benchmarks.zoo.mlp import init_mlp
from benchmarks.zoo.training import training_case


def diffrax_neural_ode(*, width: int = 32, dimensions: int = 2, length: int = 8, batch: int = 8) -> Case:
    """Fits trajectories; the number of solver steps depends on the data, within a bound."""
    import diffrax

    times = jnp.linspace(0.0, 1.0, length)

    def vector_field(t: jax.Array, y: jax.Array, params: PyTree) -> jax.Array:
        *hidden, last = params
        for layer in hidden:
            y = jnp.tanh(y @ layer["weight"] + layer["bias"])
        return y @ last["weight"] + last["bias"]

    def trajectory(params: PyTree, start: jax.Array) -> jax.Array:
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(vector_field),
            diffrax.Bosh3(),
            t0=times[0],
            t1=times[-1],
            dt0=0.1,
            y0=start,
            args=params,
            saveat=diffrax.SaveAt(ts=times),
            # Coarse, so that the estimated error, which sets the step, is far above rounding.
            stepsize_controller=diffrax.PIDController(rtol=1e-2, atol=1e-2),
            max_steps=32,
        )
        return solution.ys

    def make_batch(seed: int) -> Batch:
        start = np.random.default_rng(seed).standard_normal((batch, dimensions), dtype=np.float32)
        decay = np.exp(-np.asarray(times))[None, :, None]
        return {"start": start, "targets": (start[:, None] * decay).astype(np.float32)}

    def loss(params: PyTree, batch: PyTree) -> jax.Array:
        predicted = jax.vmap(trajectory, in_axes=(None, 0))(params, batch["start"])
        return jnp.mean((predicted - batch["targets"]) ** 2)

    return training_case(
        name="diffrax_neural_ode",
        init_params=lambda key: init_mlp(key, (dimensions, width, width, dimensions)),
        loss=loss,
        batch=make_batch,
        tolerance=1e-4,  # rounding moves the solver's steps
    )


CASES = (diffrax_neural_ode,)
