"""Modules taken per micro-batch: numbers against gradient accumulation written by hand, and what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import recipes
from autopar.errors import InvalidArgumentError, MixedExamplesError, UnsupportedError
from autopar.frontend.tracing import trace
from autopar.ir.rules import RuleBook
from autopar.passes.accumulation import names_module
from autopar.passes.microbatch import micro_batched
from autopar.passes.plain_loop import run_graph
from tests import small_steps

RULES = RuleBook()
WIDTH, EXPERTS, BATCH = 6, 4, 12


def mean_of_parts(values):
    return jax.tree.map(lambda *xs: sum(xs) / len(xs), *values)


def accumulated(loss, update, state, batch, num_microbatches):
    """A user's own loop: gradients, losses and metrics are averaged over the micro-batches, then the update is made.

    Running statistics go from micro-batch to micro-batch, as Flax's batch_stats do under optax.MultiSteps.
    """
    results, running = [], state
    for i in range(num_microbatches):
        part = jax.tree.map(lambda x, i=i: jnp.split(x, num_microbatches)[i], batch)
        results.append(jax.value_and_grad(loss, has_aux=True)(state["params"], running, part))
        running = running | results[-1][0][1].get("state", {})
    (value, aux), grads = mean_of_parts(results)
    return update(state, value, aux | {"state": {k: v for k, v in running.items() if k != "params"}}, grads)


def update(state, value, aux, grads):
    params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
    return state | {"params": params} | aux.get("state", {}), {"loss": value} | aux.get("metrics", {})


def step_of(loss):
    def step(state, batch):
        (value, aux), grads = jax.value_and_grad(loss, has_aux=True)(state["params"], state, batch)
        return update(state, value, aux, grads)

    return step


def graph_of(step, state, batch, patterns, num_microbatches=2):
    traced = trace(step, (state, batch), names=("state", "batch"), donate=(0,), batch=(1,))
    traced = dataclasses.replace(traced, per_microbatch=patterns)
    return traced, micro_batched(traced, num_microbatches, RULES)


def check(loss, state, batch, patterns, num_microbatches=2):
    step = step_of(loss)
    traced, graph = graph_of(step, state, batch, patterns, num_microbatches)
    got = jax.tree.unflatten(
        traced.out_tree, jax.jit(lambda leaves: run_graph(graph, leaves))(jax.tree.leaves((state, batch)))
    )
    small_steps.assert_close(got, accumulated(loss, update, state, batch, num_microbatches))
    return graph


def batch_of(seed=0, examples=BATCH):
    random = np.random.default_rng(seed)
    x = random.normal(size=(examples, 5, WIDTH)).astype(np.float32)
    mask = (random.uniform(size=examples) < 0.7).astype(np.float32)
    return {"x": jnp.asarray(x), "y": jnp.asarray(random.normal(size=examples).astype(np.float32)), "mask": mask}


def state_of(seed=0):
    keys = jax.random.split(jax.random.key(seed), 4)
    params = {
        "a": jax.random.normal(keys[0], (WIDTH, WIDTH)),
        "scale": jnp.ones(WIDTH),
        "router": jax.random.normal(keys[1], (WIDTH, EXPERTS)),
        "experts": jax.random.normal(keys[2], (EXPERTS, WIDTH, WIDTH)),
        "b": jax.random.normal(keys[3], (WIDTH,)),
    }
    return {"params": params, "mean": jnp.zeros(WIDTH), "var": jnp.ones(WIDTH)}


def batch_norm(params, state, x):
    with jax.named_scope("BatchNorm_0"):
        mean = x.mean((0, 1))
        var = jnp.square(x - mean).mean((0, 1))
        y = (x - mean) * jax.lax.rsqrt(var + 1e-5) * params["scale"]
        return y, {"mean": 0.9 * state["mean"] + 0.1 * mean, "var": 0.9 * state["var"] + 0.1 * var}


def errors_of(params, batch, h):
    return jnp.square(h.mean(1) @ params["b"] - batch["y"])


def norm_loss(params, state, batch):
    h, statistics = batch_norm(params, state, jnp.tanh(batch["x"] @ params["a"]))
    return errors_of(params, batch, h).mean(), {"state": statistics}


@pytest.mark.parametrize("num_microbatches", [pytest.param(2, marks=pytest.mark.slow), 3, BATCH])
def test_batch_statistics(num_microbatches):
    graph = check(norm_loss, state_of(), batch_of(), ("BatchNorm",), num_microbatches)
    assert graph.per_microbatch == ("BatchNorm",)


def switch(params, x):
    """Top-1 experts with a capacity: tokens that come late are dropped. (output, balance loss, share kept)"""
    tokens = x.reshape(-1, WIDTH)
    with jax.named_scope("moe"):
        logits = tokens @ params["router"]
        probs = jax.nn.softmax(logits)
        chosen = jax.nn.one_hot(jnp.argmax(probs, -1), EXPERTS)
        capacity = int(tokens.shape[0] / EXPERTS * 1.25)
        position = (jnp.cumsum(chosen, 0) - 1) * chosen
        kept = chosen * (position < capacity)
        dispatch = kept[..., None] * jax.nn.one_hot(position.astype(jnp.int32), capacity)
        inside = jnp.einsum("tec,td->ecd", dispatch, tokens)
        outside = jnp.tanh(jnp.einsum("ecd,edf->ecf", inside, params["experts"]))
        out = jnp.einsum("tec,ecf->tf", dispatch * (probs * kept).sum(-1)[:, None, None], outside)
        balance = EXPERTS * (chosen.mean(0) * probs.mean(0)).sum()
        z = jnp.square(jax.nn.logsumexp(logits, -1)).mean()
    return out.reshape(x.shape), balance, z, kept.sum() / kept.shape[0]


def router_loss(params, state, batch):
    h, balance, z, kept = switch(params, batch["x"] @ params["a"])
    return errors_of(params, batch, h).mean() + 0.3 * balance + 0.1 * z, {"metrics": {"kept": kept, "balance": balance}}


@pytest.mark.slow
@pytest.mark.parametrize("num_microbatches", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_router_with_a_capacity_and_a_balance_loss(num_microbatches):
    graph = check(router_loss, state_of(), batch_of(), ("moe",), num_microbatches)
    assert graph.per_microbatch == ("moe",)


@pytest.mark.slow
def test_a_balance_loss_whose_value_is_not_returned():
    def loss(params, state, batch):
        value, _ = router_loss(params, state, batch)
        return value, {}

    step = step_of(loss)

    def gradients_only(state, batch):
        return step(state, batch)[0]

    state, batch = state_of(), batch_of()
    traced, graph = graph_of(gradients_only, state, batch, ("moe",))
    got = jax.tree.unflatten(traced.out_tree, run_graph(graph, jax.tree.leaves((state, batch))))
    small_steps.assert_close(got, accumulated(loss, update, state, batch, 2)[0])


def scaled_product(params, x):
    """A product of 8-bit numbers with one scale for the whole operand, whose gradient goes straight through."""
    with jax.named_scope("quantised"):
        scale = jnp.max(jnp.abs(jax.lax.stop_gradient(x))) / 127
        rounded = x + jax.lax.stop_gradient(jnp.round(x / scale) * scale - x)
        return rounded @ params["a"]


def test_dynamic_scales():
    def loss(params, state, batch):
        x = jnp.tanh(batch["x"] @ params["router"]) @ params["router"].T
        return errors_of(params, batch, jnp.tanh(scaled_product(params, x))).mean(), {}

    check(loss, state_of(), batch_of(), ("quantised",))


@pytest.mark.parametrize("recipe", ["pipeline", pytest.param("data parallel", marks=pytest.mark.slow)])
def test_on_devices_that_split_the_batch(recipe):
    plans = {
        "pipeline": recipes.pipeline(2, num_microbatches=2),
        "data parallel": recipes.cut(recipes.data_parallel(), num_microbatches=2),
    }
    step = autopar.parallelize(
        step_of(norm_loss),
        plan=plans[recipe],
        search=autopar.Search(per_microbatch="BatchNorm"),
        cluster=autopar.Cluster.local(4),
        cache_dir=None,
    )
    state, batch = state_of(), jax.tree.map(jnp.asarray, batch_of())
    verified = autopar.verify(step, state, batch)
    assert verified.per_microbatch == ("BatchNorm",)
    assert verified.difference is not None
    assert verified.difference < 1e-5
    assert "from a plain loop over micro-batches" in str(verified)
    (note,) = [note for note in verified.plan.record.notes if "per micro-batch" in note]
    assert note.startswith("BatchNorm: taken per micro-batch, so that the results are those of gradient accumulation")
    restored = autopar.parallelize(step_of(norm_loss), plan=verified.plan, cache_dir=None)
    small_steps.assert_close(
        restored(jax.tree.map(jnp.copy, state), batch), accumulated(norm_loss, update, state, batch, 2)
    )


def test_a_loss_that_is_a_sum_has_no_gradient_accumulation():
    def loss(params, state, batch):
        h, statistics = batch_norm(params, state, batch["x"] @ params["a"])
        return errors_of(params, batch, h).sum(), {"state": statistics}

    with pytest.raises(UnsupportedError, match="mean over examples"):
        graph_of(step_of(loss), state_of(), batch_of(), ("BatchNorm",))


def test_a_loss_over_masked_examples_is_taken_per_micro_batch_where_it_is_named():
    def loss(params, state, batch):
        h, balance, z, _ = switch(params, batch["x"] @ params["a"])
        with jax.named_scope("loss"):
            main = (errors_of(params, batch, h) * batch["mask"]).sum() / batch["mask"].sum()
        return main + 0.3 * balance + z, {}

    state, batch = state_of(), batch_of()
    with pytest.raises(UnsupportedError, match="mean over examples"):
        graph_of(step_of(loss), state, batch, ("moe",))
    check(loss, state, batch, ("moe", "loss"))


def test_what_is_not_named_is_refused_by_name():
    with pytest.raises(MixedExamplesError, match=r"BatchNorm_0 at (?s:.*)per_microbatch=\('BatchNorm',\)"):
        graph_of(step_of(norm_loss), state_of(), batch_of(), ())
    with pytest.raises(InvalidArgumentError, match="BatchNorm_0"):
        graph_of(step_of(norm_loss), state_of(), batch_of(), ("BatchNom",))


def test_a_step_that_keeps_examples_apart_stays_that_of_the_whole_batch():
    def loss(params, state, batch):
        with jax.named_scope("body"):
            return errors_of(params, batch, batch["x"] @ params["a"]).sum(), {}

    _, graph = graph_of(step_of(loss), state_of(), batch_of(), ("body",))
    assert graph.per_microbatch == ()


@pytest.mark.parametrize("num_microbatches", [1, 4, "auto"])
def test_a_pattern_without_a_module_is_an_error_where_nothing_mixes_too(num_microbatches):
    step = autopar.parallelize(
        small_steps.mlp_step, search=autopar.Search(per_microbatch="BatchNorm", num_microbatches=num_microbatches),
        cluster=small_steps.slow_cluster(2), cache_dir=None,
    )  # fmt: skip
    with pytest.raises(InvalidArgumentError, match=r"per_microbatch='BatchNorm'.*none of the 0 modules of mlp_step"):
        step.plan(small_steps.MLP_STATE, small_steps.MLP_BATCH)


def test_patterns_that_are_none():
    with pytest.raises(InvalidArgumentError, match="patterns of modules"):
        autopar.parallelize(step_of(norm_loss), search=autopar.Search(per_microbatch=(3,)))


def test_names_of_modules():
    assert names_module("BatchNorm", "ResNet/block_0/BatchNorm_3")
    assert names_module("*/router", "layers/moe/router/softmax")
    assert names_module("BatchNorm", "eqx.nn.BatchNorm")
    assert not names_module("BatchNorm", "ResNet/block_0/conv")
    assert not names_module("BatchNorm", "")
    assert names_module("**", "")


def norm_with(extra):
    """A loss with batch statistics, and more state of the same module."""

    def loss(params, state, batch):
        x = jnp.tanh(batch["x"] @ params["a"])
        h, statistics = batch_norm(params, state, x)
        with jax.named_scope("BatchNorm_0"):
            statistics |= extra(state, x)
        return errors_of(params, batch, h).mean(), {"state": statistics}

    return loss


@pytest.mark.parametrize(
    ("name", "old", "extra", "got"),
    [
        ("last", jnp.zeros(WIDTH), lambda s, x: x.mean((0, 1)), "of its examples alone"),
        ("before", jnp.zeros(WIDTH), lambda s, x: s["mean"], "the old value of"),
        ("n", jnp.float32(0), lambda s, x: jax.lax.cond(s["n"] > 1, jnp.square, jnp.exp, s["n"]), "a branch"),
    ],
    ids=["overwritten", "an old value", "a branch"],
)
def test_state_that_a_loop_would_leave_otherwise_is_refused(name, old, extra, got):
    loss = norm_with(lambda state, x: {name: extra(state, x)})
    with pytest.raises(UnsupportedError, match=got):
        graph_of(step_of(loss), state_of() | {name: old}, batch_of(), ("BatchNorm",), 3)


def test_a_branch_by_where_is_that_of_a_loop():
    loss = norm_with(lambda state, x: {"n": jnp.where(state["n"] > 1, state["n"] + 2, state["n"] + 1)})
    check(loss, state_of() | {"n": jnp.float32(0)}, batch_of(), ("BatchNorm",), 3)


@pytest.mark.parametrize(
    "divisor", [lambda n: np.sqrt(n), lambda n: n - 1, lambda n: n * n], ids=["root", "one less", "square"]
)
def test_losses_that_are_no_mean_are_refused(divisor):
    def loss(params, state, batch):
        h, statistics = batch_norm(params, state, jnp.tanh(batch["x"] @ params["a"]))
        errors = errors_of(params, batch, h)
        return errors.sum() / divisor(errors.shape[0]), {"state": statistics}

    with pytest.raises(UnsupportedError, match="a loss that is a mean over examples"):
        graph_of(step_of(loss), state_of(), batch_of(), ("BatchNorm",), 3)


def test_what_each_trip_of_a_loop_over_examples_adds_is_a_sum_over_trips():
    """The penalty of all chunks counts as the whole batch's loop has it, in the loss as in the gradient."""

    def loss(params, state, batch):
        h, statistics = batch_norm(params, state, jnp.tanh(batch["x"] @ params["a"]))
        errors = errors_of(params, batch, h)

        def add(carry, chunk):
            return (carry[0] + jnp.sin(chunk).sum(), carry[1] + params["v"] @ params["v"]), None

        (total, penalty), _ = jax.lax.scan(add, (0.0, 0.0), errors.reshape(-1, 2))
        return total / errors.shape[0] + penalty, {"state": statistics}

    def state_with(v):
        return state_of() | {"params": state_of()["params"] | {"v": v}}

    v, batch = jnp.arange(3.0), batch_of()
    traced, graph = graph_of(step_of(loss), state_with(v), batch, ("BatchNorm",), 3)
    new, metrics = jax.tree.unflatten(traced.out_tree, run_graph(graph, jax.tree.leaves((state_with(v), batch))))
    _, without = accumulated(loss, update, state_with(0.0 * v), batch, 3)
    np.testing.assert_allclose(metrics["loss"], without["loss"] + BATCH / 2 * v @ v, rtol=1e-5)
    np.testing.assert_allclose(new["params"]["v"], v - 0.1 * BATCH * v, rtol=1e-4)
