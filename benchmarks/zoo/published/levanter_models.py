"""The Llama of Levanter, on Haliax's named arrays, with random weights."""

import jax

from benchmarks.zoo.case import Case, PyTree
from benchmarks.zoo.published.huggingface import token_batch
from benchmarks.zoo.training import cross_entropy, training_case


def levanter_llama(
    *,
    layers: int = 2,
    width: int = 32,
    heads: int = 4,
    kv_heads: int = 2,
    vocabulary: int = 64,
    length: int = 16,
    batch: int = 8,
) -> Case:
    """Its layers are stacked, scanned and recomputed, as by default.

    Its own loss is not used: it passes a mask of floats to `jnp.mean`, which jax refuses by now.
    """
    import equinox as eqx
    import haliax as hax
    from levanter.layers.attention import AttentionBackend, AttentionMask
    from levanter.models.llama import LlamaConfig, LlamaLMHeadModel

    config = LlamaConfig(
        seq_len=length,
        hidden_dim=width,
        intermediate_dim=2 * width,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        attn_backend=AttentionBackend.VANILLA,  # the others are for accelerators
    )

    def create(key: jax.Array) -> LlamaLMHeadModel:
        return LlamaLMHeadModel.init(hax.Axis("vocabulary", vocabulary), config, key=key)

    shapes = eqx.filter_eval_shape(create, jax.random.key(0))
    static = eqx.filter(shapes, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct), inverse=True)

    def loss(params: PyTree, batch: PyTree) -> jax.Array:
        tokens = hax.named(batch["input_ids"], ("batch", config.Pos.name))
        logits = eqx.combine(params, static)(tokens, AttentionMask.causal())
        return cross_entropy(logits.array, batch["labels"])

    return training_case(
        name="levanter_llama",
        init_params=lambda key: eqx.filter(create(key), eqx.is_array),
        loss=loss,
        batch=token_batch(batch=batch, length=length, vocabulary=vocabulary, padded=False),
    )


CASES = (levanter_llama,)
