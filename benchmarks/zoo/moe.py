"""Mixture-of-experts language model in plain jax.numpy: top-k routing, and dispatch by einsum as in GShard, or of rows
sorted by their expert (`ragged`), of which none is dropped.

D. Lepikhin et al., "GShard: Scaling Giant Models with Conditional Computation and Automatic Sharding", 2020,
section 2.2. Left out: the random dispatch of the second expert.
"""

import functools

import jax
import jax.numpy as jnp
import optax
from jax.experimental.pallas.ops.tpu.megablox import gmm
from jax.typing import DTypeLike

from benchmarks.zoo.case import Case, PyTree
from benchmarks.zoo.data import next_token_batch
from benchmarks.zoo.gpt_scan import attention, rms_norm
from benchmarks.zoo.training import cross_entropy, training_case

BALANCE_WEIGHT = 0.01


def route(gates: jax.Array, *, top_k: int, capacity: int) -> tuple[jax.Array, jax.Array]:
    """Which token goes to which slot of which expert.

    Args:
        gates: Probabilities, (group, token, expert); a group is one sequence and fills experts on its own.
        top_k: Experts per token.
        capacity: Slots of each expert for each group; tokens that find no slot pass by on the residual.

    Returns:
        The combining weights, (group, token, expert, slot), and the loss that balances the experts' loads.
    """
    experts = gates.shape[-1]
    remaining, filled, combine = gates, jnp.zeros((gates.shape[0], 1, experts)), 0.0
    first_choice = jax.nn.one_hot(jnp.argmax(gates, axis=-1), experts)
    for _ in range(top_k):
        choice = jax.nn.one_hot(jnp.argmax(remaining, axis=-1), experts)
        slot = jnp.cumsum(choice, axis=1) - choice + filled
        placed = choice * (slot < capacity)
        slots = jax.nn.one_hot(jnp.sum(slot * placed, axis=-1).astype(jnp.int32), capacity)
        combine += jnp.einsum("gte,gts->gtes", placed * gates, slots)
        filled += choice.sum(axis=1, keepdims=True)
        remaining *= 1 - choice
    balance = experts * jnp.mean(jnp.sum(first_choice.mean(axis=1) * gates.mean(axis=1), axis=-1))
    return combine, balance


def experts_layer(x: jax.Array, params: PyTree, *, top_k: int, capacity: int) -> tuple[jax.Array, jax.Array]:
    """(group, token, width) to the same and the balancing loss."""
    gates = jax.nn.softmax((x @ params["router"]).astype(jnp.float32))
    combine, balance = route(gates, top_k=top_k, capacity=capacity)
    combine = combine.astype(x.dtype)
    dispatched = jnp.einsum("gtes,gtw->egsw", (combine > 0).astype(x.dtype), x)
    hidden = jax.nn.gelu(jnp.einsum("egsw,ewf->egsf", dispatched, params["expert_in"]))
    outputs = jnp.einsum("egsf,efw->egsw", hidden, params["expert_out"])
    return jnp.einsum("gtes,egsw->gtw", combine, outputs), balance


def ragged_experts_layer(x: jax.Array, params: PyTree, *, top_k: int, by: str) -> tuple[jax.Array, jax.Array]:
    """(group, token, width) to the same and the balancing loss, by products of sorted rows; experts are gated. `by`:
    "ragged_dot", or "gmm", a kernel that multiplies each row with the matrix of its own expert alone.
    """
    product = jax.lax.ragged_dot
    if by == "gmm":
        product = functools.partial(gmm, preferred_element_type=x.dtype)
    rows, experts = x.reshape(-1, x.shape[-1]), params["router"].shape[-1]
    gates = jax.nn.softmax((rows @ params["router"]).astype(jnp.float32))
    weights, chosen = jax.lax.top_k(gates, top_k)
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    order, sizes = jnp.argsort(chosen.reshape(-1)), jnp.bincount(chosen.reshape(-1), length=experts)
    gate, up = jnp.split(product(rows[order // top_k], params["expert_in"], sizes), 2, axis=-1)
    outputs = product(jax.nn.silu(gate) * up, params["expert_out"], sizes)
    back = outputs[jnp.argsort(order)].reshape(-1, top_k, x.shape[-1])
    part = jnp.mean(jax.nn.one_hot(chosen, experts), axis=(0, 1))
    balance = experts * jnp.sum(part * jnp.mean(gates, axis=0))
    return jnp.einsum("tkw,tk->tw", back, weights.astype(x.dtype)).reshape(x.shape), balance


def moe(
    *,
    layers: int = 2,
    width: int = 32,
    heads: int = 4,
    experts: int = 8,
    every: int = 1,
    top_k: int = 2,
    capacity_factor: float = 1.25,
    feed_forward_ratio: int = 4,
    ragged: int = 0,
    by: str = "ragged_dot",
    vocabulary: int = 64,
    length: int = 16,
    batch: int = 8,
    dtype: DTypeLike = jnp.float32,
    optimizer: optax.GradientTransformation | None = None,
    name: str = "moe",
) -> Case:
    """Layers of attention and `experts` feed-forward networks, of which each token visits `top_k`.

    Only one in `every` layers has experts, the last of them; the others have one feed-forward network. `ragged`: the
    inner width of experts whose rows are sorted, and multiplied `by` a product (`ragged_experts_layer`); 0: experts
    have a capacity, and the others' width. Parameters are
    float32 whatever `dtype` is, and so is the routing; gradients and their sums over micro-batches are of `dtype`, as
    Alpa's are.
    """
    capacity = round(capacity_factor * top_k * length / experts)

    def init_params(key: jax.Array) -> PyTree:
        def normal(key: jax.Array, *shape: int) -> jax.Array:
            return 0.1 * jax.random.normal(key, shape)

        def init_layer(number: int, key: jax.Array) -> PyTree:
            keys, inner = jax.random.split(key, 5), feed_forward_ratio * width
            made = {
                "attention_scale": jnp.ones(width),
                "qkv": normal(keys[0], width, 3, heads, width // heads),
                "attention_out": normal(keys[1], heads, width // heads, width),
            }
            if (number + 1) % every:
                return made | {
                    "feed_forward_scale": jnp.ones(width),
                    "feed_forward_in": normal(keys[3], width, inner),
                    "feed_forward_out": normal(keys[4], inner, width),
                }
            return made | {
                "experts_scale": jnp.ones(width),
                "router": normal(keys[2], width, experts),
                "expert_in": normal(keys[3], experts, width, 2 * ragged or inner),
                "expert_out": normal(keys[4], experts, ragged or inner, width),
            }

        embedding_key, *layer_keys = jax.random.split(key, layers + 1)
        made = [init_layer(number, key) for number, key in enumerate(layer_keys)]
        return {"embedding": normal(embedding_key, vocabulary, width), "layers": made}

    def loss(params: PyTree, batch: PyTree) -> jax.Array:
        x, balance = params["embedding"][batch["tokens"]], 0.0
        for layer in params["layers"]:
            x = x + attention(rms_norm(x, layer["attention_scale"]), layer["qkv"], layer["attention_out"])
            if "router" not in layer:
                h = rms_norm(x, layer["feed_forward_scale"]) @ layer["feed_forward_in"]
                x = x + jax.nn.gelu(h) @ layer["feed_forward_out"]
                continue
            h = rms_norm(x, layer["experts_scale"])
            if ragged:
                y, layer_balance = ragged_experts_layer(h, layer, top_k=top_k, by=by)
            else:
                y, layer_balance = experts_layer(h, layer, top_k=top_k, capacity=capacity)
            x, balance = x + y, balance + layer_balance
        return cross_entropy(x @ params["embedding"].T, batch["targets"]) + BALANCE_WEIGHT * balance

    return training_case(
        name=name,
        init_params=init_params,
        loss=loss,
        batch=next_token_batch(batch=batch, length=length, vocabulary=vocabulary),
        optimizer=optimizer,
        dtype=dtype,
    )


def gshard_moe(**sizes) -> Case:
    """Every other layer has experts, all networks are twice as wide inside: as Alpa sized it (OSDI 2022, table 6).

    `gshard_moe(layers=8, width=768, heads=16, experts=8, vocabulary=32_000, length=1024)` is its 380M. Capacity is what
    the tokens need if experts are equally loaded. Alpa's groups of 2,048 tokens are two sequences, ours is one.
    """
    return moe(**{"every": 2, "feed_forward_ratio": 8, "capacity_factor": 1.0, "name": "gshard_moe"} | sizes)
