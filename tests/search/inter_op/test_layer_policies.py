"""What layers that are written out compute again, value by value: the policies, and the steps that come of them."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import recipes
from autopar.errors import MemoryLimitError, PlanMismatchError
from autopar.frontend.tracing import trace
from autopar.ir.rules import RuleBook
from autopar.passes.assign_layers import assign_layers
from autopar.passes.fold_layers import fold_layers
from autopar.passes.remat import name_of
from autopar.passes.split_scan import split_scans
from autopar.search.inter_op.build_stages import cut_layers, recomputed
from autopar.search.inter_op.stage_costs import layer_policies
from autopar.search.intra_op.saved_values import LayerValues
from tests.sections import assert_same_numbers
from tests.small_steps import assert_close, grouped, slow_cluster

LAYERS, WIDTH, EXAMPLES, WIDE = 6, 32, 256, 16_384


def step_of(dtype=jnp.float32, drop=0.0, checkpoints=False):
    """Residual blocks in a loop of Python, with dropout; their last product is read by no backward pass."""

    def layer(x, p, key):
        h = jnp.tanh(x * p["scale"].astype(dtype)) @ p["up"].astype(dtype) * (x @ p["gate"].astype(dtype))
        if drop:
            h = jnp.where(jax.random.bernoulli(key, 1 - drop, h.shape), h, 0)
        return x + jax.nn.gelu(h) @ p["down"].astype(dtype)

    layer = jax.checkpoint(layer) if checkpoints else layer

    def step(state, batch):
        def loss(state):
            x = batch["x"].astype(dtype)
            for i, p in enumerate(state):
                x = layer(x, p, jax.random.fold_in(jax.random.key(7), i))
            return jnp.mean((x.astype(jnp.float32) - batch["y"]) ** 2)

        value, gradients = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients), value

    return step


def numbers(width=WIDTH, examples=EXAMPLES):
    keys = iter(jax.random.split(jax.random.key(0), 4 * LAYERS + 2))
    normal = lambda *shape: 0.3 * jax.random.normal(next(keys), shape)
    state = [
        {
            "scale": normal(width),
            "up": normal(width, 3 * width),
            "gate": normal(width, 3 * width),
            "down": normal(3 * width, width),
        }
        for _ in range(LAYERS)
    ]
    return state, {"x": normal(examples, width), "y": normal(examples, width)}


def cut(step, num_microbatches=2):
    arguments = jax.eval_shape(numbers)
    traced = trace(step, arguments, names=("state", "batch"), donate=(0,), batch=(1,))
    return cut_layers(split_scans(traced, 1, RuleBook()), num_microbatches, RuleBook())


def policies_of(microbatched, devices=1):
    graph, layers = microbatched.graph, microbatched.layers
    folded = fold_layers(graph, assign_layers(graph, layers), len(layers))
    return layer_policies(folded, layers, slow_cluster(devices), by_value=True)


def test_policies_keep_less_and_less_and_equal_layers_the_same():
    found = policies_of(cut(step_of()))
    assert (found.names[0], found.names[-1]) == ("nothing", "input")
    assert len(found.names) > 3
    assert list(found.kept_bytes) == sorted(found.kept_bytes, reverse=True)
    assert len(found.ladders()) == 1  # nothing is sent from CPU devices
    for of_layers in found.of_layers:
        assert len({*of_layers[1:-1]}) == 1
    assert len({of_layers[-1] for of_layers in found.of_layers[1:-1]}) == 1  # its backward pass follows at once


def test_policies_of_a_step_apply_in_other_numbers_of_micro_batches():
    few, many = cut(step_of()), cut(step_of(), 8)
    policy = policies_of(few).of_layers[1]
    assert {name_of(each) for each in policy} == {"by value", "matmuls"}
    again, more = (recomputed(each, policy).graph for each in (few, many))
    assert [op.primitive for op in again.ops()] == [op.primitive for op in more.ops()]
    assert len(again.block.ops) > len(few.graph.block.ops)


FORMS = [{}, {"drop": 0.1}, {"dtype": jnp.bfloat16}, {"checkpoints": True}]


@pytest.mark.cases(1)
@pytest.mark.parametrize("options", FORMS, ids=["float32", "dropout", "bfloat16", "jax.checkpoint"])
def test_every_policy_computes_the_same(options):
    microbatched = cut(step_of(**options))
    arguments = list(jax.tree.map(np.asarray, jax.tree.leaves(numbers())))
    for policy in policies_of(microbatched).of_layers:
        again = recomputed(microbatched, policy).graph
        assert_same_numbers(microbatched.graph, again, arguments)


def test_values_wait_in_the_memory_of_the_hosts_where_a_card_has_a_link_to_it():
    """Products of 1 to 3 GB: on a GPU some policies send their results, in place of computing them again."""
    arguments = jax.eval_shape(lambda: numbers(WIDE, 4 * WIDE))
    traced = trace(step_of(), arguments, names=("state", "batch"), donate=(0,), batch=(1,))
    step = cut_layers(split_scans(traced, 1, RuleBook()), 2, RuleBook())
    folded = fold_layers(step.graph, assign_layers(step.graph, step.layers), len(step.layers))

    def on(cluster):
        return layer_policies(folded, step.layers, cluster, by_value=True)

    found = on(autopar.Cluster.preset("dgx-h100"))
    without, sending = found.ladders()
    assert set(without.names) | set(sending.names) == set(found.names)
    assert set(without.names) & set(sending.names) == {"nothing", "input"}
    for ladder in (without, sending):
        assert list(ladder.kept_bytes) == sorted(ladder.kept_bytes, reverse=True)
    for again, policy in zip(sending.again[1:-1], sending.of_layers[1:-1], strict=True):
        values = recomputed(step, policy).graph.saved_in_host
        assert values
        assert set().union(*(each.in_host for each in again.values())) <= values
        shapes = {step.graph.values[v].shape for v in values}
        assert shapes <= {(2 * WIDE, WIDE), (2 * WIDE, 3 * WIDE)}
    # Both passes are one program there, whose compiler brings values back early.
    assert len(on(autopar.Cluster.preset("tpu-v5p", topology="2x2x1")).ladders()) == 1


@pytest.mark.cases(1)
@pytest.mark.parametrize("options", [{}, {"drop": 0.1}], ids=["plain", "dropout"])
def test_values_in_the_memory_of_the_hosts_come_back_as_they_were(monkeypatch, options):
    """On devices whose products take long, so that they are not computed again, where all else waits there."""

    def all_in_host(self, most):
        found = {layer.name: [at for at, v in layer.places.items() if v in layer.read] for layer in self.layers}
        yield {name: ((), places) for name, places in found.items()}

    monkeypatch.setattr(LayerValues, "saved_places", all_in_host)
    fast = slow_cluster(2)
    rates = tuple((dtype, rate / 100) for dtype, rate in fast.device.peak_flops)
    cluster = dataclasses.replace(fast, device=dataclasses.replace(fast.device, peak_flops=rates))
    step, (state, batch) = step_of(**options), numbers()
    peak_bytes = max(autopar.plan(step, state, batch, cluster=cluster, cache_dir=None).predicted.peak_bytes)
    options = grouped(memory_limit_bytes=int(0.26 * peak_bytes), num_microbatches=4, cluster=cluster, cache_dir=None)
    limited = autopar.parallelize(step, **options)
    plan = limited.plan(state, batch)
    assert any(" host " in policy for policy in plan.record.pipeline.recomputed)
    assert any(stage.decisions.saved_in_host for stage in plan.record.pipeline.stages)
    got = limited(jax.tree.map(jnp.copy, state), batch)
    assert_close(jax.tree.map(np.asarray, got), jax.jit(step)(state, batch))


@pytest.mark.slow
def test_stages_choose_values_and_results_are_those_of_jit():
    step, (state, batch) = step_of(), numbers()
    plans = dict(cluster=slow_cluster(2), cache_dir=None)
    limit_bytes = int(0.4 * max(autopar.plan(step, state, batch, **plans).predicted.peak_bytes))
    limited = autopar.parallelize(step, **grouped(memory_limit_bytes=limit_bytes, num_microbatches=4, **plans))
    plan = limited.plan(state, batch)
    assert max(plan.predicted.peak_bytes) <= limit_bytes
    assert "by value" in {name_of(policy) for policy in plan.record.pipeline.recomputed}
    assert "by value" in str(plan)
    got = limited(jax.tree.map(jnp.copy, state), batch)
    assert_close(jax.tree.map(np.asarray, got), jax.jit(step)(state, batch))


@pytest.mark.cases(1)
@pytest.mark.parametrize("share", [0.5, 0.75])
def test_one_stage_computes_again_in_as_many_layers_as_the_memory_needs(share):
    """On an H100: products of 64 MB, of which the search for one micro-batch keeps as many as fit."""
    arguments = jax.eval_shape(lambda: numbers(512, 16_384))
    options = {"cluster": "dgx-h100:1", "cache_dir": None, "num_microbatches": 1}
    ample = autopar.plan(step_of(), *arguments, **grouped(**options)).predicted
    limit_bytes = int(share * max(ample.peak_bytes))
    found = autopar.plan(step_of(), *arguments, **grouped(memory_limit_bytes=limit_bytes, **options))
    assert max(found.predicted.peak_bytes) <= limit_bytes
    for policy in ("matmuls every 2", "matmuls", "half matmuls", "input every 2", "input"):
        recipe = recipes.combine(dp=1, num_microbatches=1, recompute=policy)
        asked = autopar.plan(step_of(), *arguments, plan=recipe, cluster="dgx-h100:1", cache_dir=None).predicted
        if max(asked.peak_bytes) <= limit_bytes:
            assert found.predicted.step_time_s <= asked.step_time_s


def test_a_value_that_a_layer_does_not_have_is_refused():
    microbatched = cut(step_of())
    policies = ["nothing"] * len(microbatched.layers)
    policies[1] = "values 99.0"
    with pytest.raises(PlanMismatchError) as raised:
        recomputed(microbatched, policies)
    assert (raised.value.where, raised.value.got) == ("$.plan.pipeline.recomputed[1]", "99.0")


@pytest.mark.slow
def test_parts_of_a_scan_recompute_their_products_half_of_them_or_everything():
    """What their bodies save is chosen by value; stages of the parts take policies of whole parts."""

    def step(state, batch):
        def loss(state):
            x, _ = jax.lax.scan(lambda x, p: (x + jnp.tanh(x @ p["up"]) @ p["down"], None), batch["x"], state)
            return jnp.mean((x - batch["y"]) ** 2)

        value, gradients = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients), value

    layers, batch = numbers()
    state = {name: jnp.stack([p[name] for p in layers[:4]]) for name in ("up", "down")}
    options = {"cluster": slow_cluster(2), "cache_dir": None, "num_microbatches": 8}
    peak_bytes = max(autopar.plan(step, state, batch, **grouped(**options)).predicted.peak_bytes)
    recomputed_by = set()
    for share in (0.9, 0.8, 0.7, 0.6):
        limit_bytes = int(share * peak_bytes)
        with contextlib.suppress(MemoryLimitError):
            plan = autopar.plan(step, state, batch, **grouped(memory_limit_bytes=limit_bytes, **options))
            assert max(plan.predicted.peak_bytes) <= limit_bytes
            recomputed_by |= {name_of(policy) for policy in plan.record.pipeline.recomputed}
    assert recomputed_by <= {"nothing", "matmuls", "half matmuls", "input"}
    assert recomputed_by
