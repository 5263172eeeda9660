"""Graphs, recommendations, fields, differential equations, fixed points, and learning to learn."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.everyday.parts import apply_mlp, dense, float_batch, integers, joined, mlp, normal, trained
from benchmarks.zoo.case import Case, PyTree


def gnn(batch: int = 8) -> Case:
    """Graphs of a batch side by side in one list of nodes and one of edges, padded; messages are summed by segments."""
    nodes, edges, width, layers = 6, 12, 16, 2
    tx = optax.adam(1e-3)

    def init(key: jax.Array) -> PyTree:
        k = jax.random.split(key, 2 * layers + 2)
        return {
            "embed": dense(k[0], 8, width),
            "layers": [
                {"message": mlp(a, (2 * width, width, width)), "update": mlp(b, (2 * width, width, width))}
                for a, b in zip(k[2::2], k[3::2], strict=True)
            ],
            "readout": mlp(k[1], (width, width, 1)),
        }

    def loss_fn(params: PyTree, g: PyTree) -> jax.Array:
        x = g["nodes"] @ params["embed"]["w"] + params["embed"]["b"]
        for p in params["layers"]:
            pairs = jnp.concatenate([x[g["senders"]], x[g["receivers"]]], axis=-1)
            messages = apply_mlp(p["message"], pairs) * g["edge_mask"][:, None]
            summed = jax.ops.segment_sum(messages, g["receivers"], num_segments=x.shape[0])
            x = x + apply_mlp(p["update"], jnp.concatenate([x, summed], axis=-1))
        graphs = g["targets"].shape[0]
        owner = jnp.repeat(jnp.arange(graphs), nodes, total_repeat_length=x.shape[0])
        pooled = jax.ops.segment_sum(x, owner, num_segments=graphs) / nodes
        return jnp.mean((apply_mlp(params["readout"], pooled)[:, 0] - g["targets"]) ** 2)

    def make(seed: int) -> PyTree:
        random = np.random.default_rng(seed)
        first = np.repeat(np.arange(batch) * nodes, edges)
        return {
            "nodes": random.standard_normal((batch * nodes, 8), dtype=np.float32),
            "senders": (first + random.integers(0, nodes, batch * edges)).astype(np.int32),
            "receivers": (first + random.integers(0, nodes, batch * edges)).astype(np.int32),
            "edge_mask": (random.random(batch * edges) < 0.8).astype(np.float32),
            "targets": random.standard_normal(batch, dtype=np.float32),
        }

    return trained("gnn", init, loss_fn, tx, make)


def dlrm(batch: int = 8) -> Case:
    """Bags of table rows and dense features, products of all pairs, Adagrad for tables and Adam for networks."""
    tables, rows, width, bag, features = 4, 64, 16, 3, 13
    labels = {"tables": "sparse", "bottom": "dense", "top": "dense"}
    tx = optax.multi_transform({"sparse": optax.adagrad(0.05), "dense": optax.adam(1e-3)}, labels)
    pairs = np.tril_indices(tables + 1, -1)

    def init(key: jax.Array) -> PyTree:
        a, b, c = jax.random.split(key, 3)
        return {
            "tables": [normal(k, rows, width) for k in jax.random.split(a, tables)],
            "bottom": mlp(b, (features, 32, width)),
            "top": mlp(c, (len(pairs[0]) + width, 32, 1)),
        }

    def loss_fn(params: PyTree, batch: PyTree) -> tuple[jax.Array, PyTree]:
        x = apply_mlp(params["bottom"], jnp.log1p(jnp.abs(batch["dense"])))
        bags = [table[batch["sparse"][:, i]].sum(1) for i, table in enumerate(params["tables"])]
        z = jnp.stack([x, *bags], axis=1)
        products = jnp.einsum("bid,bjd->bij", z, z)[:, pairs[0], pairs[1]]
        logits = apply_mlp(params["top"], jnp.concatenate([x, products], axis=-1))[:, 0]
        clicks = (batch["clicks"] > 0).astype(jnp.float32)
        loss = optax.sigmoid_binary_cross_entropy(logits, clicks).mean()
        return loss, {"accuracy": jnp.mean((logits > 0) == (clicks > 0.5))}

    make = joined(float_batch(dense=(batch, features), clicks=(batch,)), integers(rows, sparse=(batch, tables, bag)))
    return trained("dlrm", init, loss_fn, tx, make, has_aux=True)


def nerf(batch: int = 8) -> Case:
    """Rays: stratified samples, frequencies of positions, densities composed along a ray by a cumulated product."""
    samples, frequencies, width = 16, 4, 32
    tx = optax.adam(optax.exponential_decay(5e-4, 1000, 0.1))

    def init(key: jax.Array) -> PyTree:
        a, b = jax.random.split(key)
        return {"trunk": mlp(a, (6 * frequencies, width, width, width + 1)), "color": mlp(b, (width + 3, width, 3))}

    def encode(x: jax.Array) -> jax.Array:
        scaled = (x[..., None, :] * 2.0 ** jnp.arange(frequencies)[:, None]).reshape(*x.shape[:-1], -1)
        return jnp.concatenate([jnp.sin(scaled), jnp.cos(scaled)], axis=-1)

    def render(params: PyTree, rays: PyTree, key: jax.Array) -> jax.Array:
        origins = rays["origins"]
        directions = rays["directions"] / jnp.linalg.norm(rays["directions"], axis=-1, keepdims=True)
        edges = jnp.linspace(2.0, 6.0, samples + 1)
        t = edges[:-1] + (edges[1:] - edges[:-1]) * jax.random.uniform(key, (origins.shape[0], samples))
        points = origins[:, None] + t[..., None] * directions[:, None]
        h = apply_mlp(params["trunk"], encode(points))
        density, features = jax.nn.relu(h[..., 0]), h[..., 1:]
        seen_from = jnp.broadcast_to(directions[:, None], points.shape)
        color = jax.nn.sigmoid(apply_mlp(params["color"], jnp.concatenate([features, seen_from], axis=-1)))
        steps = jnp.concatenate([t[:, 1:] - t[:, :-1], jnp.full_like(t[:, :1], 1e10)], axis=-1)
        alpha = 1 - jnp.exp(-density * steps)
        through = jnp.cumprod(1 - alpha + 1e-10, axis=-1)
        through = jnp.concatenate([jnp.ones_like(through[:, :1]), through[:, :-1]], axis=-1)
        return jnp.sum((alpha * through)[..., None] * color, axis=1)

    def loss_fn(params: PyTree, batch: PyTree, key: jax.Array) -> tuple[jax.Array, PyTree]:
        loss = jnp.mean(jnp.square(render(params, batch, key) - jax.nn.sigmoid(batch["colors"])))
        return loss, {"psnr": -10 * jnp.log10(loss)}

    make = float_batch(origins=(batch, 3), directions=(batch, 3), colors=(batch, 3))
    return trained("nerf", init, loss_fn, tx, make, has_aux=True, has_key=True)


def pinn(batch: int = 8) -> Case:
    """Burgers' equation: residuals by derivatives of the network at points of the batch, and fixed boundary points."""
    tx = optax.adam(1e-3)
    boundary = jnp.linspace(-1.0, 1.0, 16)

    def init(key: jax.Array) -> PyTree:
        return mlp(key, (2, 32, 32, 1))

    def u(params: PyTree, t: jax.Array, x: jax.Array) -> jax.Array:
        return apply_mlp(params, jnp.stack([t, x]), jnp.tanh)[0]

    def residual(params: PyTree, t: jax.Array, x: jax.Array) -> jax.Array:
        u_t = jax.grad(u, argnums=1)(params, t, x)
        u_x = jax.grad(u, argnums=2)(params, t, x)
        u_xx = jax.grad(jax.grad(u, argnums=2), argnums=2)(params, t, x)
        return u_t + u(params, t, x) * u_x - (0.01 / jnp.pi) * u_xx

    def loss_fn(params: PyTree, batch: PyTree) -> tuple[jax.Array, PyTree]:
        t, x = jax.nn.sigmoid(batch["t"]), jnp.tanh(batch["x"])
        inside = jnp.mean(jax.vmap(partial(residual, params))(t, x) ** 2)
        at_start = jax.vmap(lambda x: u(params, jnp.zeros(()), x))(boundary)
        initial = jnp.mean((at_start + jnp.sin(jnp.pi * boundary)) ** 2)
        return inside + initial, {"inside": inside, "initial": initial}

    return trained("pinn", init, loss_fn, tx, float_batch(t=(batch,), x=(batch,)), has_aux=True)


def neural_ode(batch: int = 8) -> Case:
    """Trajectories from first points by Runge and Kutta's fourth-order method, each step computed again backwards."""
    width, dims, times, substeps = 32, 3, 6, 4
    tx = optax.adabelief(1e-3)

    def init(key: jax.Array) -> PyTree:
        return mlp(key, (dims + 1, width, width, dims))

    def field(params: PyTree, t: jax.Array, y: jax.Array) -> jax.Array:
        return apply_mlp(params, jnp.concatenate([y, t[None]]), jax.nn.softplus)

    def solve(params: PyTree, y0: jax.Array) -> jax.Array:
        """One trajectory, (time, dimension)."""
        h = 1.0 / (times * substeps)

        @jax.checkpoint
        def rk4(y: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
            k1 = field(params, t, y)
            k2 = field(params, t + h / 2, y + h / 2 * k1)
            k3 = field(params, t + h / 2, y + h / 2 * k2)
            k4 = field(params, t + h, y + h * k3)
            y = y + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
            return y, y

        _, ys = jax.lax.scan(rk4, y0, h * jnp.arange(times * substeps))
        return ys[substeps - 1 :: substeps]

    def loss_fn(params: PyTree, batch: PyTree) -> jax.Array:
        predicted = jax.vmap(solve, in_axes=(None, 0))(params, batch["trajectories"][:, 0])
        return jnp.mean((predicted - batch["trajectories"][:, 1:]) ** 2)

    return trained("neural_ode", init, loss_fn, tx, float_batch(trajectories=(batch, times + 1, dims)))


def maml(batch: int = 8) -> Case:
    """Regression tasks: some gradient steps on each task's support, the loss on its query, through them."""
    shots, inner_steps, inner_rate = 5, 2, 0.05
    tx = optax.adam(1e-3)

    def init(key: jax.Array) -> PyTree:
        return mlp(key, (2, 32, 32, 1))

    def mse(params: PyTree, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((apply_mlp(params, x, jnp.tanh) - y) ** 2)

    def task_loss(params: PyTree, task: PyTree) -> jax.Array:
        def adapt(p: PyTree, _: None) -> tuple[PyTree, jax.Array]:
            loss, grads = jax.value_and_grad(mse)(p, task["support_x"], task["support_y"])
            return jax.tree.map(lambda p, g: p - inner_rate * g, p, grads), loss

        adapted, _ = jax.lax.scan(adapt, params, None, length=inner_steps)
        return mse(adapted, task["query_x"], task["query_y"])

    def loss_fn(params: PyTree, batch: PyTree) -> jax.Array:
        return jax.vmap(partial(task_loss, params))(batch).mean()

    x, y = (batch, shots, 2), (batch, shots, 1)
    make = float_batch(support_x=x, support_y=y, query_x=x, query_y=y)
    return trained("maml", init, loss_fn, tx, make)


STEPS = (gnn, dlrm, nerf, pinn, neural_ode, maml)
