"""Steps that compute in 16 bits by jmp and in 8 by Qwix."""

import jax
import jax.numpy as jnp
import optax

from benchmarks.zoo.case import Case, PyTree
from benchmarks.zoo.mlp import apply_mlp, init_mlp
from benchmarks.zoo.published.sizes import CLASSES, FEATURES, LAYERS, LENGTH, VOCABULARY, WIDTH, next_tokens, vectors
from benchmarks.zoo.training import cross_entropy, momentum, training_case


def jmp_mixed_precision() -> Case:
    """Computes in float16 with parameters in float32, by a policy; steps whose gradients overflow are skipped, by a
    loss scale that is part of the state.
    """
    import jmp

    tx, width = momentum(), 64
    policy = jmp.get_policy("params=float32,compute=float16,output=float32")

    def init(key: jax.Array) -> PyTree:
        params = init_mlp(key, (FEATURES, width, width, CLASSES))
        return {"params": params, "opt_state": tx.init(params), "scale": jmp.DynamicLossScale(jnp.float32(2.0**10))}

    def step(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        scale = state["scale"]

        def loss_fn(params: PyTree) -> jax.Array:
            half, inputs = policy.cast_to_compute(params), policy.cast_to_compute(batch["inputs"])
            logits = policy.cast_to_output(apply_mlp(half, inputs, jnp.tanh))  # without a kink, where rounding decides
            return scale.scale(cross_entropy(logits, batch["labels"]))

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        grads = scale.unscale(policy.cast_to_param(grads))
        finite = jmp.all_finite(grads)
        updates, opt_state = tx.update(grads, state["opt_state"])
        updated = optax.apply_updates(state["params"], updates)
        params, opt_state = jmp.select_tree(finite, (updated, opt_state), (state["params"], state["opt_state"]))
        return {"params": params, "opt_state": opt_state, "scale": scale.adjust(finite)}, {"loss": scale.unscale(loss)}

    # Sums in float16 differ by which of them is done first.
    return Case(name="jmp_mixed_precision", step=step, init=init, batch=vectors, tolerance=5e-3)


def qwix_int8() -> Case:
    """Quantized training of a Linen model, forward and backward: scales by channel from the present operands.

    The scale is one percent above the default. Qwix divides by max|x| / 127.5, which puts the largest number of each
    channel on the tie between two integers: there a change in the last place, as of sums in another order, moves the
    results of plain `jax.jit` by 2e-2, in float64 too, and nothing could be compared.
    """
    import qwix
    from flax import linen as nn

    class Network(nn.Module):
        @nn.compact
        def __call__(self, tokens: jax.Array) -> jax.Array:
            x = nn.Embed(VOCABULARY, WIDTH)(tokens)
            for _ in range(LAYERS):
                h = nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))
                x = x + nn.Dense(WIDTH)(nn.gelu(h))
            return nn.Dense(VOCABULARY, name="head")(nn.LayerNorm()(x))

    off_the_tie = "absmax,1.01"
    rule = qwix.QtRule(
        module_path="Dense.*",
        weight_qtype=jnp.int8,
        act_qtype=jnp.int8,
        bwd_qtype=jnp.int8,
        weight_calibration_method=off_the_tie,
        act_calibration_method=off_the_tie,
        bwd_calibration_method=off_the_tie,
    )
    model = qwix.quantize_model(Network(), qwix.QtProvider([rule]))

    def loss(params: PyTree, batch: PyTree) -> jax.Array:
        return cross_entropy(model.apply(params, batch["tokens"]), batch["targets"])

    return training_case(
        name="qwix_int8",
        init_params=lambda key: model.init(key, jnp.zeros((1, LENGTH), jnp.int32)),
        loss=loss,
        batch=next_tokens,
    )
