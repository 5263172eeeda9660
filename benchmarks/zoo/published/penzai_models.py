"""The transformer of Penzai, on its named arrays, with random weights."""

import jax

from benchmarks.zoo.case import Case, PyTree
from benchmarks.zoo.published.huggingface import token_batch
from benchmarks.zoo.training import cross_entropy, training_case


def penzai_transformer(
    *, layers: int = 2, width: int = 32, kv_heads: int = 2, vocabulary: int = 64, length: int = 16, batch: int = 8
) -> Case:
    """Its Llama."""
    options = {"mlp_variant": "swiglu", "tie_embedder_and_logits": False}
    return _llamalike("penzai_transformer", options, layers, width, kv_heads, vocabulary, length, batch)


def penzai_gemma(
    *, layers: int = 3, width: int = 32, kv_heads: int = 2, vocabulary: int = 64, length: int = 16, batch: int = 8
) -> Case:
    """Its Gemma: layers stacked and scanned, embeddings tied, and norms after each part as Gemma 2 has them."""
    options = {
        "mlp_variant": "geglu_approx",
        "tie_embedder_and_logits": True,
        "use_layer_stack": True,
        "use_post_attn_norm": True,
        "use_post_ffw_norm": True,
        "final_logit_softcap": 30.0,
        "attn_logits_soft_cap": 50.0,
    }
    return _llamalike("penzai_gemma", options, layers, width, kv_heads, vocabulary, length, batch)


def _llamalike(
    name: str, options: dict, layers: int, width: int, kv_heads: int, vocabulary: int, length: int, batch: int
) -> Case:
    """The parameters are unbound from the model: the state is a mapping of them by name."""
    from penzai import pz
    from penzai.models.transformer.variants import llamalike_common

    config = llamalike_common.LlamalikeTransformerConfig(
        num_kv_heads=kv_heads,
        query_head_multiplier=2,
        embedding_dim=width,
        projection_dim=width // (2 * kv_heads),
        mlp_hidden_dim=2 * width,
        num_decoder_blocks=layers,
        vocab_size=vocabulary,
        **options,
    )

    def create(key: jax.Array) -> tuple[PyTree, PyTree]:
        model = llamalike_common.build_llamalike_transformer(config, init_base_rng=key)
        unbound, params = pz.unbind_params(model)
        return unbound, {param.label: param.freeze().value for param in params}

    unbound, _ = create(jax.random.key(0))

    def loss(params: PyTree, batch: PyTree) -> jax.Array:
        values = [pz.ParameterValue(label=label, value=value, metadata={}) for label, value in params.items()]
        bound = pz.bind_variables(unbound, values)
        logits = bound(pz.nx.wrap(batch["input_ids"]).tag("batch", "seq")).unwrap("batch", "seq", "vocabulary")
        return cross_entropy(logits, batch["labels"])

    make = token_batch(batch=batch, length=length, vocabulary=vocabulary)
    return training_case(
        name=name,
        init_params=lambda key: create(key)[1],
        loss=loss,
        batch=lambda seed: {name: array for name, array in make(seed).items() if name != "attention_mask"},
    )


CASES = (penzai_transformer, penzai_gemma)
