"""Mesh axes cut in two: more devices than key and value heads, or than divide the state."""

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar import recipes
from autopar.frontend.build_graph import build_graph
from autopar.frontend.tracing import trace
from autopar.ir.binding import with_groups
from autopar.ir.rules import RuleBook
from autopar.ir.semantics import annotate_semantics
from tests.small_steps import assert_close, slow_cluster

B, L, W, H, K, D, F = 2, 128, 32, 8, 2, 4, 64


def repeated(q, k, v):
    k, v = (jnp.repeat(a, H // a.shape[2], axis=2) for a in (k, v))
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def grouped(q, k, v):
    q = q.reshape(*q.shape[:2], k.shape[2], -1, D)
    weights = jax.nn.softmax(jnp.einsum("bqkgd,bskd->bkgqs", q, k))
    return jnp.einsum("bkgqs,bskd->bqkgd", weights, v).reshape(*v.shape[:2], H, D)


def step_of(attention):
    def step(state, batch):
        def loss(p):
            x = batch["x"]
            q, k, v = (jnp.einsum("blw,whd->blhd", x, p[n]) for n in "qkv")
            x = x + jnp.einsum("blhd,hdw->blw", attention(q, k, v), p["o"])
            return jnp.mean((x + jax.nn.relu(x @ p["up"]) @ p["down"] - batch["y"]) ** 2)

        value, gradients = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients), value

    return step


def arguments(kv_heads=K):
    keys = iter(jax.random.split(jax.random.key(0), 8))
    shapes = {
        "q": (W, H, D),
        "k": (W, kv_heads, D),
        "v": (W, kv_heads, D),
        "o": (H, D, W),
        "up": (W, F),
        "down": (F, W),
    }
    state = {name: 0.2 * jax.random.normal(next(keys), shape) for name, shape in shapes.items()}
    return state, {name: jax.random.normal(next(keys), (B, L, W)) for name in "xy"}


def verified_step(attention, kv_heads, recipe, devices):
    """(what `autopar.verify` found, plan); results equal plain jax.jit."""
    step, args = step_of(attention), arguments(kv_heads)
    made = autopar.parallelize(
        step, plan=recipe, cluster=slow_cluster(devices), cache_dir=None
    )  # fmt: skip
    found, plan = autopar.verify(made, *args), made.plan(*args)
    assert_close(made(*jax.tree.map(jnp.copy, args)), jax.jit(step)(*args))
    return found, plan


@pytest.mark.cases(1)
@pytest.mark.parametrize("attention", [grouped, repeated])
def test_queries_are_split_by_heads_over_two_axes_and_keys_over_the_first(attention):
    step, args = step_of(attention), arguments()
    made = autopar.parallelize(step, plan=recipes.tensor_parallel(), cluster=slow_cluster(8), cache_dir=None)
    expected = jax.jit(step)(*args)
    plan = made.plan(*args)
    assert plan.mesh.axis_sizes == (2, 4)
    assert plan.mesh.axis_names == ("model", "model group")
    assert_close(made(*jax.tree.map(jnp.copy, args)), expected)
    of_scores = B * H * L * L / 8 * 4  # what a device has of them; sums over the width of heads would send more
    assert all(c.sent_bytes / c.count < of_scores for c in plan.predicted.collectives)


@pytest.mark.parametrize(("size", "axes"), [(2, (2,)), (8, (2, 4))])
def test_an_axis_that_heads_can_share_stays_one(size, axes):
    made = autopar.parallelize(
        step_of(grouped), plan=recipes.tensor_parallel(), cluster=slow_cluster(size), cache_dir=None,
    )  # fmt: skip
    assert made.plan(*arguments()).mesh.axis_sizes == axes


@pytest.mark.parametrize(
    ("kv_heads", "devices", "axes"),
    [
        (2, 4, (2, 2)),
        pytest.param(4, 8, (4, 2), marks=pytest.mark.slow),  # queries in groups of two: groups are no heads of keys
    ],
)
@pytest.mark.parametrize("spelling", [grouped, pytest.param(repeated, marks=pytest.mark.slow)])
def test_ulysses_over_more_devices_than_heads_of_keys_gathers_these(spelling, kv_heads, devices, axes):
    made, plan = verified_step(spelling, kv_heads, recipes.sequence_parallel("ulysses"), devices)
    assert plan.mesh.axis_sizes == axes
    assert plan.mesh.axis_names == ("sequence", "sequence group")
    assert made.total.predicted == made.total.compiled
    scores = B * H * L * L * 4 / devices
    assert all(c.sent_bytes / c.count < scores for c in plan.predicted.collectives)


@pytest.mark.parametrize(("kv_heads", "devices"), [(2, 4), pytest.param(4, 8, marks=pytest.mark.slow)])
def test_ulysses_exchanges_queries_and_gathers_only_keys_of_long_sequences(kv_heads, devices):
    """32,768 positions: bytes matter, and not the number of collectives."""
    shape_of = lambda a, *shape: jax.ShapeDtypeStruct(shape or a.shape, a.dtype)
    state, batch = arguments(kv_heads)
    state, batch = jax.tree.map(shape_of, state), {name: shape_of(a, B, 32_768, W) for name, a in batch.items()}
    made = autopar.parallelize(
        step_of(grouped), plan=recipes.sequence_parallel("ulysses"), cluster=slow_cluster(devices), cache_dir=None,
        search=autopar.Search(memory_limit_bytes=10**12),
    )  # fmt: skip
    plan = made.plan(state, batch)
    groups, ring = plan.mesh.axis_sizes
    of_queries, of_keys = (B * 32_768 * heads * D * 4 / devices for heads in (H, kv_heads))
    # Queries and results over both axes; keys and values over the first, gathered or summed over the second; per pass.
    # The backward pass gathers keys and values again.
    queries = (1 - 1 / groups) + (1 - 1 / ring)
    keys = (1 - 1 / groups) + (ring - 1)
    kinds = ("all-to-all", "all-gather", "reduce-scatter")
    sent = sum(c.sent_bytes for c in plan.predicted.collectives if c.kind in kinds)
    assert sent <= 2 * (2 * queries * of_queries + 2 * keys * of_keys) + 2 * (ring - 1) * of_keys


@pytest.mark.parametrize(
    ("kv_heads", "devices", "names"),
    [
        (2, 4, ("sequence ring", "sequence")),
        pytest.param(4, 8, ("sequence ring", "sequence"), marks=pytest.mark.slow),
        pytest.param(8, 4, ("sequence",), marks=pytest.mark.slow),
    ],
)
def test_heads_are_exchanged_within_groups_and_rings_go_between(kv_heads, devices, names):
    made, plan = verified_step(grouped, kv_heads, recipes.sequence_parallel("usp"), devices)
    assert plan.mesh.axis_names == names
    assert made.total.predicted == made.total.compiled
    kinds = {c.name for c in made.collectives}
    assert ("collective-permute" in kinds) == ("sequence ring" in names)
    assert "all-to-all" in kinds


def test_sequence_groups_take_the_heads_that_tensor_groups_leave():
    recipe = recipes.combine(dp=1, sp=4, tp=2)
    _, plan = verified_step(grouped, 4, recipe, 8)
    assert (plan.mesh.axis_names, plan.mesh.axis_sizes) == (("sequence", "sequence group", "model"), (2, 2, 2))


# State


def zero_mesh(shape, recipe, num_devices, bias=0):
    """Names and sizes of the mesh axes of a recipe on so many devices, for a matrix of this shape beside a bias."""

    def step(state, batch):
        def loss(params):
            hidden = batch @ params["w"]
            return jnp.mean(hidden**2) + (jnp.sum(params["b"] ** 2) if bias else 0.0)

        gradients = jax.grad(loss)(state["p"])
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["m"], gradients)
        return {"m": momentum, "p": jax.tree.map(lambda p, m: p - 0.1 * m, state["p"], momentum)}

    params = {"w": jax.ShapeDtypeStruct(shape, "float32")}
    params |= {"b": jax.ShapeDtypeStruct((bias,), "float32")} if bias else {}
    args = ({"m": params, "p": params}, jax.ShapeDtypeStruct((96, shape[0]), "float32"))
    traced = trace(step, args, names=("state", "batch"), donate=(0,), batch=(1,))
    graph = annotate_semantics(build_graph(traced, RuleBook()))
    mesh, constraints = with_groups(recipe.request.binding, graph, num_devices).on(num_devices)
    return dict(zip((use.name for use in constraints.axes), mesh.axis_sizes, strict=True))


def test_state_that_all_devices_divide_is_shared_out_over_one_axis():
    assert zero_mesh((96, 1601), recipes.zero(1), 48) == {"data": 48}


@pytest.mark.parametrize("stage", [1, 3])
def test_state_that_they_do_not_divide_is_shared_out_in_groups(stage):
    assert zero_mesh((4096, 1024), recipes.zero(stage), 24) == {"data group": 3, "data": 8}
    assert zero_mesh((50257, 1600), recipes.zero(stage), 48) == {"data group": 3, "data": 16}


def test_small_arrays_make_no_groups():
    assert zero_mesh((1024, 1024), recipes.zero(1), 8, bias=10) == {"data": 8}
    assert zero_mesh((257, 51), recipes.zero(1), 8) == {"data": 8}  # no two of them divide it either


def test_groups_stand_beside_tensor_parallelism():
    assert zero_mesh((1024, 1024), recipes.combine(zero=1, tp=2), 48) == {"data group": 3, "data": 8, "model": 2}
