"""Cases on 8 devices, as one program or in stages, beside plain `jax.jit` from the same state and batches."""

import dataclasses
from collections.abc import Callable

import jax

import autopar
from autopar.runtime.program import Send
from autopar.runtime.verify import verify_program, verify_schedule
from benchmarks.zoo import Case
from benchmarks.zoo.comparison import Difference, worst_difference

SLOWNESS = 1e-6


def hosts_of_two(num_devices: int = 8) -> autopar.Cluster:
    """The devices of this program as hosts of two, with next to no speed and slower links between hosts: the best plan
    splits all that can be split, and mesh axes differ.
    """
    cluster = autopar.Cluster.local(num_devices=num_devices)
    rates = tuple((dtype, rate * SLOWNESS) for dtype, rate in cluster.device.peak_flops)
    memory_rate = cluster.device.peak_memory_bytes_per_s * SLOWNESS
    device = dataclasses.replace(cluster.device, peak_flops=rates, peak_memory_bytes_per_s=memory_rate)
    inside = dataclasses.replace(cluster.inside_host, bytes_per_s=cluster.inside_host.bytes_per_s * SLOWNESS)
    between = dataclasses.replace(inside, bytes_per_s=inside.bytes_per_s / 10)
    return dataclasses.replace(
        cluster, device=device, num_hosts=num_devices // 2, devices_per_host=2, inside_host=inside,
        between_hosts=between,
    )  # fmt: skip


def check_one_program(case: Case, steps: int = 3) -> None:
    """Metrics and state of some steps on 8 devices are those of `jax.jit`, and something is split.

    They are so from one of two random keys: a number so near a kink, or the middle of two integers, that rounding
    decides it is there from one key, not from both.
    """
    parallel = autopar.parallelize(case.step, cluster=hosts_of_two(), cache_dir=None)
    worst = _after_steps(case, parallel, steps, jax.random.key(0))
    if worst.relative > case.tolerance:
        worst = _after_steps(case, parallel, steps, jax.random.key(1))
    assert worst.relative <= case.tolerance, worst


def _after_steps(case: Case, parallel: Callable, steps: int, key: jax.Array) -> Difference:
    plain, expected = jax.jit(case.step), jax.jit(case.init)(key)
    state = jax.tree.map(lambda leaf: leaf.copy(), expected)  # the parallel step donates its state
    found = []
    for seed in range(steps):
        state, got = parallel(state, parallel.put_batch(case.batch(seed)))
        expected, metrics = plain(expected, case.batch(seed))
        found.append(worst_difference(case, metrics, got))
    # Of the arrays: jmp's constructors, for one, take no tree of shardings.
    arrays = jax.tree.leaves((state, parallel.put_batch(case.batch(0))))
    assert not all(array.sharding.is_fully_replicated for array in arrays)
    return max((*found, worst_difference(case, expected, state)), key=lambda d: d.relative)


def check_in_stages(case: Case, stages: int, schedule: str, num_microbatches: int, steps: int = 2) -> None:
    """The same in stages, whose program is proved before it runs. `stages` counts groups of devices; interleaved and
    zb-v put two stages on each. Under an inference schedule the metrics alone are computed.
    """
    evaluates = schedule.startswith("inference")
    step = (lambda state, batch: case.step(state, batch)[1]) if evaluates else case.step
    parallel = autopar.parallelize(
        step, plan=autopar.recipes.pipeline(stages, schedule, num_microbatches=num_microbatches),
        cluster=hosts_of_two(), donate_argnums=() if evaluates else (0,), cache_dir=None,
    )  # fmt: skip
    plain, expected = jax.jit(step), jax.jit(case.init)(jax.random.key(0))
    state = jax.tree.map(lambda leaf: leaf.copy(), expected)
    compiled = parallel.compile(state, case.batch(0))
    verify_schedule(compiled.staged.schedule)
    verify_program(compiled.executor.program, compiled.staged.schedule)
    assert any(isinstance(i, Send) for i in compiled.executor.program.instructions)
    for seed in range(steps):
        batch = case.batch(seed)
        if evaluates:
            _check_equal(case, plain(expected, batch), parallel(state, batch))
        else:
            expected, metrics = plain(expected, batch)
            state, got = parallel(state, batch)
            _check_equal(case, metrics, got)
    _check_equal(case, expected, state)


def _check_equal(case: Case, expected: object, got: object) -> None:
    worst = worst_difference(case, expected, got)
    assert worst.relative <= case.tolerance, worst
