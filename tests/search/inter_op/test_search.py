"""The search over stages, micro-batches and schedules, on clusters where the answer is known."""

import dataclasses
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.errors import AutoparError, BatchMismatchError, InvalidArgumentError, MemoryLimitError
from autopar.frontend.tracing import trace
from autopar.hardware import presets
from autopar.hardware.cluster import Cluster, Link
from autopar.plan.options import PlanRequest
from autopar.search import planner
from autopar.search.inter_op import evaluate, search, search_space, stage_problems
from autopar.search.inter_op.build_stages import cut_layers
from autopar.search.inter_op.evaluate import PipelineEvaluator
from autopar.search.inter_op.search_space import (
    microbatch_numbers,
    odd_part,
    submesh_sizes,
)
from autopar.search.inter_op.stage_problems import in_turn
from autopar.search.intra_op import spmd_search
from autopar.search.planner import MEMORY_MARGIN
from tests.small_steps import chain_step, grouped

SLOW = Link(latency_s=1e-5, bytes_per_s=5e9, source="made up: 40 Gb/s")


def arguments(layers=8, width=16_384, batch=32_768):
    params = [jax.ShapeDtypeStruct((width, width), jnp.float32)] * layers
    examples = jax.ShapeDtypeStruct((batch, width), jnp.float32)
    return params, {"x": examples, "y": examples}


def cluster(hosts=2, each=2, between=SLOW, memory_bytes=80 * 10**9):
    return Cluster(
        name="two hosts",
        device=dataclasses.replace(presets.H100, memory_bytes=memory_bytes),
        num_hosts=hosts,
        devices_per_host=each,
        inside_host=presets.NVLINK4,
        between_hosts=between,
    )


def plan(on, *args, **options):
    return autopar.parallelize(chain_step, cluster=on, cache_dir=None, **grouped(**options)).plan(*args)


def test_inside_of_a_host_with_fast_links_the_step_is_one_program():
    assert plan(cluster(hosts=1, each=4), *arguments()).record.pipeline is None


def test_stages_meet_where_links_are_slow():
    found = plan(cluster(), *arguments())
    made = found.record.pipeline
    assert made is not None
    assert [s.first_device for s in made.stages] == [0, 2]
    assert [len(s.layers) for s in made.stages] == [4, 4]
    assert found.predicted.step_time_s == min(t.step_time_s for t in found.record.weighed)


@pytest.mark.slow
def test_the_best_stages_are_built_in_a_v_too():
    found = plan(cluster(), *arguments())
    in_a_v = [t for t in found.record.weighed if "zb-v" in t.text or "dualpipev" in t.text]
    assert {t.text.split(", ")[1] for t in in_a_v} == {"4 stages on meshes 2"}
    assert len(in_a_v) == 2
    asked = plan(cluster(), *arguments(), plan=autopar.recipes.combine(tp=2, pp=2, schedule="zb-v", num_microbatches=8))
    assert found.predicted.step_time_s <= asked.predicted.step_time_s


def test_stages_of_a_scan_are_built_in_a_v_too():
    def step(params, batch):
        def loss(params):
            x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch["x"], params)
            return jnp.mean((x - batch["y"]) ** 2)

        return params - 0.1 * jax.grad(loss)(params)

    params, batch = arguments()
    stacked = jax.ShapeDtypeStruct((len(params), *params[0].shape), jnp.float32)
    found = autopar.parallelize(step, cluster=cluster(), cache_dir=None).plan(stacked, batch).record
    assert {t.text.split(", ")[1] for t in found.weighed if "zb-v" in t.text} == {"4 stages on meshes 2"}


def test_several_stages_are_tried_in_numbers_between_those_of_the_tables():
    found = plan(cluster(), *arguments()).record
    two_stages = {t.text.split(" micro")[0] for t in found.weighed if "2 stages" in t.text}
    assert {"16", "4", "8"} <= two_stages  # the tables have 64, 16 and 4
    assert found.pipeline is not None
    assert found.pipeline.num_microbatches == 8


def test_of_a_long_step_several_stages_are_built_in_the_best_number_by_the_tables_alone(monkeypatch):
    build, built = evaluate.build, []

    def noted(microbatched, choice, *given, **named):
        if len(choice.first_layers) > 1:
            built.append(microbatched.graph.num_microbatches)
        return build(microbatched, choice, *given, **named)

    monkeypatch.setattr(evaluate, "build", noted)
    for module in (search, search_space, stage_problems):
        monkeypatch.setattr(module, "is_long", lambda _: True)
    found = plan(cluster(), *arguments()).record
    assert found.pipeline is not None
    assert found.pipeline.num_microbatches == 8  # which the tables begin without, as above
    assert set(built) == {8}


@pytest.mark.slow
def test_of_a_long_step_too_what_is_saved_has_a_price(monkeypatch):
    in_flight, tables = [], stage_problems.tables

    def noted(*given, **named):
        options = tables(*given, **named)
        in_flight.extend(o.terms.in_flight for o in options)
        return options

    monkeypatch.setattr(stage_problems, "tables", noted)
    monkeypatch.setattr(search_space, "LONG_STEP", 0)
    plan(cluster(memory_bytes=18 * 10**9), *arguments())
    assert max(in_flight) > 0


def test_a_pipeline_sends_less_between_slow_hosts_than_data_parallelism():
    # Gradients of 8 x 16384 x 16384 floats over 5 GB/s take longer than all of the pipeline's step.
    seconds_of_gradients = 8 * 16_384 * 16_384 * 4 / SLOW.bytes_per_s
    assert plan(cluster(), *arguments()).predicted.step_time_s < seconds_of_gradients


def test_micro_batches_make_room():
    args = arguments(layers=4, width=512, batch=65_536)
    whole = plan(cluster(hosts=1, each=1), *args)
    # The batch that the caller holds and its micro-batches are 57 % of it.
    limit_bytes = int(whole.predicted.peak_bytes[0] * 0.65)
    # On one device there is nothing to shard and nothing to cut into stages.
    memory_bytes = int(limit_bytes / (1 - MEMORY_MARGIN))
    found = plan(cluster(hosts=1, each=1, memory_bytes=memory_bytes), *args, num_microbatches=16)
    assert len(found.record.pipeline.stages) == 1
    assert found.record.pipeline.num_microbatches == 16
    assert max(found.predicted.peak_bytes) <= limit_bytes


def mixing_step(params, batch):
    """Residual layers, each of which reads the mean over the batch."""

    def loss(params):
        x = batch["x"]
        for w in params:
            x = x + jnp.tanh(jnp.tanh((x - jnp.mean(x, 0)) @ w) @ w.T)
        return jnp.mean((x - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


@pytest.mark.slow
def test_a_step_that_mixes_its_examples_is_recomputed_where_it_does_not_fit():
    examples = jax.ShapeDtypeStruct((65_536, 512), jnp.float32)
    args = [jax.ShapeDtypeStruct((512, 2048), jnp.float32)] * 4, {"x": examples, "y": examples}
    on = cluster(hosts=1, each=2)
    planned = lambda **options: autopar.plan(mixing_step, *args, cluster=on, cache_dir=None, **grouped(**options))
    free = planned()
    assert free.record.pipeline is None
    limit_bytes = int(0.8 * max(free.predicted.peak_bytes))
    lean = planned(memory_limit_bytes=limit_bytes)
    assert lean.record.pipeline.num_microbatches == 1
    assert max(lean.predicted.peak_bytes) <= limit_bytes
    with pytest.raises(AutoparError, match="mixes the examples"):
        planned(memory_limit_bytes=limit_bytes, num_microbatches=2)


@pytest.mark.slow
def test_where_the_batch_does_not_fit_no_number_of_micro_batches_of_zero_is_faster():
    """Fewer micro-batches than stages want: parameters are gathered in each of them."""
    args = arguments(layers=8, width=8192, batch=262_144)
    quick = dataclasses.replace(SLOW, bytes_per_s=5e10)
    whole = plan(cluster(hosts=2, each=8, between=quick), *args)
    # ZeRO-3 in two micro-batches needs 64 % of the peak of the whole batch, and ZeRO-1 in eight 66 %: the batch that
    # the caller holds is there beside all of its micro-batches, 14 % each.
    memory_bytes = int(0.7 * whole.predicted.peak_bytes[0] / (1 - MEMORY_MARGIN))
    small = cluster(hosts=2, each=8, between=quick, memory_bytes=memory_bytes)
    found = plan(small, *args)
    assert len(found.record.pipeline.stages) == 1
    assert found.record.pipeline.num_microbatches < min(microbatch_numbers(trace_of(args), small, PlanRequest()))
    compared = []
    for zero in (1, 3):
        for m in (2, 4, 8):
            try:
                known = plan(small, *args, plan=autopar.recipes.combine(zero=zero, num_microbatches=m)).predicted
            except MemoryLimitError:
                continue
            assert found.predicted.step_time_s <= known.step_time_s
            compared.append((zero, m))
    assert {(1, 8), (3, 2)} <= set(compared)
    assert any("ZeRO-3" in t.text for t in found.record.weighed)


def trace_of(args):
    return trace(chain_step, args, names=("params", "batch"), donate=(0,), batch=(1,))


def test_what_was_asked_for_is_kept():
    found = plan(cluster(), *arguments(), num_microbatches=8, schedule="gpipe")
    assert found.record.pipeline.num_microbatches == 8
    assert found.record.pipeline.schedule == "gpipe"


def test_plans_are_built_out_of_each_number_of_micro_batches_in_turn():
    plans = [(64, 1.0, 0), (64, 1.1, 1), (16, 1.05, 2), (16, 1.2, 3), (4, 1.3, 4), (64, 0.9, 5)]
    assert in_turn(plans) == [5, 2, 4, 0, 3, 1]


@pytest.mark.slow
def test_a_plan_that_needs_more_than_it_was_taken_for_is_searched_again(monkeypatch):
    args = arguments()
    first_built = plan(cluster(), *args).record.weighed[0]
    limit_bytes = int(1.25 * first_built.peak_bytes)  # what is built first, taken 1.3 times, is over it, another is not
    small = cluster(memory_bytes=int(limit_bytes / (1 - MEMORY_MARGIN)))
    build = evaluate.build

    def as_if_larger(*given, **named):
        staged = build(*given, **named)
        larger = tuple(int(1.3 * n) for n in staged.simulation.peak_bytes)
        return dataclasses.replace(staged, simulation=dataclasses.replace(staged.simulation, peak_bytes=larger))

    monkeypatch.setattr(evaluate, "build", as_if_larger)
    found = plan(small, *args)
    fits = [t for t in found.record.weighed if t.peak_bytes <= limit_bytes]
    assert found.record.weighed[0].peak_bytes > limit_bytes
    assert found.predicted.step_time_s == min(t.step_time_s for t in fits)


def test_every_schedule_that_came_out_too_large_has_less_memory_the_next_time(monkeypatch):
    build, solve = evaluate.build, evaluate.best_stages
    limits = []

    def as_if_larger(*given, **named):
        staged = build(*given, **named)
        larger = tuple(10**12 for _ in staged.simulation.peak_bytes)
        return dataclasses.replace(staged, simulation=dataclasses.replace(staged.simulation, peak_bytes=larger))

    def noted(problems, *within):
        limits.append({p.schedule: p.limit_bytes for p in problems})
        return solve(problems, *within)

    monkeypatch.setattr(evaluate, "build", as_if_larger)
    monkeypatch.setattr(stage_problems, "best_stages", noted)
    monkeypatch.setattr(evaluate, "best_stages", noted)
    with pytest.raises(MemoryLimitError, match=r"got 1 TB(.|\n)*the pipeline nearest to fitting needs 1 TB"):
        plan(cluster(), *arguments(), num_microbatches=4)
    first, second = limits[0], limits[2]  # each time of several stages, then of one
    assert len([s for s in first if second[s] < first[s]]) >= 2


def test_every_device_is_used_once():
    for stages in (2, 4):
        made = plan(cluster(), *arguments(), plan=autopar.recipes.pipeline(stages)).record.pipeline
        used = [s.first_device + i for s in made.stages for i in range(math.prod(s.axis_sizes))]
        assert sorted(used) == [0, 1, 2, 3]


def test_the_simulated_step_is_the_planned_one():
    found = plan(cluster(), *arguments(), plan=autopar.recipes.pipeline(2, num_microbatches=4))
    timeline = found.record.pipeline.timeline
    assert found.predicted.step_time_s == pytest.approx(max(e.end_s for e in timeline.events))


@pytest.mark.parametrize(
    ("recipe", "kind", "names"),
    [
        (autopar.recipes.pipeline(16), AutoparError, "16 stages"),
        (autopar.recipes.pipeline(2, num_microbatches=7), BatchMismatchError, "7"),
        (autopar.recipes.pipeline(3), InvalidArgumentError, "3 stages"),
    ],
)
def test_what_cannot_be_is_refused(recipe, kind, names):
    with pytest.raises(kind, match=names):
        plan(cluster(), *arguments(), plan=recipe)


@pytest.mark.parametrize(
    ("hosts", "num_layers", "sizes"),
    [
        (2, 8, [2, 4, 8, 16]),  # stages of one device would be more than there are layers
        (4, 100, [1, 2, 4, 8, 16, 32]),
        (7, 3, [8, 16, 32, 56]),  # 56 is no multiple of 32 or 16
        (315, 107, [24, 72, 360, 2520]),  # 2,520 is no multiple of 32 or 16, and too many parts of 8
        (8, 16, [4, 8, 16, 32, 64]),
        (6, 100, [1, 2, 4, 8, 16, 24, 32, 48]),  # three hosts hold half of the layers
        (96, 84, [16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768]),
        (22, 100, [2, 4, 8, 16, 32, 64, 88, 128, 176]),  # eleven hosts hold half of the layers
    ],
)
def test_stages_may_have_sizes_that_cover_all_devices(hosts, num_layers, sizes):
    on = Cluster.preset("dgx-a100-80g", hosts=hosts)
    assert submesh_sizes(on, PlanRequest(), num_layers) == sizes


def test_cpu_devices_get_the_search_of_accelerators(monkeypatch):
    """The same micro-batches, schedules, numbers of stages and submeshes are put to the dynamic programme."""

    def posed(on):
        found = []

        def noted(self, posed, *_, **__):
            found.extend(
                (p.num_microbatches, p.schedule, p.chunks, p.fixed_num_stages, p.num_devices, len(p.options))
                for p, _ in posed
            )
            raise NotImplementedError

        monkeypatch.setattr(PipelineEvaluator, "search", noted)
        with pytest.raises(NotImplementedError):
            plan(on, *arguments(4, 64, 32), num_microbatches=4)
        return found

    accelerators, cpus = cluster(hosts=1, each=8), Cluster.local(8, measured=False)
    traced = trace(chain_step, arguments(4, 8, 32), names=("params", "batch"), donate=(0,), batch=(1,))
    assert microbatch_numbers(traced, cpus, PlanRequest()) == microbatch_numbers(traced, accelerators, PlanRequest())
    assert posed(cpus) == posed(accelerators) != []


@pytest.mark.parametrize(
    ("hosts", "step_time_s", "lost", "pays"),
    [
        (1, 1.0, 0.08, False),
        (1, 1.0, 0.12, True),
        (2, 1.0, 0.08, False),
        (2, 1.0, 0.12, True),
        (2, 0.004, 0.5, True),
        (2, 9e-5, 0.5, False),
    ],
)
def test_stages_are_searched_where_a_program_loses_enough(hosts, step_time_s, lost, pays):
    best = SimpleNamespace(step_time_s=step_time_s, shared_out_s=(1.0 - lost) * step_time_s)
    assert planner.pipeline_may_pay(best, cluster(hosts=hosts, each=8)) is pays


def arguments_bytes():
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(arguments()))


@pytest.mark.parametrize(
    ("hosts", "examples", "odd"), [(2, 72, 1), (3, 72, 3), (3, 32, 1), (5, 72, 1), (9, 72, 9), (315, 2520, 9)]
)
def test_micro_batches_can_be_split_over_an_odd_number_of_hosts(hosts, examples, odd):
    assert odd_part(examples, Cluster.preset("dgx-a100-80g", hosts=hosts)) == odd


@pytest.mark.parametrize(
    ("hosts", "examples", "numbers"),
    [
        (32, 1024, [256, 64, 16]),
        (512, 1536, [384, 96, 24]),
        (35, 280, [70, 14, 4]),  # stages on powers of two of devices; 56 and so on divide among five or seven
        (315, 2520, [280, 140, 40]),  # stages on nine hosts and the like: each number leaves them nine examples or more
    ],
)
def test_numbers_of_micro_batches(hosts, examples, numbers):
    traced = trace(chain_step, arguments(2, 8, examples), names=("params", "batch"), donate=(0,), batch=(1,))
    found = microbatch_numbers(traced, Cluster.preset("dgx-a100-80g", hosts=hosts), PlanRequest())
    assert found == numbers


@pytest.mark.slow
def test_a_long_step_whose_values_do_not_fit_is_not_searched_for_one_program(monkeypatch):
    monkeypatch.setattr(spmd_search, "LONG_STEP", 10)
    monkeypatch.setattr(spmd_search, "search_mesh", lambda *_: pytest.fail("it was"))
    state_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(arguments()[0]))
    with pytest.raises(MemoryLimitError, match="if every value were split over all 4 devices") as caught:
        plan(cluster(), *arguments(), memory_limit_bytes=(state_bytes + arguments_bytes()) // 4)
    assert state_bytes / 4 < caught.value.needed_bytes
    assert "the pipeline nearest to fitting needs" in caught.value.hint


def test_a_long_step_whose_state_does_not_fit_is_not_searched_for_anything(monkeypatch):
    monkeypatch.setattr(planner, "LONG_STEP", 10)
    monkeypatch.setattr(planner, "pipeline_candidates", lambda *_: pytest.fail("it was"))
    with pytest.raises(MemoryLimitError, match="the state of chain_step, split over all 4 devices") as caught:
        plan(cluster(), *arguments(), memory_limit_bytes=arguments_bytes() // 4 - 1)
    assert caught.value.needed_bytes == arguments_bytes() // 4
    assert {name for name, _ in caught.value.largest} >= {"batch['x']", "params[0]"}


def test_a_step_that_mixes_its_examples_is_cut_into_the_fewest_micro_batches_and_no_others(monkeypatch):
    numbers = []

    def counted(step, m, *args, **options):
        numbers.append(m)
        return cut_layers(step, m, *args, **options)

    def step(params, batch):
        def loss(params):
            x = batch["x"]
            for w in params:
                x = jnp.tanh(x @ w)
                x = x / jnp.max(jnp.abs(x))
            return jnp.mean((x - batch["y"]) ** 2)

        return [w - 0.1 * g for w, g in zip(params, jax.grad(loss)(params), strict=True)]

    monkeypatch.setattr(search, "cut_layers", counted)
    on = cluster(memory_bytes=8 * 10**8)  # nothing fits, so that all numbers are asked for
    with pytest.raises(MemoryLimitError):
        autopar.plan(step, *arguments(layers=4, width=8192, batch=8192), cluster=on, cache_dir=None)
    assert numbers == [64, 2, 1]
