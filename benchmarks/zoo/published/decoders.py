"""Decoders of Levanter, Penzai and torchax, with random weights."""

from typing import Any

import jax

from benchmarks.zoo.case import Case, PyTree
from benchmarks.zoo.published.sizes import HEADS, KV_HEADS, LAYERS, LENGTH, VOCABULARY, WIDTH, tokens
from benchmarks.zoo.training import cross_entropy, training_case


def levanter_llama() -> Case:
    """On Haliax's named arrays; its layers are stacked, scanned and recomputed, as by default.

    Its own loss is not used: it passes a mask of floats to `jnp.mean`, which jax refuses by now.
    """
    import equinox as eqx
    import haliax as hax
    from levanter.layers.attention import AttentionBackend, AttentionMask
    from levanter.models.llama import LlamaConfig, LlamaLMHeadModel

    config = LlamaConfig(
        seq_len=LENGTH,
        hidden_dim=WIDTH,
        intermediate_dim=2 * WIDTH,
        num_layers=LAYERS,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        attn_backend=AttentionBackend.VANILLA,  # the others are for accelerators
    )

    def create(key: jax.Array) -> LlamaLMHeadModel:
        return LlamaLMHeadModel.init(hax.Axis("vocabulary", VOCABULARY), config, key=key)

    shapes = eqx.filter_eval_shape(create, jax.random.key(0))
    static = eqx.filter(shapes, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct), inverse=True)

    def loss(params: PyTree, batch: PyTree) -> jax.Array:
        named = hax.named(batch["input_ids"], ("batch", config.Pos.name))
        logits = eqx.combine(params, static)(named, AttentionMask.causal())
        return cross_entropy(logits.array, batch["labels"])

    return training_case(
        name="levanter_llama",
        init_params=lambda key: eqx.filter(create(key), eqx.is_array),
        loss=loss,
        batch=tokens,
    )


def penzai_transformer() -> Case:
    """Penzai's Llama."""
    return _penzai("penzai_transformer", LAYERS, {"mlp_variant": "swiglu", "tie_embedder_and_logits": False})


def penzai_gemma() -> Case:
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
    return _penzai("penzai_gemma", 3, options)


def _penzai(name: str, layers: int, options: dict[str, Any]) -> Case:
    """On named arrays. The parameters are unbound from the model: the state is a mapping of them by name."""
    from penzai import pz
    from penzai.models.transformer.variants import llamalike_common

    config = llamalike_common.LlamalikeTransformerConfig(
        num_kv_heads=KV_HEADS,
        query_head_multiplier=2,
        embedding_dim=WIDTH,
        projection_dim=WIDTH // (2 * KV_HEADS),
        mlp_hidden_dim=2 * WIDTH,
        num_decoder_blocks=layers,
        vocab_size=VOCABULARY,
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

    return training_case(name=name, init_params=lambda key: create(key)[1], loss=loss, batch=tokens)


def torchax_llama() -> Case:
    """PyTorch's Llama of Hugging Face transformers, as a jax function through torchax. Its weights are a mapping by
    name; its buffers are constants.
    """
    import torch
    import torchax
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=LENGTH,
        attn_implementation="eager",
        use_cache=False,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    states, forward = torchax.extract_jax(model)
    names = [name for name, _ in model.named_parameters()]
    buffers = {name: value for name, value in states.items() if name not in names}

    def init_params(key: jax.Array) -> PyTree:
        """Weights as large as those that PyTorch draws, from the key."""
        keys = dict(zip(names, jax.random.split(key, len(names)), strict=True))
        return {
            name: states[name] if states[name].ndim == 1 else 0.02 * jax.random.normal(keys[name], states[name].shape)
            for name in names
        }

    def loss(params: PyTree, batch: PyTree) -> jax.Array:
        outputs = forward(params | buffers, (batch["input_ids"],), {})
        return cross_entropy(outputs.logits, batch["labels"])

    return training_case(name="torchax_llama", init_params=init_params, loss=loss, batch=tokens)
