"""Training steps with mixtures of experts that sort their rows, as people write them."""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

WIDTH, HIDDEN, EXPERTS, TOP_K, LAYERS = 8, 16, 8, 2, 2
BATCH, LENGTH = 16, 4


def route(x, router, skew=0.0):
    """The probability of every expert, and the weights and numbers of those chosen. `skew` favours the first expert."""
    probabilities = jax.nn.softmax(x @ router + skew * (jnp.arange(EXPERTS) == 0))
    weights, chosen = jax.lax.top_k(probabilities, TOP_K)
    return probabilities, weights / jnp.sum(weights, -1, keepdims=True), chosen


def gated(rows, p, sizes):
    product = functools.partial(jax.lax.ragged_dot, group_sizes=sizes)
    return product(jax.nn.silu(product(rows, p["gate"])) * product(rows, p["up"]), p["down"])


def scattered(x, p, chosen, weights):
    """Weighted in sorted order and added up by `.at[].add`; sizes by `jnp.bincount`."""
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat)
    out = gated(jnp.take(x, order // TOP_K, axis=0), p, jnp.bincount(flat, length=EXPERTS))
    return jnp.zeros_like(x).at[order // TOP_K].add(out * weights.reshape(-1)[order][:, None])


def unsorted(x, p, chosen, weights):
    """Brought back by the argsort of the order, and weighted there; sizes by one-hot sums."""
    order = jnp.argsort(chosen.reshape(-1))
    sizes = jnp.sum(jax.nn.one_hot(chosen, EXPERTS, dtype=jnp.int32), axis=(0, 1))
    out = gated(x[order // TOP_K], p, sizes)[jnp.argsort(order)]
    return jnp.einsum("tkd,tk->td", out.reshape(-1, TOP_K, x.shape[-1]), weights)


def repeated(x, p, chosen, weights):
    """Rows repeated for each choice before they are sorted; the inverse by a scatter, sizes from sorted experts."""
    order = jnp.argsort(chosen.ravel(), stable=False)
    rows = jnp.repeat(x, TOP_K, axis=0)[order]
    sizes = jnp.bincount(chosen.ravel()[order], length=EXPERTS).astype(jnp.int32)
    out = gated(rows, p, sizes) + p["bias"][chosen.ravel()[order]]
    inverse = jnp.zeros_like(order).at[order].set(jnp.arange(order.size))
    back = jnp.take(out, inverse, axis=0)
    return jnp.sum(back.reshape(-1, TOP_K, x.shape[-1]) * weights[..., None], axis=1)


@jax.custom_vjp
def permute(rows, order):
    """Rows in another order, whose gradient is a gather too."""
    return rows[order]


permute.defvjp(lambda rows, order: (rows[order], order), lambda order, g: (g[jnp.argsort(order)], None))


def permuted(x, p, chosen, weights):
    """Tunix's: repeated rows to the order and back; sorts of the order, and in the gradient of its inverse."""
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat)
    rows = permute(jnp.repeat(x, TOP_K, axis=0), order)
    out = permute(gated(rows, p, jnp.bincount(flat[order], length=EXPERTS)), jnp.argsort(order))
    return jnp.einsum("tkd,tk->td", out.reshape(-1, TOP_K, x.shape[-1]), weights)


def keyed(x, p, chosen, weights):
    """`jax.lax.sort` of experts with tokens and weights beside them; added up by `jax.ops.segment_sum`."""
    tokens = jnp.arange(chosen.size) // TOP_K
    experts, tokens, weights = jax.lax.sort((chosen.reshape(-1), tokens, weights.reshape(-1)), num_keys=1)
    sizes = jnp.zeros(EXPERTS, jnp.int32).at[experts].add(1)
    out = gated(x[tokens], p, sizes) * weights[:, None]
    return jax.ops.segment_sum(out, tokens, num_segments=x.shape[0])


def scaled(x, p, chosen, weights):
    """Tokens by a gather of repeated numbers; a scale for each expert, numbered by `jnp.repeat` of sizes."""
    order = chosen.ravel().argsort()
    rows = x[jnp.repeat(jnp.arange(x.shape[0]), TOP_K)[order], :]
    sizes = jnp.sum(jax.nn.one_hot(chosen, EXPERTS, dtype=jnp.int32), axis=(0, 1))
    experts = jnp.repeat(jnp.arange(EXPERTS), sizes, total_repeat_length=order.size)
    out = gated(rows, p, sizes) * (1 + p["bias"][:, 0])[experts, None]
    return jnp.einsum("tkd,tk->td", out[order.argsort()].reshape(*chosen.shape, -1), weights)


def shared(x, p, chosen, weights):
    """DeepSeek's: experts chosen by a corrected sigmoid from the best groups of experts, weighted by the plain one, and
    an expert beside them that all tokens share.
    """
    scores = jax.nn.sigmoid(x @ p["router"] + p["skew"] * (jnp.arange(EXPERTS) == 0))
    corrected = scores + p["bias"][:, 0]
    groups = corrected.reshape(-1, 4, EXPERTS // 4)
    _, best = jax.lax.top_k(jnp.sum(jax.lax.top_k(groups, 2)[0], -1), 2)
    within = jnp.sum(jax.nn.one_hot(best, 4), axis=1)[..., None] > 0
    _, chosen = jax.lax.top_k(jnp.where(within, groups, -jnp.inf).reshape(scores.shape), TOP_K)
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
    weights = 2.5 * weights / (jnp.sum(weights, -1, keepdims=True) + 1e-20)
    beside = (jax.nn.silu(x @ p["gate"][0]) * (x @ p["up"][0])) @ p["down"][0]
    return beside + unsorted(x, p, chosen, weights.astype(x.dtype))


def by_choice(x, p, chosen, weights):
    """All first choices before all second ones."""
    flat = chosen.T.reshape(-1)
    order = jnp.argsort(flat)
    tokens = jnp.tile(jnp.arange(x.shape[0]), TOP_K)[order]
    out = gated(x[tokens], p, jnp.bincount(flat, length=EXPERTS)) * weights.T.reshape(-1)[order][:, None]
    return jnp.zeros_like(x).at[tokens].add(out)


def numbered(x, p, chosen, weights):
    """Tokens are numbered by data, from which no order is seen."""
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat)
    tokens = ((jnp.cumsum(jnp.ones_like(flat)) - 1) // TOP_K)[order]
    out = gated(x[tokens], p, jnp.bincount(flat, length=EXPERTS)) * weights.reshape(-1)[order][:, None]
    return jnp.zeros_like(x).at[tokens].add(out)


def fused(x, p, chosen, weights):
    """Gate and up in one matrix, the halves of whose product are gate and up."""
    order, sizes = jnp.argsort(chosen.reshape(-1)), jnp.bincount(chosen.reshape(-1), length=EXPERTS)
    both = jax.lax.ragged_dot(x[order // TOP_K], jnp.concatenate([p["gate"], p["up"]], axis=-1), sizes)
    gate, up = jnp.split(both, 2, axis=-1)
    out = jax.lax.ragged_dot(jax.nn.silu(gate) * up, p["down"], sizes) * weights.reshape(-1)[order][:, None]
    return jnp.zeros_like(x).at[order // TOP_K].add(out)


def fused_in_parts(x, p, chosen, weights):
    """Gemma 4's: gate and up are parts of a matrix, of whose product they are taken by a dimension of two."""
    order, sizes = jnp.argsort(chosen.ravel()), jnp.bincount(chosen.ravel(), length=EXPERTS)
    both = jnp.stack([p["gate"], p["up"]], axis=1).transpose(0, 2, 1, 3).reshape(EXPERTS, -1, 2 * HIDDEN)
    made = jax.lax.ragged_dot(x[order // TOP_K], both, sizes).reshape(-1, 2, HIDDEN)
    out = jax.lax.ragged_dot(jax.nn.gelu(made[:, 0]) * made[:, 1], p["down"], sizes)[jnp.argsort(order)]
    return jnp.einsum("tkd,tk->td", out.reshape(-1, TOP_K, x.shape[-1]), weights)


def biased(x, p, chosen, weights):
    """GPT-OSS's: columns of gate and up alternate, and each expert adds a bias to both of its products."""
    order, sizes = jnp.argsort(chosen.reshape(-1)), jnp.bincount(chosen.reshape(-1), length=EXPERTS)
    experts = chosen.reshape(-1)[order]
    both = jnp.stack([p["gate"], p["up"]], axis=-1).reshape(EXPERTS, -1, 2 * HIDDEN)
    made = jax.lax.ragged_dot(x[order // TOP_K], both, sizes) + p["inner_bias"][experts]
    gate, up = jnp.clip(made[:, ::2], max=7.0), jnp.clip(made[:, 1::2], -7.0, 7.0)
    hidden = (up + 1) * gate * jax.nn.sigmoid(1.702 * gate)
    out = jax.lax.ragged_dot(hidden, p["down"], sizes) + p["bias"][experts]
    return jnp.zeros_like(x).at[order // TOP_K].add(out * weights.reshape(-1)[order][:, None])


def in_columns(x, p, chosen, weights):
    """A function of every other column alone, told by a mask, and results that are added to the tokens."""
    order, sizes = jnp.argsort(chosen.reshape(-1)), jnp.bincount(chosen.reshape(-1), length=EXPERTS)
    both = jax.lax.ragged_dot(x[order // TOP_K], jnp.concatenate([p["gate"], p["up"]], axis=-1), sizes)
    gate, up = jnp.split(jnp.where(jnp.arange(2 * HIDDEN) % 2 == 0, both, jnp.tanh(both)), 2, axis=-1)
    out = jax.lax.ragged_dot(jax.nn.silu(gate) * up, p["down"], sizes) * weights.reshape(-1)[order][:, None]
    return (0.5 * x).at[order // TOP_K].add(jnp.where(jnp.arange(WIDTH) < 3, out, -out))


@jax.custom_vjp
def in_order(rows, order):
    return rows[order]


in_order.defvjp(lambda rows, order: (rows[order], order), lambda order, g: (in_order(g, jnp.argsort(order)), None))


def named(x, p, chosen, weights):
    """MaxText's: what is sorted has names, gradients are sorted back by the argsort of an order, rows beyond the sum of
    all sizes are masked.
    """
    name = functools.partial(checkpoint_name, name="sorted")
    order, sizes = jnp.argsort(chosen.reshape(-1)), name(jnp.bincount(chosen.reshape(-1), length=EXPERTS))
    rows, experts, order = name(x[order // TOP_K]), name(chosen.reshape(-1)[order]), name(order)
    mask = jnp.arange(len(rows)) < jnp.sum(sizes)
    out = jnp.where(mask[:, None], gated(jnp.where(mask[:, None], rows, 0), p, sizes), 0) + p["bias"][experts]
    back = in_order(out, jnp.argsort(order)).reshape(-1, TOP_K, x.shape[-1])
    return jnp.einsum("tkd,tk->td", back, weights)


LAYERS_AS_WRITTEN = {
    "named": named,
    "in_columns": in_columns,
    "shared": shared,
    "by_choice": by_choice,
    "numbered": numbered,
    "fused": fused,
    "fused_in_parts": fused_in_parts,
    "biased": biased,
    "scattered": scattered,
    "unsorted": unsorted,
    "repeated": repeated,
    "permuted": permuted,
    "keyed": keyed,
    "scaled": scaled,
}


def state(layers=LAYERS, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = {
        "router": (WIDTH, EXPERTS), "gate": (EXPERTS, WIDTH, HIDDEN), "up": (EXPERTS, WIDTH, HIDDEN),
        "down": (EXPERTS, HIDDEN, WIDTH),
    }  # fmt: skip
    made = {n: 0.3 * jax.random.normal(k, (layers, *s), dtype) for (n, s), k in zip(shapes.items(), keys, strict=True)}
    key = jax.random.key(2)
    biases = {"bias": (EXPERTS, WIDTH), "inner_bias": (EXPERTS, 2 * HIDDEN)}
    return made | {n: 0.1 * jax.random.normal(key, (layers, *s), dtype) for n, s in biases.items()}


def batch():
    return jax.random.normal(jax.random.key(1), (BATCH, LENGTH, WIDTH))


def step(layer, scanned=False, checkpoint=False, dtype=None, skew=0.0, balance=0.0, policy=None):
    """Two layers with a residual each, and the loss of Switch that balances experts (`balance`)."""

    def block(x, p):
        if dtype is not None:
            p = jax.tree.map(lambda a: a.astype(dtype), p)
        rows = x.reshape(-1, x.shape[-1])
        probabilities, weights, chosen = route(rows, p["router"], skew)
        p = p | {"skew": skew}
        made = layer(rows.astype(p["gate"].dtype), p, chosen, weights.astype(p["gate"].dtype))
        x = x + made.reshape(x.shape).astype(x.dtype)
        if not balance:
            return x, 0.0
        part = jnp.mean(jax.nn.one_hot(chosen, EXPERTS), axis=(0, 1))
        return x, balance * EXPERTS * jnp.sum(part * jnp.mean(probabilities, axis=0))

    if checkpoint:
        block = jax.checkpoint(block, policy=policy)

    def loss(state, batch):
        if scanned:
            x, losses = jax.lax.scan(block, batch, state)
            return jnp.mean(x**2) + jnp.sum(losses)
        x, total = batch, 0.0
        for i in range(len(state["router"])):
            x, more = block(x, jax.tree.map(lambda a, i=i: a[i], state))
            total += more
        return jnp.mean(x**2) + total

    def of(state, batch):
        value, gradients = jax.value_and_grad(loss)(state, batch)
        return jax.tree.map(lambda p, g: p - 0.3 * g, state, gradients), value

    return of
