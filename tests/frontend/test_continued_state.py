"""Which results continue the state: what optimizers return does, gradients do not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from autopar.frontend.continued_state import continued_arguments
from autopar.frontend.tracing import trace

BATCH = {"x": jnp.ones((16, 8)), "y": jnp.ones((16, 8))}


def parameters():
    return {"matrix": jnp.ones((8, 8)), "bias": jnp.ones((8,)), "scale": jnp.ones(())}


@jax.custom_vjp
def activation(x):
    return jnp.tanh(x)


activation.defvjp(lambda x: (jnp.tanh(x), x), lambda x, cotangent: (cotangent * (1 - jnp.tanh(x) ** 2),))


def loss(params, batch):
    """Its penalty has gradients that are multiples of the parameters, that of its scale is a product of the scale."""
    x = activation(batch["x"] @ params["matrix"] + params["bias"]) * jnp.exp(params["scale"])
    penalty = sum(jnp.sum(p**2) for p in jax.tree.leaves(params))
    return jnp.mean((x - batch["y"]) ** 2) + 1e-3 * penalty


def continued(function, *args):
    names = ["state", "batch", *(f"argument {i}" for i in range(2, len(args)))]
    traced = trace(function, args, names=names, donate=(0,), batch=(1,))
    assert traced.tied, "a result has the tree and the shapes of the state"
    return bool(continued_arguments(traced))


# Gradients.


def scanned_loss(params, batch):
    layers = jnp.stack([params["matrix"]] * 2)
    x, _ = jax.lax.scan(jax.checkpoint(lambda x, layer: (jnp.tanh(x @ layer), None)), batch["x"], layers)
    return loss(params, batch | {"x": x})


def clipped(params, batch):
    gradients = jax.grad(loss)(params, batch)
    factor = jnp.minimum(1.0, 1 / optax.tree.norm(gradients))
    return jax.tree.map(lambda g: jnp.nan_to_num(g) * factor, gradients)


def unscaled(params, batch):
    gradients = jax.grad(lambda p: 1024 * loss(p, batch))(params)
    return jax.lax.cond(
        jnp.isfinite(gradients["scale"]), lambda g: jax.tree.map(lambda v: v / 1024, g), zeros, gradients
    )


def zeros(tree):
    return jax.tree.map(jnp.zeros_like, tree)


def accumulated(params, batch):
    parts = jax.tree.map(lambda x: x.reshape(4, 4, 8), batch)

    def body(total, part):
        return jax.tree.map(jnp.add, total, jax.grad(loss)(params, part)), None

    return jax.lax.scan(body, zeros(params), parts)[0]


def accumulated_while(params, batch):
    def body(i, total):
        part = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, 4 * i, 4), batch)
        return jax.tree.map(jnp.add, total, jax.grad(loss)(params, part))

    return jax.lax.fori_loop(0, jnp.asarray(4), body, zeros(params))


def rounded(params, batch):
    lower = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    return jax.tree.map(lambda g: g.astype(jnp.float32), jax.grad(loss)(lower, batch))


def of_each_example(params, batch):
    of_one = jax.vmap(jax.grad(loss), in_axes=(None, 0))(params, jax.tree.map(lambda x: x[:, None], batch))
    return jax.tree.map(lambda g: jnp.mean(g, 0), of_one)


def pulled_back(params, batch):
    value, pull = jax.vjp(lambda p: loss(p, batch), params)
    return value, *pull(jnp.ones(()))


def averaged_over_devices(params, batch):
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    each = functools.partial(jax.grad(loss))
    mapped = jax.shard_map(
        lambda p, b: jax.lax.pmean(each(p, b), "data"),
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=P(),
        check_vma=False,
    )
    return mapped(params, batch)


NO_STATE = [
    jax.grad(loss), jax.value_and_grad(loss), jax.jit(jax.grad(loss)), jax.grad(jax.jit(loss)), jax.grad(scanned_loss),
    jax.jit(jax.grad(jax.checkpoint(loss))), clipped, unscaled, accumulated, accumulated_while, rounded,
    of_each_example, pulled_back, averaged_over_devices,
]  # fmt: skip


@pytest.mark.parametrize("function", NO_STATE, ids=lambda f: getattr(f, "__name__", "gradient"))
def test_gradients_do_not_continue_the_parameters(function):
    assert not continued(function, parameters(), BATCH)


@pytest.mark.parametrize("function", [jnp.matmul, lambda x, batch: jnp.cumsum(x, 0), lambda x, batch: jnp.sort(x)])
def test_what_mixes_elements_does_not_continue_an_array(function):
    assert not continued(function, jnp.ones((8, 8)), jnp.ones((8, 8)))


# Optimizers: the parameters alone are argument 0, as counters in an optimizer's state would continue in any case.

OPTIMIZERS = {
    name: functools.partial(getattr(optax, name), 1e-3)
    for name in (
        "adabelief", "adadelta", "adafactor", "adagrad", "adam", "adamax", "adamaxw", "adamw", "adan", "amsgrad",
        "fromage", "lamb", "lars", "lion", "nadam", "nadamw", "novograd", "optimistic_gradient_descent", "radam",
        "rmsprop", "rprop", "sgd", "sign_sgd", "yogi",
    )
} | {
    "noisy_sgd": lambda: optax.noisy_sgd(1e-3, key=0),
    "muon": lambda: optax.contrib.muon(1e-3),
    "schedule_free": lambda: optax.contrib.schedule_free_adamw(1e-3),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(1e-3), 2),
    "multi_steps": lambda: optax.MultiSteps(optax.adam(1e-3), 2),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adaptive_grad_clip(0.1), optax.adamw(1e-3)),
    "flattened": lambda: optax.flatten(optax.adam(1e-3)),
    "sm3": lambda: optax.masked(optax.sm3(1e-3), {"matrix": True, "bias": True, "scale": False}),  # it takes no numbers
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jitted"])
def test_what_optimizers_return_continues_the_parameters(name, wrap):
    optimizer = OPTIMIZERS[name]()

    def step(params, batch, state):
        value, gradients = jax.value_and_grad(loss)(params, batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    assert continued(wrap(step), parameters(), BATCH, optimizer.init(parameters()))


def stepped(params, batch):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, batch))


def looked_ahead(pair, batch):
    fast, slow = pair
    fast = stepped(fast, batch)
    slow = jax.tree.map(lambda f, s: s + 0.5 * (f - s), fast, slow)
    return jax.lax.cond(batch["x"][0, 0] > 0, lambda: (slow, slow), lambda: (fast, slow))


def only_if_finite(params, batch):
    new = stepped(params, batch)
    return jax.tree.map(lambda p, n: jnp.where(jnp.isfinite(n).all(), n, p), params, new)


def several(params, batch):
    return jax.lax.scan(lambda p, _: (stepped(p, batch), None), params, length=3)[0]


def until(params, batch):
    return jax.lax.while_loop(lambda p: p["scale"] > 0, lambda p: stepped(p, batch), params)


def layer_by_layer(params, batch):
    """An update inside of a scan over slices, which its results are stacked of."""
    gradients = jax.grad(loss)(params, batch)

    def body(_, pair):
        return None, pair[0] - 0.1 * pair[1]

    return params | {"matrix": jax.lax.scan(body, None, (params["matrix"], gradients["matrix"]))[1]}


def flattened(params, batch):
    flat, unravel = ravel_pytree(params)
    return unravel(flat - 0.1 * jax.grad(lambda f: loss(unravel(f), batch))(flat))


def averages(average, batch):
    return jax.tree.map(lambda a, x: 0.9 * a + 0.1 * jnp.mean(x), average, {**average})


def rows_written(params, batch):
    row = jax.grad(loss)(params, batch)["matrix"][0]
    return params | {"matrix": params["matrix"].at[3].add(-row), "bias": zeros(row), "scale": row[0]}


def by_hand_on_devices(params, batch):
    """Each device updates its rows, of a matrix, and all are gathered."""

    def rows(matrix):
        start = 4 * jax.lax.axis_index("data")
        gradients = jax.grad(loss)(params | {"matrix": matrix}, batch)["matrix"]
        own, of_own = (jax.lax.dynamic_slice_in_dim(x, start, 4) for x in (matrix, gradients))
        return jax.lax.all_gather(own - 0.1 * of_own, "data", tiled=True)

    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    mapped = jax.shard_map(rows, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return zeros(params) | {"matrix": mapped(params["matrix"])}


def one_leaf_alone(params, batch):
    """A leaf passes through, and the others are made anew."""
    return jax.grad(loss)(params, batch) | {"scale": params["scale"]}


@pytest.mark.parametrize(
    "function",
    [stepped, only_if_finite, several, until, layer_by_layer, flattened, averages, rows_written, by_hand_on_devices,
     one_leaf_alone, jax.checkpoint(stepped), jax.jit(several)],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_changed_state_continues_it(function):
    assert continued(function, parameters(), BATCH)


def test_slow_parameters_beside_fast_ones_continue():
    assert continued(looked_ahead, (parameters(), parameters()), BATCH)


def test_what_a_loop_carries_in_turns_continues():
    def swapped(pair, batch):
        return jax.lax.scan(lambda pair, _: ((pair[1], pair[0]), None), pair, length=2)[0]

    assert continued(swapped, (jnp.ones(2), jnp.zeros(2)), BATCH)


def test_a_key_is_no_obstacle():
    def step(state, batch):
        params, key = state
        key, use = jax.random.split(key)
        noise = jax.random.normal(use, params["matrix"].shape)
        return stepped(params | {"matrix": params["matrix"] + 0 * noise}, batch), key

    assert continued(step, (parameters(), jax.random.key(0)), BATCH)
