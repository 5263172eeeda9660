"""Models of PyTorch as jax functions, through torchax, with random weights."""

import jax

from benchmarks.zoo.case import Case, PyTree
from benchmarks.zoo.published.huggingface import token_batch
from benchmarks.zoo.training import cross_entropy, training_case


def torchax_llama(
    *,
    layers: int = 2,
    width: int = 32,
    heads: int = 4,
    kv_heads: int = 2,
    vocabulary: int = 64,
    length: int = 16,
    batch: int = 8,
) -> Case:
    """PyTorch's Llama of Hugging Face transformers. Its weights are a mapping by name; its buffers are constants."""
    import torch
    import torchax
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=length,
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

    return training_case(
        name="torchax_llama",
        init_params=init_params,
        loss=loss,
        batch=token_batch(batch=batch, length=length, vocabulary=vocabulary, padded=False),
    )


CASES = (torchax_llama,)
