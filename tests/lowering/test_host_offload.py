"""The optimiser's state in the memory of the host: where it lies, when it comes and goes, what that costs."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar import recipes
from autopar.cost.peak_memory import allocated_bytes
from autopar.errors import InvalidArgumentError, UnsupportedError
from autopar.hardware import discovery, presets
from autopar.lowering.host_copies import AHEAD, BUCKETS
from autopar.lowering.instructions import HostCopy
from autopar.plan.schema import MemoryKind
from autopar.search.materialize import make_function
from autopar.verification import compile_for_target
from benchmarks.zoo import CASES
from tests.small_steps import MLP_BATCH, MLP_STATE, assert_close, chain_loss, grouped, mlp_step, slow_cluster, verified

GPT = CASES["gpt_adamw"](layers=1, batch=16)
MOE = CASES["moe"](layers=1, batch=16)
WIDTH, EXAMPLES = 64, 32


def adam_step(state, batch):
    """Products one after the other, their gradients clipped by their norm, under Adam."""
    value, grads = jax.value_and_grad(chain_loss)(state["params"], batch)
    updates, moments = ADAM.update(grads, state["moments"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "moments": moments}, value


ADAM = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))


def new_state(layers: int = 2, width: int = WIDTH):
    params = [jax.random.normal(k, (width, width)) / width**0.5 for k in jax.random.split(jax.random.key(0), layers)]
    return {"params": params, "moments": ADAM.init(params)}


def new_batch(width: int = WIDTH):
    x, y = np.random.default_rng(0).normal(size=(2, EXAMPLES, width)).astype(np.float32)
    return {"x": x, "y": y}


def step_under(recipe, function=adam_step, cluster=None, **options):
    return autopar.parallelize(
        function, plan=recipe, cluster=cluster or slow_cluster(), cache_dir=None, **grouped(**options)
    )


def memories(tree):
    """Path -> jax's memory kind, of arrays or shardings."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path): getattr(x, "sharding", x).memory_kind for path, x in leaves}


def in_host(tree):
    return {path for path, kind in memories(tree).items() if kind == "pinned_host"}


MOMENTS = {f"['moments'][1][0].{name}[{i}]" for name in ("mu", "nu") for i in (0, 1)}


# Numbers, shardings


@pytest.mark.slow
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3])
def test_gpt_computes_what_plain_jit_does(stage):
    _, plan = verified(dataclasses.replace(GPT, tolerance=1e-5), recipes.zero(stage, offload="optimizer"))
    kept = {v.path for v in plan.record.arguments if v.in_host}
    assert kept == {v.path for v in plan.record.arguments if ".mu[" in v.path or ".nu[" in v.path}
    assert kept == {v.path.replace("result[0]", "state", 1) for v in plan.record.results if v.in_host}


@pytest.mark.slow
def test_experts_moments_are_kept_in_parts():
    _, plan = verified(dataclasses.replace(MOE, tolerance=1e-5), recipes.combine(ep=4, zero=2, offload="optimizer"))
    expert = [v for v in plan.record.arguments if "expert_in" in v.path and v.in_host]
    assert expert
    assert all(v.layout.shards(plan.mesh) == 8 for v in expert)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [GPT, pytest.param(CASES["gpt_scan"](layers=2, batch=16), marks=pytest.mark.slow)], ids=["gpt", "scan"]
)
def test_stages_keep_the_state_of_their_layers(case):
    recipe = recipes.combine(dp=4, pp=2, zero=1, num_microbatches=4, offload="optimizer")
    _, plan = verified(dataclasses.replace(case, tolerance=1e-5), recipe)
    _, without = verified(case, recipes.combine(dp=4, pp=2, zero=1, num_microbatches=4))
    assert len(plan.predicted.host_bytes) == 2
    assert min(plan.predicted.host_bytes) > 0
    assert max(plan.predicted.peak_bytes) < max(without.predicted.peak_bytes)


def test_a_batch_in_parts():
    _, plan = verified(
        dataclasses.replace(GPT, tolerance=1e-5), recipes.combine(zero=3, num_microbatches=2, offload="optimizer")
    )
    assert plan.record.pipeline.num_microbatches == 2
    assert plan.predicted.host_bytes[0] > 0


def test_moments_are_born_in_the_hosts_memory_and_stay_there():
    step, batch = step_under(recipes.zero(2, offload="optimizer")), new_batch()
    plan = step.plan(jax.eval_shape(new_state), batch)
    assert in_host(plan.state_shardings) == MOMENTS
    state = step.init(new_state)
    assert in_host(state) == MOMENTS
    expected = new_state()
    for _ in range(3):
        state, loss = step(state, batch)
        expected, plain = jax.jit(adam_step)(expected, batch)
        assert in_host(state) == MOMENTS
        assert_close((state, loss), (expected, plain))
    assert {k for path, k in memories(state).items() if path not in MOMENTS} == {"device"}


def test_state_that_was_made_elsewhere_is_moved_there():
    step, batch = step_under(recipes.zero(1, offload="optimizer")), new_batch()
    state, _ = step(new_state(), batch)
    assert in_host(state) == MOMENTS
    assert_close(state, jax.jit(adam_step)(new_state(), batch)[0])


def test_master_weights_are_kept_there_and_what_is_computed_with_is_not():
    def mixed(state, batch):
        def loss(working):
            x = jnp.tanh(batch["x"].astype(jnp.bfloat16) @ working)
            return jnp.mean((x.astype(jnp.float32) - batch["y"]) ** 2)

        value, grad = jax.value_and_grad(loss)(state["working"])
        momentum = 0.9 * state["momentum"] + grad.astype(jnp.float32)
        master = state["master"] - 0.1 * momentum
        new = {"working": master.astype(jnp.bfloat16), "master": master, "momentum": momentum}
        return {**new, "never_read": state["never_read"]}, value

    def create():
        master = new_state()["params"][0]
        zeros = jnp.zeros_like(master)
        working = master.astype(jnp.bfloat16)
        return {"working": working, "master": master, "momentum": zeros, "never_read": zeros + 1}

    step, batch = step_under(recipes.zero(2, offload="optimizer"), mixed), new_batch()
    plan = step.plan(jax.eval_shape(create), batch)
    # What is handed through is not copied.
    moved = plan.predicted.host_copied_bytes
    assert moved == 4 * WIDTH * WIDTH * 4 / 8
    state, loss = step(step.init(create), batch)
    assert in_host(state) == {"['master']", "['momentum']", "['never_read']"}
    # In bfloat16 the order of sums shows: the numbers are those of the same layout with everything on the devices.
    expected, plain = step_under(recipes.zero(2), mixed)(create(), batch)
    assert_close((state, loss), (expected, plain), tolerance=1e-6)
    np.testing.assert_allclose(loss, jax.jit(mixed)(create(), batch)[1], rtol=1e-3)


def test_an_evaluation_step_leaves_moments_where_they_are():
    step, batch = step_under(recipes.zero(1, offload="optimizer")), new_batch()
    step.plan(jax.eval_shape(new_state), batch)
    state = step.init(new_state)

    def evaluate(state, batch):
        x = batch["x"]
        for w in state["params"]:
            x = jnp.tanh(x @ w)
        return jnp.mean((x - batch["y"]) ** 2)

    follower = step_under(step, evaluate)
    plan = follower.plan(state, batch)
    assert {v.path for v in plan.record.arguments if v.in_host} == {f"state{path}" for path in MOMENTS}
    assert plan.predicted.host_copied_bytes == 0
    np.testing.assert_allclose(follower(state, batch), evaluate(new_state(), batch), rtol=1e-5)


# Files and text


def test_a_saved_plan_keeps_state_there(tmp_path):
    step, batch = step_under(recipes.zero(2, offload="optimizer")), new_batch()
    plan = step.plan(jax.eval_shape(new_state), batch)
    plan.save(tmp_path / "plan.json")
    loaded = autopar.Plan.load(tmp_path / "plan.json")
    assert loaded.record == plan.record
    again = autopar.parallelize(adam_step, plan=loaded, cache_dir=None)
    state, _ = again(new_state(), batch)
    assert in_host(state) == MOMENTS
    assert_close(state, jax.jit(adam_step)(new_state(), batch)[0])


def test_a_printed_plan_tells_host_memory():
    plan = step_under(recipes.zero(2, offload="optimizer")).plan(jax.eval_shape(new_state), new_batch())
    # Two moments of two matrices on eight devices, once in and once out.
    assert "host memory: 8.19 kB a device, of which each step copies 16.4 kB, there and back, in" in plan.table()
    assert 'P("data", None), in host memory' in plan.table() or 'P(None, "data"), in host memory' in plan.table()
    assert "in host memory" in plan.explain("mu[0]")
    without = step_under(recipes.zero(2)).plan(jax.eval_shape(new_state), new_batch())
    assert "host memory" not in str(without)
    assert "host memory" in plan.diff(without)


# Costs


def test_a_device_is_without_what_its_host_keeps_and_waits_for_the_link():
    device = dataclasses.replace(slow_cluster().device, host_link_bytes_per_s=1e9, launch_overhead_s=1e-6)
    cluster = dataclasses.replace(slow_cluster(), device=device)
    state, batch = jax.eval_shape(new_state), new_batch()
    one = step_under(recipes.zero(2), cluster=cluster).plan(state, batch).predicted
    other = step_under(recipes.zero(2, offload="optimizer"), cluster=cluster).plan(state, batch).predicted
    kept = 4 * WIDTH * WIDTH * 4 // 8
    assert one.host_bytes == ()
    assert other.host_bytes == (kept,)
    assert other.host_copied_bytes == 2 * kept
    assert other.host_time_s == pytest.approx(8 * 1e-6 + 2 * kept / 1e9)
    assert other.step_time_s == pytest.approx(one.step_time_s + other.host_time_s)
    assert one.memory[0].throughout[MemoryKind.OPTIMIZER] - kept == pytest.approx(
        other.memory[0].throughout.get(MemoryKind.OPTIMIZER, 0), abs=8
    )
    assert other.peak_bytes[0] <= one.peak_bytes[0] - kept // 2


@pytest.mark.cases(1)
@pytest.mark.parametrize("clips", [False, True])
def test_few_buckets_are_on_a_device_at_once(clips):
    layers, tx = 32, optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)) if clips else optax.adam(1e-2)

    def step(state, batch):
        params, moments = state

        def loss(params):
            x = batch["x"]
            for w in params:
                x = jnp.tanh(x @ w)
            return jnp.mean((x - batch["y"]) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        updates, moments = tx.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    params = [jax.ShapeDtypeStruct((16, 16), jnp.float32)] * layers
    state = params, jax.eval_shape(tx.init, params)
    made = step_under(recipes.zero(2, offload="optimizer"), step)
    traced, plan = made._planned((state, new_batch(16)))
    lowered = make_function(traced, plan, plan.concrete_mesh(), made._sources.rules()).lowered
    copies = [i for i in lowered.instructions if isinstance(i, HostCopy)]
    assert sum(not c.to_host for c in copies) == sum(c.to_host for c in copies) == 2 * layers
    a_bucket = 2 * layers // BUCKETS
    seen, come, gone, waiting = set(), 0, 0, 0
    for copy in copies:
        of_host = [key for key in copy.behind if key[1][1] == "host"]
        assert seen.issuperset(of_host), "what it waits for comes before it"
        seen.add((copy.value, copy.target))
        if copy.to_host:
            gone += 1
            continue
        come += 1
        assert come - gone <= (AHEAD + 1) * a_bucket
        assert len(copy.behind) == len(of_host) + 1, "and it waits for a gradient"
        waiting += len(of_host) == a_bucket
    # All but the first two buckets wait for a whole one to have gone.
    assert waiting == 2 * layers - AHEAD * a_bucket


@pytest.mark.extra("tpu")
def test_a_compiled_program_for_tpu_is_without_that_memory():
    layers, width = 6, 1024
    state = jax.eval_shape(lambda: new_state(layers, width))
    cluster, peaks, made = autopar.Cluster.preset("tpu-v5e", topology="2x2"), {}, {}
    for offload in ("nothing", "optimizer"):
        step = step_under(recipes.zero(3, offload=offload), cluster=cluster)
        peaks[offload] = step.plan(state, new_batch(width)).predicted
        made[offload] = compile_for_target(step, "tpu:v5e:2x2", state, new_batch(width)).executable
    stats = {offload: executable.memory_analysis() for offload, executable in made.items()}
    kept = 2 * layers * width * width * 4 // 4
    assert peaks["optimizer"].host_bytes == (kept,)
    assert stats["optimizer"].host_argument_size_in_bytes == stats["optimizer"].host_alias_size_in_bytes == kept
    assert stats["nothing"].argument_size_in_bytes - stats["optimizer"].argument_size_in_bytes == kept
    drop = allocated_bytes(made["nothing"]) - allocated_bytes(made["optimizer"])
    predicted_drop = peaks["nothing"].peak_bytes[0] - peaks["optimizer"].peak_bytes[0]
    assert 0.5 * kept <= drop
    assert 0.5 * drop <= predicted_drop <= drop


# Errors


def test_what_can_be_offloaded_is_named():
    with pytest.raises(InvalidArgumentError, match="'nothing' or 'optimizer'"):
        recipes.zero(2, offload="parameters")


@pytest.mark.parametrize("options", [{}, {"pp": 2, "dp": 4}], ids=["one program", "stages"])
def test_a_step_without_an_optimisers_state_is_refused(options):
    step = step_under(recipes.combine(zero=1, **options, offload="optimizer"), mlp_step)
    with pytest.raises(InvalidArgumentError, match=r"such as moments, got none\n.*leave offload out") as caught:
        step.plan(MLP_STATE, MLP_BATCH)
    assert "only the update reads" in caught.value.expected


def test_a_cluster_must_know_its_link_to_the_host():
    device = dataclasses.replace(presets.H100, host_link_bytes_per_s=None)
    cluster = autopar.Cluster.flat(8, device=device)
    step = step_under(recipes.zero(1, offload="optimizer"), cluster=cluster)
    with pytest.raises(InvalidArgumentError, match="host_link_bytes_per_s"):
        step.plan(jax.eval_shape(new_state), new_batch())


def test_a_measurement_leaves_the_host_link_to_the_tables():
    found = discovery.find(measured=False)
    older = dataclasses.replace(found.device, host_link_bytes_per_s=None, launch_overhead_s=1.0)
    measurement = types.SimpleNamespace(
        device=older, inside_host=found.inside_host, between_hosts=found.between_hosts, fits=()
    )
    device = discovery.as_measured(found, measurement).device
    assert device.launch_overhead_s == 1.0
    assert device.host_link_bytes_per_s == found.device.host_link_bytes_per_s > 0


def test_devices_without_memory_kinds_are_refused(monkeypatch):
    step, batch = step_under(recipes.zero(1, offload="optimizer")), new_batch()
    step.plan(jax.eval_shape(new_state), batch)  # a plan may be made anywhere
    memory = types.SimpleNamespace(kind="device")
    device = types.SimpleNamespace(addressable_memories=lambda: [memory], platform="cpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    with pytest.raises(UnsupportedError, match=r"pinned_host.*got cpu devices with 'device'") as caught:
        step(new_state(), batch)
    assert "without offload=" in str(caught.value)
    with pytest.raises(UnsupportedError, match="pinned_host"):
        step.init(new_state)


@pytest.mark.extra("gpu")
def test_gpus_that_are_not_here_have_no_memory_kinds():
    step = step_under(recipes.zero(1, offload="optimizer"), cluster=autopar.Cluster.preset("dgx-h100"))
    with pytest.raises(UnsupportedError, match=r"pinned_host.*got gpu devices with none"):
        compile_for_target(step, "gpu:h100:8", jax.eval_shape(new_state), new_batch())
