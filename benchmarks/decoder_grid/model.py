"""A decoder with the choices of a draw: its state, its training step and a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

Tree = Any
POLICIES: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "none": lambda layer: layer,
    "full": jax.checkpoint,
    "dots": lambda layer: jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_saveable),
    "dots_no_batch": lambda layer: jax.checkpoint(
        layer, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    ),
}
OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "adamw": lambda: optax.adamw(1e-3, weight_decay=0.1),
    "sgd": lambda: optax.sgd(1e-2, momentum=0.9),
    "adafactor": lambda: optax.adafactor(1e-3, min_dim_size_to_factor=32),
    "lion": lambda: optax.lion(1e-4),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoder:
    """The choices of one decoder and of its training step.

    Attributes:
        scans: Layers are stacked and scanned over; else a Python loop.
        remat: What `jax.checkpoint` around each layer saves, a key of `POLICIES`.
        casts: Parameters are float32, arithmetic is bfloat16 except for norms and the loss.
        slices_tokens: The step cuts inputs and targets out of one array of tokens.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int
    length: int
    batch: int
    scans: bool
    remat: str
    casts: bool
    rope: bool
    rms: bool
    gated: bool
    tied: bool
    optimizer: str
    slices_tokens: bool

    @property
    def dtype(self) -> Any:
        return jnp.bfloat16 if self.casts else jnp.float32

    def parameters(self, key: jax.Array) -> Tree:
        keys = iter(jax.random.split(key, 8))
        head = self.width // self.heads

        def drawn(*shape: int) -> jax.Array:
            return jax.random.normal(next(keys), shape) * shape[-2] ** -0.5

        gain = lambda *leading: {  # noqa: E731
            "gain": jnp.ones((*leading, self.width)),
            **({} if self.rms else {"bias": jnp.zeros((*leading, self.width))}),
        }
        n = self.layers
        layer = {
            "attention_norm": gain(n),
            "qkv": drawn(n, self.width, (self.heads + 2 * self.kv_heads) * head),
            "out": drawn(n, self.heads * head, self.width),
            "mlp_norm": gain(n),
            "up": drawn(n, self.width, self.hidden * (2 if self.gated else 1)),
            "down": drawn(n, self.hidden, self.width),
        }
        layers = layer if self.scans else [jax.tree.map(lambda a, i=i: a[i], layer) for i in range(n)]
        found = {"embedding": drawn(self.vocabulary, self.width), "layers": layers, "norm": gain()}
        if not self.rope:
            found["positions"] = drawn(self.length, self.width)
        if not self.tied:
            found["head"] = drawn(self.width, self.vocabulary)
        return found

    def init(self, key: jax.Array) -> Tree:
        parameters = self.parameters(key)
        return {"parameters": parameters, "optimizer": OPTIMIZERS[self.optimizer]().init(parameters)}

    def batch_of(self, seed: int) -> Tree:
        tokens = np.random.default_rng(seed).integers(
            self.vocabulary, size=(self.batch, self.length + 1), dtype="int32"
        )
        if self.slices_tokens:
            return {"tokens": tokens}
        return {"inputs": tokens[:, :-1].copy(), "targets": tokens[:, 1:].copy()}

    def norm(self, x: jax.Array, p: Tree) -> jax.Array:
        x = x.astype(jnp.float32)
        if self.rms:
            normed = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * p["gain"]
        else:
            x = x - jnp.mean(x, -1, keepdims=True)
            normed = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * p["gain"] + p["bias"]
        return normed.astype(self.dtype)

    def rotated(self, x: jax.Array) -> jax.Array:
        """Rotary positions of (batch, length, heads, head)."""
        half = x.shape[-1] // 2
        angles = jnp.arange(x.shape[1])[:, None] * 10_000.0 ** (-jnp.arange(half) / half)
        sin, cos = jnp.sin(angles)[:, None, :].astype(x.dtype), jnp.cos(angles)[:, None, :].astype(x.dtype)
        a, b = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def attention(self, x: jax.Array, p: Tree) -> jax.Array:
        (b, t, _), head = x.shape, self.width // self.heads
        qkv = x @ p["qkv"].astype(self.dtype)
        q, k, v = jnp.split(qkv, [self.heads * head, (self.heads + self.kv_heads) * head], axis=-1)
        q = q.reshape(b, t, self.heads, head)
        k, v = (a.reshape(b, t, self.kv_heads, head) for a in (k, v))
        if self.rope:
            q, k = self.rotated(q), self.rotated(k)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return mixed.reshape(b, t, self.heads * head) @ p["out"].astype(self.dtype)

    def mlp(self, x: jax.Array, p: Tree) -> jax.Array:
        h = x @ p["up"].astype(self.dtype)
        if self.gated:
            gate, h = jnp.split(h, 2, axis=-1)
            h = jax.nn.silu(gate) * h
        else:
            h = jax.nn.gelu(h)
        return h @ p["down"].astype(self.dtype)

    def layer(self, x: jax.Array, p: Tree) -> jax.Array:
        x = x + self.attention(self.norm(x, p["attention_norm"]), p)
        return x + self.mlp(self.norm(x, p["mlp_norm"]), p)

    def loss(self, parameters: Tree, batch: Tree) -> jax.Array:
        if self.slices_tokens:
            inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        else:
            inputs, targets = batch["inputs"], batch["targets"]
        x = parameters["embedding"].astype(self.dtype)[inputs]
        if not self.rope:
            x = x + parameters["positions"].astype(self.dtype)
        layer = POLICIES[self.remat](self.layer)
        if self.scans:
            x, _ = jax.lax.scan(lambda x, p: (layer(x, p), None), x, parameters["layers"])
        else:
            for p in parameters["layers"]:
                x = layer(x, p)
        x = self.norm(x, parameters["norm"])
        head = parameters["embedding"].T if self.tied else parameters["head"]
        logits = (x @ head.astype(self.dtype)).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    def step(self, state: Tree, batch: Tree) -> tuple[Tree, jax.Array]:
        loss, gradients = jax.value_and_grad(self.loss)(state["parameters"], batch)
        updates, optimizer = OPTIMIZERS[self.optimizer]().update(gradients, state["optimizer"], state["parameters"])
        parameters = optax.apply_updates(state["parameters"], updates)
        return {"parameters": parameters, "optimizer": optimizer}, loss


# 1.3 billion parameters in 24 layers, 32 sequences of 2,048 tokens; and with `jax.checkpoint` round each layer.
BILLION = Decoder(
    layers=24, width=2048, heads=16, kv_heads=16, hidden=8192, vocabulary=50_304, length=2048, batch=32, scans=True,
    remat="none", casts=True, rope=True, rms=True, gated=False, tied=False, optimizer="adamw", slices_tokens=False,
)  # fmt: skip
NAMED = {
    "1.3B": BILLION,
    "1.3B unrolled": dataclasses.replace(BILLION, scans=False),
    "1.3B checkpointed": dataclasses.replace(BILLION, remat="full"),
    "1.3B Llama": dataclasses.replace(BILLION, remat="full", kv_heads=4, gated=True),
}

SMALL = dict(
    layers=(2, 4, 6, 8, 12), width=(64, 128, 256, 512), vocabulary=(256, 1024, 8192), length=(32, 64, 128, 256),
    batch=(8, 16, 32, 64),
)  # fmt: skip
LARGE = dict(
    layers=(6, 9, 12, 24, 32), width=(1024, 2048, 4096), vocabulary=(32_000, 50_304), length=(1024, 2048, 4096),
    batch=(16, 32, 64, 128),
)  # fmt: skip


def drawn(seed: int, number: int) -> Decoder:
    """The decoder of a number: every second is small."""
    rng = np.random.default_rng((seed, number))

    def of(choices: Any) -> Any:
        return choices[int(rng.integers(len(choices)))]

    sizes = {name: of(choices) for name, choices in (SMALL if number % 2 == 0 else LARGE).items()}
    heads = of([h for h in (4, 8, 16, 32) if 16 <= sizes["width"] // h <= 128])
    return Decoder(
        **sizes,
        heads=heads,
        kv_heads=of([n for n in (heads, heads, heads // 2, heads // 4) if n]),
        hidden=sizes["width"] * of((2, 3, 4)),
        scans=of((False, True)),
        remat=of(tuple(POLICIES)),
        casts=of((False, True)),
        rope=of((False, True)),
        rms=of((False, True)),
        gated=of((False, True)),
        tied=of((False, True)),
        optimizer=of(tuple(OPTIMIZERS)),
        slices_tokens=of((False, True)),
    )
