"""Steps with `shard_map` islands, for the tests of islands."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, PartitionSpec

B, W, F = 16, 8, 16
P = PartitionSpec


def mesh_of(**sizes):
    names = tuple(sizes)
    return jax.make_mesh(tuple(sizes.values()), names, axis_types=(AxisType.Auto,) * len(names))


def rows(devices):
    """An island without collectives: rows of a product."""
    return jax.shard_map(
        lambda x, w: jnp.tanh(x @ w), mesh=mesh_of(x=devices), in_specs=(P("x"), P()), out_specs=P("x")
    )


def normalised(devices):
    """An island with a mean over all rows, a loop and a permute."""

    def body(x, w):
        x = x - lax.pmean(jnp.mean(x, 0), "i")
        x = x + lax.ppermute(x, "i", [(k, (k + 1) % devices) for k in range(devices)])
        out, _ = lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=2)
        return out * (1.0 + lax.axis_index("i"))

    return jax.shard_map(body, mesh=mesh_of(i=devices), in_specs=(P("i"), P()), out_specs=P("i"))


def megatron(data, model):
    """Two matrices split over one axis, rows over the other."""

    def body(x, up, down):
        return lax.psum(jnp.tanh(x @ up) @ down, "model")

    return jax.shard_map(
        body, mesh=mesh_of(data=data, model=model),
        in_specs=(P("data"), P(None, "model"), P("model")), out_specs=P("data"),
    )  # fmt: skip


def nested(data, model, check_vma=False):
    """Rows split over one axis by the outer island, a product over the other by the one inside of it."""

    def body(x, up, down):
        inner = jax.shard_map(
            lambda x, up, down: lax.psum(jnp.tanh(x @ up) @ down, "model"),
            in_specs=(P(), P(None, "model"), P("model")), out_specs=P(), axis_names={"model"}, check_vma=check_vma,
        )  # fmt: skip
        return jnp.sin(inner(x, up, down))

    return jax.shard_map(
        body, mesh=mesh_of(data=data, model=model), in_specs=(P("data"), P(), P()), out_specs=P("data"),
        axis_names={"data"}, check_vma=check_vma,
    )  # fmt: skip


def step_of(island, *names):
    """A training step that calls an island on the batch's rows and some parameters."""

    def loss(state, batch):
        x = batch["x"] @ state["in"]
        for _ in range(2):
            x = x + island(x, *(state[name] for name in names))
        return jnp.mean((x @ state["out"] - batch["y"]) ** 2)

    def train_step(state, batch):
        value, gradients = jax.value_and_grad(loss)(state, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients), value

    return train_step


def arguments():
    keys = iter(jax.random.split(jax.random.key(0), 8))
    sizes = {"in": (W, W), "out": (W, W), "square": (W, W), "up": (W, F), "down": (F, W)}
    state = {name: 0.4 * jax.random.normal(next(keys), s) for name, s in sizes.items()}
    return state, {name: jax.random.normal(next(keys), (B, W)) for name in "xy"}
