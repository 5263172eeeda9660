"""A Linen model whose products Qwix computes in int8, forward and backward."""

import jax
import jax.numpy as jnp

from benchmarks.zoo.case import Case, PyTree
from benchmarks.zoo.data import next_token_batch
from benchmarks.zoo.training import cross_entropy, training_case


def qwix_int8(*, layers: int = 2, width: int = 32, vocabulary: int = 64, length: int = 16, batch: int = 8) -> Case:
    """Quantized training: scales by channel from the present operands.

    The scale is one percent above the default. Qwix divides by max|x| / 127.5, which puts the largest number of each
    channel on the tie between two integers: there a change in the last place, as of sums in another order, moves the
    results of plain `jax.jit` by 2e-2, in float64 too, and nothing could be compared.
    """
    import qwix
    from flax import linen as nn

    class Network(nn.Module):
        @nn.compact
        def __call__(self, tokens: jax.Array) -> jax.Array:
            x = nn.Embed(vocabulary, width)(tokens)
            for _ in range(layers):
                h = nn.Dense(4 * width)(nn.LayerNorm()(x))
                x = x + nn.Dense(width)(nn.gelu(h))
            return nn.Dense(vocabulary, name="head")(nn.LayerNorm()(x))

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
        init_params=lambda key: model.init(key, jnp.zeros((1, length), jnp.int32)),
        loss=loss,
        batch=next_token_batch(batch=batch, length=length, vocabulary=vocabulary),
    )


CASES = (qwix_int8,)
