"""Mixed precision by jmp: a policy, and a dynamic loss scale that is part of the state."""

import jax
import jax.numpy as jnp
import optax

from benchmarks.zoo.case import Case, PyTree
from benchmarks.zoo.data import vector_batch
from benchmarks.zoo.mlp import init_mlp
from benchmarks.zoo.training import cross_entropy, momentum


def jmp_mixed_precision(*, width: int = 64, features: int = 32, classes: int = 16, batch: int = 16) -> Case:
    """Computes in float16 with parameters in float32; steps whose gradients overflow are skipped."""
    import jmp

    tx = momentum()
    policy = jmp.get_policy("params=float32,compute=float16,output=float32")

    def init(key: jax.Array) -> PyTree:
        params = init_mlp(key, (features, width, width, classes))
        return {"params": params, "opt_state": tx.init(params), "scale": jmp.DynamicLossScale(jnp.float32(2.0**10))}

    def step(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        scale = state["scale"]

        def loss_fn(params: PyTree) -> jax.Array:
            *hidden, last = policy.cast_to_compute(params)
            x = policy.cast_to_compute(batch["inputs"])
            for layer in hidden:
                x = jnp.tanh(x @ layer["weight"] + layer["bias"])  # without a kink, where rounding decides
            logits = policy.cast_to_output(x @ last["weight"] + last["bias"])
            return scale.scale(cross_entropy(logits, batch["labels"]))

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        grads = scale.unscale(policy.cast_to_param(grads))
        finite = jmp.all_finite(grads)
        updates, opt_state = tx.update(grads, state["opt_state"])
        updated = optax.apply_updates(state["params"], updates)
        params, opt_state = jmp.select_tree(finite, (updated, opt_state), (state["params"], state["opt_state"]))
        return {"params": params, "opt_state": opt_state, "scale": scale.adjust(finite)}, {"loss": scale.unscale(loss)}

    make_batch = vector_batch(batch=batch, features=features, classes=classes)
    # Sums in float16 differ by which of them is done first.
    return Case(name="jmp_mixed_precision", step=step, init=init, batch=make_batch, tolerance=5e-3)


CASES = (jmp_mixed_precision,)
