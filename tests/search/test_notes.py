"""Recipes on steps that they do not fit: what cannot be split stays whole, with a note that names it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import recipes
from autopar.errors import InvalidArgumentError
from benchmarks.zoo import CASES
from tests.small_steps import verified, verified_step

DEVICES = 4


def planned(step, args, recipe):
    """The plan of a step under a recipe, held against plain `jax.jit`; and the layouts of its arguments by path."""
    parallel = autopar.parallelize(
        step, plan=recipe, cluster=autopar.Cluster.local(DEVICES, measured=False), cache_dir=None
    )
    verified_step(parallel, args, 1e-5)
    plan = parallel.plan(*args)
    return plan, {v.path: v.layout.dims for v in plan.record.arguments}


def trained(loss_fn):
    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss

    return step


def normal(*shape):
    return np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)


def recipe_notes(plan):
    return [note for note in plan.record.notes if note.startswith("recipe")]


def test_data_parallelism_splits_every_leaf_whose_examples_divide():
    # A sort has no rule; one leaf has ten examples, another has one row for all.
    def loss_fn(w, batch):
        ranked = jnp.sort(batch["x"] @ w, axis=0)
        return jnp.mean(jnp.cumsum(ranked) * batch["scale"]) + jnp.mean((batch["extra"] @ w) ** 2)

    batch = {"x": normal(8, 4), "extra": normal(10, 4), "scale": normal(1)}
    plan, layouts = planned(trained(loss_fn), (normal(4), batch), recipes.data_parallel())
    assert layouts["batch['x']"] == ((0,), ())
    assert layouts["batch['extra']"] == ((), ())
    (note,) = recipe_notes(plan)
    assert note == (
        "recipe, data axis of 4 devices: arrays stay whole, since 4 does not divide what is to be split: "
        "batch/extra [10, 4] (dimension 0: 10)"
    )


def test_zero_splits_what_divides_and_notes_what_stays_whole():
    def loss_fn(state, batch):
        return jnp.mean((jnp.tanh(batch["x"] @ state["odd"]) @ state["even"] + state["bias"]) ** 2)

    state = {"odd": normal(3, 5), "even": normal(5, 8), "bias": normal(8)}
    plan, layouts = planned(trained(loss_fn), (state, {"x": normal(8, 3)}), recipes.zero(3))
    assert layouts["state['even']"] == ((), (0,))
    assert layouts["state['bias']"] == ((0,),)
    assert layouts["state['odd']"] == ((), ())
    assert recipe_notes(plan) == [
        "recipe, data axis of 4 devices: arrays stay whole, since 4 does not divide what is to be split: "
        "state/odd [3, 5] (dimension 0: 3, dimension 1: 5)"
    ]


def fused_attention(width=16, heads=4):
    """Queries, keys and values of one product, one behind the other: no part of its columns is heads of all three."""

    def loss_fn(state, batch):
        x = batch["x"]
        q, k, v = (part.reshape(*x.shape[:2], heads, -1) for part in jnp.split(x @ state["qkv"], 3, axis=-1))
        weights = jax.nn.softmax(jnp.einsum("blhe,bmhe->bhlm", q, k))
        x = x + jnp.einsum("bhlm,bmhe->blhe", weights, v).reshape(x.shape) @ state["out"]
        return jnp.mean((jax.nn.relu(x @ state["up"]) @ state["down"]) ** 2)

    sizes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    state = {name: normal(*shape) / width**0.5 for name, shape in sizes.items()}
    return trained(loss_fn), (state, {"x": normal(4, 8, width)})


def test_tensor_parallelism_gathers_what_is_no_part_of_heads():
    plan, layouts = planned(*fused_attention(), recipes.tensor_parallel())
    assert [layouts[f"state['{name}']"] for name in ("qkv", "out", "up", "down")] == [
        ((), (0,)),
        ((0,), ()),
        ((), (0,)),
        ((0,), ()),
    ]
    (note,) = recipe_notes(plan)
    assert "model axis of 4 devices: activations are gathered and cut anew" in note


def test_tensor_parallelism_leaves_odd_widths_whole():
    _, layouts = planned(*fused_attention(width=12, heads=3), recipes.tensor_parallel())
    assert layouts["state['up']"] == ((), (0,))
    assert layouts["state['down']"] == ((0,), ())


@pytest.mark.parametrize("recipe", [recipes.data_parallel(), recipes.zero(3)])
def test_attention_without_heads(recipe):
    def loss_fn(w, batch):
        x = batch["tokens"] @ w
        return jnp.mean((jax.nn.softmax(x @ x.swapaxes(1, 2)) @ x) ** 2)

    planned(trained(loss_fn), (normal(4, 8), {"tokens": normal(8, 6, 4)}), recipe)


@pytest.mark.parametrize("recipe", [recipes.data_parallel(), recipes.zero(1), recipes.tensor_parallel()])
def test_loops_that_hand_out_literals(recipe):
    def loss_fn(w, batch):
        def body(carry, x):
            return jnp.tanh(x @ w) + carry, 1.0

        total, ones = jax.lax.scan(body, jnp.zeros((2, 8)), batch["x"].reshape(4, 2, 8))
        return jnp.mean(total**2) * jnp.mean(ones)

    planned(trained(loss_fn), (normal(8, 8), {"x": normal(8, 8)}), recipe)


def test_stages_note_what_stays_whole_once():
    case = CASES["mlp"](batch=32)
    _, plan = verified(case, recipes.combine(zero=1, pp=2, num_microbatches=2), 6)
    (note,) = recipe_notes(plan)
    assert "data axis of 3 devices: arrays stay whole" in note


def test_no_product_that_divides_is_named():
    def loss_fn(w, batch):
        return jnp.mean((batch["x"] @ w) ** 2)

    step = autopar.parallelize(
        trained(loss_fn),
        plan=recipes.tensor_parallel(),
        cluster=autopar.Cluster.local(DEVICES, measured=False),
        cache_dir=None,
    )
    with pytest.raises(InvalidArgumentError, match=r"model axis of 4 devices.*which 4 divides, got state \[3, 5\]"):
        step.plan(normal(3, 5), {"x": normal(8, 3)})


@pytest.mark.parametrize(("rows", "told"), [(64, False), (2**20, True)])
def test_what_cannot_be_split_is_told_where_that_costs_time(rows, told):
    def step(w, batch):
        sorted_numbers = jnp.sort(batch["x"].reshape(-1))
        return w - 0.1 * jax.grad(lambda w: jnp.mean((batch["x"] @ w) ** 2) + sorted_numbers[0])(w), sorted_numbers[-1]

    batch = {"x": jax.ShapeDtypeStruct((rows, 64), jnp.float32)}
    plan = autopar.plan(step, jax.ShapeDtypeStruct((64, 64), jnp.float32), batch, cluster="dgx-h100", cache_dir=None)
    note = "sort is replicated (1 of them, the largest makes 268 MB): none of its dimensions can be split"
    assert plan.record.notes == ((note,) if told else ())


def experts(rows, params):
    hidden = jax.nn.relu(jnp.einsum("ecd,edf->ecf", rows, params["up"]))
    return jnp.einsum("ecf,efd->ecd", hidden, params["down"])


def mixture(params, x):
    gates = jax.nn.softmax(x @ params["router"])
    chosen = jax.nn.one_hot(jnp.argmax(gates, -1), 4)
    slots = chosen[..., None] * jax.nn.one_hot((jnp.cumsum(chosen, 0) * chosen).sum(-1).astype(int), 128)[:, None]
    out = experts(jnp.einsum("nec,nd->ecd", slots, x), params)
    return jnp.einsum("nec,ecd->nd", slots * gates[..., None], out)


def scattered(params, x):
    gates = jax.nn.softmax(x @ params["router"])
    chosen = jnp.argmax(gates, -1)
    slot = (jnp.cumsum(jax.nn.one_hot(chosen, 4, dtype=jnp.int32), 0) - 1)[jnp.arange(256), chosen]
    out = experts(jnp.zeros((4, 128, 64)).at[chosen, slot].set(x, mode="drop"), params)
    return out.at[chosen, slot].get(mode="fill", fill_value=0)


def ensemble(params, x):
    return jax.vmap(lambda up, down: jax.nn.relu(x @ params["embed"] @ up) @ down)(params["up"], params["down"])


@pytest.mark.parametrize(("model", "role"), [(mixture, "expert"), (scattered, "expert"), (ensemble, "stack")])
def test_experts_are_those_among_which_a_router_chooses(model, role):
    sizes = {"router": (64, 4), "embed": (64, 64), "up": (4, 64, 256), "down": (4, 256, 64)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in sizes.items()}
    step = trained(lambda params, x: jnp.mean((model(params, x) - x) ** 2))
    batch = jax.ShapeDtypeStruct((256, 64), jnp.float32)
    parallel = autopar.parallelize(step, plan=recipes.expert_parallel(), cache_dir=None)
    plan = autopar.plan(parallel, params, batch, cluster="dgx-h100:4")
    assert plan.record.axis_roles == ((role,),)
    words = {"expert": "the experts split over 4", "stack": "the stacked matrices split over 4"}
    assert words[role] in str(plan).partition("\nStep")[0].replace("\n", " ")


def test_devices_that_try_other_perturbations_do_not_do_the_same_work():
    def step(state, batch):
        key, used = jax.random.split(state["key"])

        def of_one(key):
            noise = jax.random.normal(key, state["w"].shape)
            return jnp.mean((batch["x"] @ (state["w"] + 0.1 * noise)) ** 2), noise

        losses, noises = jax.vmap(of_one)(jax.random.split(used, 16))
        return {"w": state["w"] - 0.01 * jnp.tensordot(losses - losses.mean(), noises, 1), "key": key}, losses.mean()

    state = {"w": normal(256, 256), "key": jax.random.key(0)}
    plan = autopar.plan(step, state, {"x": normal(2048, 256)}, cluster=autopar.Cluster.local(DEVICES, measured=False))
    assert "do the same work" not in str(plan)
