"""A deep equilibrium network: its layer is a fixed point that Optimistix finds, differentiated implicitly."""

import jax
import jax.numpy as jnp

from benchmarks.zoo.case import Case, PyTree
from benchmarks.zoo.data import vector_batch
from benchmarks.zoo.training import cross_entropy, training_case


def optimistix_fixed_point(*, width: int = 32, features: int = 16, classes: int = 8, batch: int = 8) -> Case:
    import optimistix

    def init_params(key: jax.Array) -> PyTree:
        inner, outer, head = jax.random.split(key, 3)
        return {
            "inner": 0.3 * jax.random.normal(inner, (width, width)) / width**0.5,
            "outer": jax.random.normal(outer, (features, width)) / features**0.5,
            "head": jax.random.normal(head, (width, classes)) / width**0.5,
        }

    def loss(params: PyTree, batch: PyTree) -> jax.Array:
        injected = batch["inputs"] @ params["outer"]
        found = optimistix.fixed_point(
            lambda z, args: jnp.tanh(z @ args[0] + args[1]),
            optimistix.FixedPointIteration(rtol=1e-6, atol=1e-6),
            jnp.zeros_like(injected),
            args=(params["inner"], injected),
            max_steps=64,
        )
        return cross_entropy(found.value @ params["head"], batch["labels"])

    return training_case(
        name="optimistix_fixed_point",
        init_params=init_params,
        loss=loss,
        batch=vector_batch(batch=batch, features=features, classes=classes),
        tolerance=1e-4,  # iterations end where the difference is small, of which rounding is a part
    )


CASES = (optimistix_fixed_point,)
