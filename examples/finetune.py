"""Finetune Hugging Face's Flax GPT-2 with LoRA (Hu et al., 2022): adapters are trained, the model's weights are not.

    pip install 'autopar[train,published]'
    python examples/finetune.py --folder runs/lora
    python -m autopar.launch --processes 2 --devices-per-process 2 examples/finetune.py --folder runs/lora

The weights are random, so that nothing is downloaded: `FlaxGPT2LMHeadModel.from_pretrained("gpt2")` in place of
`FlaxGPT2LMHeadModel(config)` finetunes the published ones. The text is Python's own documentation strings.
"""

import argparse
import pydoc_data.topics
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from transformers import FlaxGPT2LMHeadModel, GPT2Config

import autopar

RANK, SCALE = 8, 2.0


def adapters(key: jax.Array, params: dict) -> dict:
    """(a, b) for each kernel of attention, of rank `RANK`: zero as a product at first."""

    def of(path: tuple, x: jax.Array) -> tuple[jax.Array, jax.Array] | None:
        names = [p.key for p in path]
        if names[-1] != "kernel" or "attn" not in names:
            return None
        rows, columns = x.shape
        own = jax.random.fold_in(key, sum(map(ord, "/".join(names))))
        return jax.random.normal(own, (rows, RANK)) / RANK**0.5, jnp.zeros((RANK, columns))

    return jax.tree_util.tree_map_with_path(of, params)


def adapted(params: dict, lora: dict) -> dict:
    """The model's weights with the adapters added."""

    def add(x: jax.Array, pair: tuple[jax.Array, jax.Array] | None) -> jax.Array:
        return x if pair is None else x + (SCALE * pair[0] @ pair[1]).astype(x.dtype)

    return jax.tree.map(add, params, lora)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/finetune"))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    options = parser.parse_args()

    autopar.initialize()
    config = GPT2Config(
        vocab_size=256, n_positions=options.length, n_embd=128, n_layer=2, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model, policy = FlaxGPT2LMHeadModel(config, _do_init=False), autopar.precision("bf16")
    optimizer = optax.adam(1e-2)

    def create(key: jax.Array) -> dict:
        params = model.init_weights(key, (1, options.length))
        lora = adapters(key, params)
        return {"params": params, "lora": lora, "optimizer": optimizer.init(lora)}

    def loss_of(lora: dict, params: dict, tokens: jax.Array) -> jax.Array:
        logits = model(tokens[:, :-1], params=adapted(params, lora)).logits.astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    @autopar.parallelize
    def train_step(state: dict, tokens: jax.Array) -> tuple[dict, dict]:
        loss, gradients = policy.value_and_grad(loss_of)(state["lora"], state["params"], tokens)
        updates, moments = optimizer.update(gradients, state["optimizer"])
        lora = optax.apply_updates(state["lora"], updates)
        return {"params": state["params"], "lora": lora, "optimizer": moments}, {"loss": loss}

    text = np.frombuffer("".join(pydoc_data.topics.topics.values()).encode(), np.uint8).astype(np.int32)
    windows = text[: len(text) // (options.length + 1) * (options.length + 1)].reshape(-1, options.length + 1)
    data = autopar.data.shard(windows, train_step, batch_size=options.batch_size, seed=0, epochs=None)
    with (
        autopar.checkpoint.Checkpointer(options.folder, every=50) as checkpoints,
        autopar.Monitor(train_step, tokens_per_step=options.batch_size * options.length) as monitor,
    ):
        state, start = checkpoints.restore_or(create, jax.random.key(0), step=train_step, data=data)
        for i, batch in enumerate(monitor.batches(data), start):
            if i >= options.steps:
                break
            state, metrics = train_step(state, batch)
            monitor(i, metrics)
            checkpoints.save(i + 1, state, plan=train_step, data=data)


if __name__ == "__main__":
    main()
