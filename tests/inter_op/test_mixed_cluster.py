"""Pipelines on devices of several kinds: layers by speed, memory by kind, the link between them, files, execution."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.errors import InvalidArgumentError, MemoryLimitError
from autopar.hardware import presets
from autopar.hardware.cluster import Cluster, Link
from autopar.inter_op.submeshes import Submesh, link_between, orders, place
from autopar.ir.mesh import LogicalMesh
from tests.small_steps import chain_step, grouped

NETWORK = Link(latency_s=1e-5, bytes_per_s=5e9, source="made up: 40 Gb/s")
BETWEEN = Link(latency_s=2e-5, bytes_per_s=2.5e9, source="made up: 20 Gb/s")


def at_rate(share, name, base=presets.H100, memory_bytes=80 * 10**9):
    """A device that does everything at a share of another one's rate."""
    return dataclasses.replace(
        base,
        name=name,
        peak_flops=tuple((dtype, share * rate) for dtype, rate in base.peak_flops),
        peak_memory_bytes_per_s=share * base.peak_memory_bytes_per_s,
        memory_bytes=memory_bytes,
    )


FAST, SLOW = at_rate(1.0, "fast"), at_rate(0.5, "slow")


def hosts(device, each=2, count=1):
    return Cluster(
        name=device.name,
        device=device,
        num_hosts=count,
        devices_per_host=each,
        inside_host=presets.NVLINK4,
        between_hosts=NETWORK,
    )


def arguments(layers=12, width=16_384, batch=32_768):
    params = [jax.ShapeDtypeStruct((width, width), jnp.float32)] * layers
    examples = jax.ShapeDtypeStruct((batch, width), jnp.float32)
    return params, {"x": examples, "y": examples}


def step(on, **options):
    return autopar.parallelize(chain_step, cluster=on, cache_dir=None, **grouped(**options))


def held(plan):
    return [(s.first_device, len(s.layers)) for s in plan.record.pipeline.stages]


@pytest.fixture(scope="module")
def mixed():
    return step(Cluster.joined([hosts(FAST), hosts(SLOW)], between=BETWEEN)).plan(*arguments())


def test_devices_twice_as_fast_get_twice_the_layers(mixed):
    assert held(mixed) == [(0, 8), (2, 4)]


def test_the_plan_says_on_which_devices_each_stage_lies(mixed):
    rows = [line.split()[1:4:2] for line in str(mixed).splitlines()]  # layers and devices
    assert ["8", "fast"] in rows
    assert ["4", "slow"] in rows
    assert "0-1, fast" in mixed.table()
    assert "2-3, slow" in mixed.table()


def test_both_kinds_together_are_faster_than_each_alone_and_than_one_program(mixed):
    """What remains of the ideal, one and a half times the fast devices, is the bubble and the network."""
    both_s = mixed.predicted.step_time_s
    fast_s = step(hosts(FAST)).plan(*arguments()).predicted.step_time_s
    assert fast_s / 1.5 < both_s < fast_s / 1.2
    one_program = step(mixed.cluster, plan=autopar.recipes.zero(3)).plan(*arguments())
    assert one_program.record.pipeline is None
    assert both_s < one_program.predicted.step_time_s / 1.5


def test_mfu_is_of_the_peak_rates_of_all_devices(mixed):
    one_program = step(mixed.cluster, plan=autopar.recipes.zero(3)).plan(*arguments())
    rates = [dict(device.peak_flops)["float32"] for device in (FAST, FAST, SLOW, SLOW)]
    for plan in (mixed, one_program):
        predicted = plan.predicted
        assert predicted.mfu == pytest.approx(predicted.flops / (predicted.step_time_s * sum(rates)))


def test_one_program_on_all_is_as_slow_as_on_the_slow_devices_alone():
    args, recipe = arguments(layers=4), autopar.recipes.zero(3)
    joined = Cluster.joined([hosts(FAST), hosts(SLOW)], between=NETWORK)
    mixed_s = step(joined, plan=recipe).plan(*args).predicted.step_time_s
    assert mixed_s == step(hosts(SLOW, count=2), plan=recipe).plan(*args).predicted.step_time_s
    assert mixed_s > step(hosts(FAST, count=2), plan=recipe).plan(*args).predicted.step_time_s


def test_a_requested_pipeline_cuts_its_layers_by_speed():
    args = arguments()
    recipe = autopar.recipes.pipeline(2, num_microbatches=8)
    on = Cluster.joined([hosts(FAST), hosts(SLOW)], between=BETWEEN)
    assert held(step(on, plan=recipe).plan(*args)) == [(0, 8), (2, 4)]
    turned = Cluster.joined([hosts(SLOW), hosts(FAST)], between=BETWEEN)
    assert held(step(turned, plan=recipe).plan(*args)) == [(0, 4), (2, 8)]
    with pytest.raises(InvalidArgumentError, match="devices of one part"):
        step(Cluster.joined([hosts(FAST), hosts(SLOW, each=4)]), plan=recipe).plan(*args)


def test_each_kind_is_bounded_by_its_own_memory(mixed):
    """The fast devices have less memory than eight layers need: what does not fit goes to the slow ones."""
    of_fast = max(s.peak_bytes for s in mixed.record.pipeline.stages)
    small = at_rate(1.0, "fast", memory_bytes=int(0.4 * of_fast))
    on = Cluster.joined([hosts(small), hosts(SLOW)], between=BETWEEN)
    plan = step(on, num_microbatches=16, schedule="1f1b").plan(*arguments())
    peaks = {s.first_device: s.peak_bytes for s in plan.record.pipeline.stages}
    limit_bytes = plan.record.memory_limit_bytes
    assert limit_bytes == int(0.9 * small.memory_bytes)
    assert all(peak <= limit_bytes for first, peak in peaks.items() if first < 2)
    assert max(peaks.values()) > limit_bytes  # the slow devices hold more than the fast ones could
    held_by_slow = sum(layers for first, layers in held(plan) if first >= 2)
    assert held_by_slow >= 4


def test_what_fits_on_no_part_is_refused_with_the_fullest_devices():
    tiny = [hosts(at_rate(share, name, memory_bytes=4 * 10**9)) for share, name in ((1.0, "fast"), (0.5, "slow"))]
    with pytest.raises(MemoryLimitError) as refused:
        step(Cluster.joined(tiny), plan=autopar.recipes.pipeline(2, num_microbatches=8)).plan(*arguments())
    assert refused.value.limit_bytes == int(0.9 * 4 * 10**9)


def test_links_inside_a_part_and_between_parts():
    on = Cluster.joined([hosts(FAST, each=4, count=2), hosts(SLOW, each=4)], between=BETWEEN)
    pair = LogicalMesh(axis_sizes=(2,))
    first, second, next_host, other = (Submesh(first_device=n, mesh=pair) for n in (0, 2, 4, 8))
    assert link_between(first, second, on) == presets.NVLINK4
    assert link_between(second, next_host, on) == NETWORK
    assert link_between(next_host, other, on) == BETWEEN


def test_groups_of_each_part_are_placed_on_its_devices_whatever_their_order():
    on = Cluster.joined([hosts(FAST, each=4), hosts(SLOW, each=2)], between=BETWEEN)
    meshes = [LogicalMesh(axis_sizes=(n,)) for n in (2, 1, 1, 2)]
    assert [s.first_device for s in place(meshes, range(4), on, (1, 0, 0, 0))] == [4, 2, 3, 0]


def test_each_order_of_the_parts_is_tried_once():
    three = Cluster.joined([hosts(FAST), hosts(SLOW), hosts(FAST)], between=BETWEEN)
    assert orders(three) == [(0, 1, 2), (0, 2, 1), (1, 0, 2)]
    assert orders(hosts(FAST)) == [()]


def test_scans_over_layers_are_left_to_requested_stages():
    def scanned(params, batch):
        def loss_of(params):
            out, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch["x"], params)
            return jnp.mean((out - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(params)
        return params - 0.1 * grads, loss

    params = jax.ShapeDtypeStruct((8, 4096, 4096), jnp.float32)
    examples = jax.ShapeDtypeStruct((8192, 4096), jnp.float32)
    on = Cluster.joined([hosts(FAST), hosts(SLOW)], between=BETWEEN)
    args = params, {"x": examples, "y": examples}
    free = autopar.parallelize(scanned, cluster=on, cache_dir=None).plan(*args)
    assert any("a scan over 8 layers, of which each stage has as many" in note for note in free.record.notes)
    recipe = autopar.recipes.pipeline(2, num_microbatches=8)
    asked = autopar.parallelize(scanned, cluster=on, cache_dir=None, plan=recipe).plan(*args)
    assert [s.first_device for s in asked.record.pipeline.stages] == [0, 2]


def small_cluster():
    fast, slow = (
        dataclasses.replace(at_rate(share / 1e4, "CPU", presets.V100), memory_bytes=16 * 10**9) for share in (1.0, 0.5)
    )
    parts = [dataclasses.replace(hosts(device), inside_host=presets.NVLINK2) for device in (fast, slow)]
    return Cluster.joined(parts, between=BETWEEN)


def test_a_plan_for_two_kinds_runs_as_jit_and_is_restored_from_its_file(tmp_path):
    random = np.random.default_rng(0)
    params = [jnp.asarray(random.normal(size=(32, 32)) / 6, jnp.float32) for _ in range(12)]
    batch = {name: random.normal(size=(64, 32)).astype(np.float32) for name in ("x", "y")}
    expected, loss = jax.jit(chain_step)(params, batch)
    made = step(small_cluster(), plan=autopar.recipes.pipeline(2, num_microbatches=4))
    plan = made.plan(params, batch)
    assert held(plan) == [(0, 8), (2, 4)]
    plan.save(tmp_path / "plan.json")
    restored = step(None, plan=autopar.Plan.load(tmp_path / "plan.json"))
    for runner in (made, restored):
        found, found_loss = runner(jax.tree.map(jnp.copy, params), batch)
        np.testing.assert_allclose(found_loss, loss, rtol=1e-5)
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    assert restored.plan(params, batch).predicted.step_time_s == plan.predicted.step_time_s
