"""Where nothing fits, the optimiser's state goes to the memory of the hosts, and the plan says so."""

import dataclasses
from importlib import metadata

import jax
import numpy as np
import optax
import pytest

import autopar
from autopar.errors import MemoryLimitError
from autopar.search import memory_fallbacks, planner
from tests.small_steps import assert_close, chain_loss, grouped, slow_cluster

WIDTH, LAYERS, EXAMPLES = 128, 4, 32
STATE_BYTES = 3 * 4 * LAYERS * WIDTH * WIDTH  # parameters and two moments
BEFORE_0_12 = tuple(map(int, metadata.version("jaxlib").split(".")[:2])) < (0, 12)
ADAM = optax.adam(1e-2, eps=1e-3)  # a gradient near zero moves a parameter no further than others do


def adam_step(state, batch):
    value, grads = jax.value_and_grad(chain_loss)(state["params"], batch)
    updates, moments = ADAM.update(grads, state["moments"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "moments": moments}, value


def new_state():
    params = [jax.random.normal(k, (WIDTH, WIDTH)) / WIDTH**0.5 for k in jax.random.split(jax.random.key(0), LAYERS)]
    return {"params": params, "moments": ADAM.init(params)}


def new_batch():
    x, y = np.random.default_rng(0).normal(size=(2, EXAMPLES, WIDTH)).astype(np.float32)
    return {"x": x, "y": y}


def step_within(limit_bytes, **options):
    defaults = {"cluster": slow_cluster(2), "cache_dir": None}
    return autopar.parallelize(adam_step, **grouped(memory_limit_bytes=limit_bytes, **(defaults | options)))


def test_what_fits_is_not_offloaded():
    plan = step_within(2 * STATE_BYTES).plan(new_state(), new_batch())
    assert not any(value.in_host for value in plan.record.arguments)


def test_the_moments_go_to_the_hosts_where_nothing_else_fits():
    limit_bytes = int(0.58 * STATE_BYTES)  # ZeRO-3 needs 0.61 of it, without moments 0.56
    plan = step_within(limit_bytes, cluster=autopar.Cluster.preset("dgx-h100").submesh(1, 2)).plan(
        new_state(), new_batch()
    )
    moments = {value.path for value in plan.record.arguments if ".mu[" in value.path or ".nu[" in value.path}
    assert {value.path for value in plan.record.arguments if value.in_host} == moments
    assert max(plan.predicted.peak_bytes) <= limit_bytes
    assert "the optimiser's state in the memory of the hosts" in "\n".join(plan.record.notes)


@pytest.mark.skipif(
    not BEFORE_0_12, reason="under jaxlib 0.12 CPU devices need more memory with offloading than without"
)
def test_it_computes_what_plain_jit_does(tmp_path):
    state, batch, limit_bytes = new_state(), new_batch(), int(0.61 * STATE_BYTES)
    step = step_within(limit_bytes, cache_dir=tmp_path)
    assert any(value.in_host for value in step.plan(state, batch).record.arguments)
    expected = jax.jit(adam_step)(state, batch)
    assert_close(step(state, batch), expected)
    assert_close(step_within(limit_bytes, cache_dir=tmp_path)(new_state(), batch), expected)  # as the cache has it


def test_the_error_says_what_offloading_would_need():
    with pytest.raises(MemoryLimitError, match="ZeRO-3 with the optimiser's state in the memory of the hosts needs"):
        step_within(STATE_BYTES // 4).plan(new_state(), new_batch())


def test_what_cannot_fit_without_the_moments_is_not_planned(monkeypatch):
    """A half of the parameters and of the batch is more than a device has: GPT-3 on eight devices took minutes."""
    monkeypatch.setattr(memory_fallbacks, "_fitting", None)
    with pytest.raises(MemoryLimitError, match="in the memory of the hosts needs more than 147 kB"):
        step_within(STATE_BYTES // 20).plan(new_state(), new_batch())


def test_of_many_equal_layers_the_best_way_alone_is_built(monkeypatch):
    """What all ways come to is estimated on six of the sixteen layers. The whole batch as one program is fastest."""
    layers, width = 16, 4096
    params = [jax.ShapeDtypeStruct((width, width), np.float32)] * layers
    state = {"params": params, "moments": jax.eval_shape(ADAM.init, params)}
    batch = {name: jax.ShapeDtypeStruct((EXAMPLES, width), np.float32) for name in "xy"}
    built, make_plan = [], planner.make_plan

    def counting(*args):
        built.append((args[3].num_stages, args[3].num_microbatches))
        return make_plan(*args)

    monkeypatch.setattr(planner, "make_plan", counting)
    limit_bytes = int(0.45 * 3 * 4 * layers * width * width)
    step = step_within(limit_bytes, cluster=autopar.Cluster.preset("dgx-h100").submesh(1, 2))
    plan = step.plan(state, batch)
    assert any(value.in_host for value in plan.record.arguments)
    assert max(plan.predicted.peak_bytes) <= limit_bytes
    assert built == [(None, None)]


def test_nothing_is_offloaded_over_an_unknown_link():
    cluster = slow_cluster(2)
    cluster = dataclasses.replace(cluster, device=dataclasses.replace(cluster.device, host_link_bytes_per_s=None))
    with pytest.raises(MemoryLimitError, match="nothing was offloaded: the rate of the link"):
        step_within(STATE_BYTES // 3, cluster=cluster).plan(new_state(), new_batch())


def test_a_recipe_is_not_offloaded():
    with pytest.raises(MemoryLimitError):
        step_within(STATE_BYTES // 3, plan=autopar.recipes.zero(3)).plan(new_state(), new_batch())


def test_a_step_without_a_batch_that_does_not_fit_is_a_matter_of_memory():
    step = autopar.parallelize(
        lambda state: adam_step(state, new_batch()),
        cluster=slow_cluster(2), search=autopar.Search(memory_limit_bytes=STATE_BYTES // 3), cache_dir=None,
    )  # fmt: skip
    with pytest.raises(MemoryLimitError):
        step.plan(new_state())
