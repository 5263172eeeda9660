"""Stochastic variational inference by NumPyro, as its users write it: the state is NumPyro's own."""

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.zoo.case import Case, PyTree
from benchmarks.zoo.data import Batch


def numpyro_regression(*, features: int = 16, batch: int = 16) -> Case:
    """Bayesian logistic regression with an automatic normal guide."""
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import SVI, Trace_ELBO
    from numpyro.infer.autoguide import AutoNormal

    def model(inputs: jax.Array, labels: jax.Array) -> None:
        weights = numpyro.sample("weights", dist.Normal(jnp.zeros(features), 1).to_event(1))
        bias = numpyro.sample("bias", dist.Normal(0.0, 1.0))
        with numpyro.plate("examples", inputs.shape[0]):
            numpyro.sample("labels", dist.Bernoulli(logits=inputs @ weights + bias), obs=labels)

    svi = SVI(model, AutoNormal(model), numpyro.optim.Momentum(1e-3, 0.9), Trace_ELBO())

    def make_batch(seed: int) -> Batch:
        rng = np.random.default_rng(seed)
        inputs = rng.standard_normal((batch, features), dtype=np.float32)
        return {"inputs": inputs, "labels": (inputs[:, 0] > 0).astype(np.float32)}

    # Sites and their constraints are read off a first run of the model.
    svi.init(jax.random.key(0), **make_batch(0))

    def init(key: jax.Array) -> PyTree:
        return svi.init(key, **make_batch(0))

    def step(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        state, loss = svi.update(state, **batch)
        return state, {"loss": loss}

    return Case(name="numpyro_regression", step=step, init=init, batch=make_batch)


CASES = (numpyro_regression,)
