"""The way that a step is written in is chosen: attention by a kernel, recomputation in scans, whichever is fastest."""

import dataclasses
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import recipes
from autopar.common.progress import Progress
from autopar.errors import MemoryLimitError
from autopar.frontend.tracing import trace
from autopar.ir.rules import RuleBook
from autopar.plan.options import Attention, PlanRequest
from autopar.plan.schema import CandidateRecord
from autopar.search.planner import ask_sources, planning_context
from autopar.search.plans_in_memory import plans_in_memory
from autopar.search.step_ways import StepWay
from tests.small_steps import assert_close, grouped, slow_cluster

LAYERS, LENGTH, HEADS, HEAD = 3, 256, 4, 64
WIDTH = HEADS * HEAD


def step_of(attend, dtype=jnp.bfloat16, scans=True):
    """A decoder of attention alone; its parameters are float32."""

    def layer(x, p):
        q, k, v = (jnp.einsum("blw,whd->blhd", x, p[name].astype(dtype)) for name in "qkv")
        return x + jnp.einsum("blhd,hdw->blw", attend(q, k, v), p["o"].astype(dtype))

    def step(state, batch):
        def loss(state):
            x = batch["x"].astype(dtype)
            if scans:
                x, _ = jax.lax.scan(lambda x, p: (layer(x, p), None), x, state)
            else:
                for i in range(LAYERS):
                    x = layer(x, jax.tree.map(lambda a, i=i: a[i], state))
            return jnp.mean(x.astype(jnp.float32) ** 2)

        value, gradients = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients), value

    return step


def causal(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) * HEAD**-0.5
    seen = jnp.tril(jnp.ones((q.shape[1], q.shape[1]), bool))
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e30)).astype(q.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def capped(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(50 * jnp.tanh(scores / 50)).astype(q.dtype), v)


def arguments(examples=16):
    sizes = {"q": (WIDTH, HEADS, HEAD), "k": (WIDTH, HEADS, HEAD), "v": (WIDTH, HEADS, HEAD), "o": (HEADS, HEAD, WIDTH)}
    state = {name: jax.ShapeDtypeStruct((LAYERS, *size), jnp.float32) for name, size in sizes.items()}
    return state, {"x": jax.ShapeDtypeStruct((examples, LENGTH, WIDTH), jnp.float32)}


def planned(step, cluster="dgx-h100:1", **options):
    return autopar.plan(step, *arguments(), cluster=cluster, cache_dir=None, **grouped(**options))


@pytest.mark.cases(1)
@pytest.mark.parametrize("scans", [True, False], ids=["scanned", "unrolled"])
@pytest.mark.parametrize(
    ("cluster", "kernel"), [("dgx-h100:1", "CUDNN"), ("dgx-h100:4", "CUDNN"), ("tpu-v5p:2x2x1", "TPU_SPLASH")]
)
def test_the_kernel_of_the_device_is_the_default_where_it_is_faster(cluster, kernel, scans):
    step = step_of(causal, scans=scans)
    plan = planned(step, cluster)
    assert plan.record.attention_kernel == kernel
    (note,) = [note for note in plan.record.notes if note.startswith("attention runs by")]
    assert "less of a step than by the operations as they are written" in note
    for attention in ("as written", "blockwise", "kernel"):
        asked = planned(step, cluster, attention=attention)
        assert plan.predicted.step_time_s <= asked.predicted.step_time_s
        assert not any(note.startswith("attention runs by") for note in asked.record.notes)


def test_a_recipe_takes_it_too():
    assert planned(step_of(causal), "dgx-h100:4", plan=recipes.zero(3)).record.attention_kernel == "CUDNN"


def test_attention_that_the_kernel_cannot_run_is_named_with_the_reason():
    (note,) = [note for note in planned(step_of(causal, jnp.float32)).record.notes if "cuDNN" in note]
    assert note.endswith("cuDNN's fused attention does not take float32 (bfloat16 or float16)")
    (note,) = [note for note in planned(step_of(capped)).record.notes if "cuDNN" in note]
    assert "cuDNN's fused attention does not take tanh at " in note
    assert "test_step_ways.py" in note


# Memory: 6 layers of width 32 on one CPU device.


def mlp(x, p):
    h = jnp.tanh(x * p["scale"]) @ p["up"]
    return x + jax.nn.gelu(h) @ p["down"]


def scanned(state, batch):
    def loss(state):
        x, _ = jax.lax.scan(lambda x, p: (mlp(x, p), None), batch["x"], state)
        return jnp.mean((x - batch["y"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients), value


def numbers(examples=256):
    keys = iter(jax.random.split(jax.random.key(0), 5))
    normal = lambda *shape: 0.3 * jax.random.normal(next(keys), shape)
    state = {"scale": normal(6, 32), "up": normal(6, 32, 96), "down": normal(6, 96, 32)}
    return state, {"x": normal(examples, 32), "y": normal(examples, 32)}


@pytest.mark.cases(1)
@pytest.mark.parametrize(("devices", "share"), [(1, 0.2), (2, 0.6)])
def test_scans_compute_again_what_does_not_fit(devices, share):
    state, batch = numbers()
    options = dict(cluster=slow_cluster(devices), cache_dir=None)
    free = autopar.plan(scanned, state, batch, **grouped(**options))
    assert free.record.scan_recompute == ""
    limit_bytes = int(share * max(free.predicted.peak_bytes))
    step = autopar.parallelize(scanned, **grouped(memory_limit_bytes=limit_bytes, **options))
    plan = step.plan(state, batch)
    assert plan.record.scan_recompute
    assert max(plan.predicted.peak_bytes) <= limit_bytes
    assert any(note.startswith("the backward pass of scans over layers reads ") for note in plan.record.notes)
    expected = jax.jit(scanned)(state, batch)
    got = step(jax.tree.map(jnp.copy, state), batch)
    assert_close(jax.tree.map(np.asarray, got), expected)


def fastest_s(devices, share, **options):
    """The fastest program that fits, as the code is written, in a share of the memory of one program."""
    state, batch = numbers()
    step = trace(scanned, jax.eval_shape(lambda: (state, batch)), names=("state", "batch"), donate=(0,), batch=(1,))

    def found(**wishes):
        request = PlanRequest(scan_recompute="", **wishes)
        context = planning_context(step, slow_cluster(devices), request, RuleBook(), Progress("", show=False))
        return ask_sources(context)

    peak_bytes = min(candidate.peak_bytes for candidate in found().candidates)
    return found(memory_limit_bytes=int(share * peak_bytes), **options).fastest_s


@pytest.mark.cases(1)
@pytest.mark.parametrize(("devices", "share"), [(1, 0.5), (2, 0.8)])
def test_micro_batches_wait_where_they_are_deferred_and_where_another_plan_is_faster(devices, share):
    in_micro_batches_s = fastest_s(devices, share)
    assert in_micro_batches_s < math.inf
    # One stage in few micro-batches is planned at once; the search over stages finds no slower one.
    in_few_s = fastest_s(devices, share, defer_stages=True)
    assert in_few_s >= in_micro_batches_s
    # A plan of the step in another way is no bound of what one stage may take in this one.
    assert fastest_s(devices, share, to_beat_s=2 * in_micro_batches_s) == in_micro_batches_s
    assert fastest_s(devices, share, to_beat_s=1e-9) == in_few_s


def test_a_quick_search_takes_one_stage_in_the_fewest_micro_batches_where_no_program_fits():
    state, batch = numbers()
    options = dict(cluster=slow_cluster(1), cache_dir=None, effort="quick")
    free = autopar.plan(scanned, state, batch, **grouped(**options))
    limit_bytes = int(0.2 * max(free.predicted.peak_bytes))
    step = autopar.parallelize(scanned, **grouped(memory_limit_bytes=limit_bytes, **options))
    plan = step.plan(state, batch)
    assert plan.record.pipeline is not None
    assert plan.record.pipeline.num_microbatches > 1
    assert len(plan.record.pipeline.stages) == 1
    assert max(plan.predicted.peak_bytes) <= limit_bytes
    assert any("takes one program or one stage where one fits" in rejection.why for rejection in plan.record.rejected)
    expected = jax.jit(scanned)(state, batch)
    assert_close(jax.tree.map(np.asarray, step(jax.tree.map(jnp.copy, state), batch)), expected)


def test_a_step_without_examples_that_does_not_fit_says_that_it_is_memory():
    def step(state):
        return state - 0.1 * jnp.tanh(state @ state)

    too_little = grouped(cluster=slow_cluster(2), cache_dir=None, memory_limit_bytes=100_000)
    with pytest.raises(MemoryLimitError):
        autopar.plan(step, jax.ShapeDtypeStruct((512, 512), jnp.float32), **too_little)


# The order in which ways are tried, by plans that are made up.


def made_up(step_time_s, *, peak_bytes=50, trial_bytes=200, trial_s=1.0, microbatches=1):
    """A plan in 100 bytes, of which 40 are needed throughout, and a program that was tried."""
    trial = CandidateRecord(source="", text="", axis_sizes=(1,), step_time_s=trial_s, peak_bytes=trial_bytes)
    memory = types.SimpleNamespace(throughout={"parameters": 40})
    predicted = types.SimpleNamespace(step_time_s=step_time_s, peak_bytes=(peak_bytes,), memory=(memory,))
    pipeline = types.SimpleNamespace(num_microbatches=microbatches, stages=(1,)) if microbatches > 1 else None
    record = types.SimpleNamespace(
        pipeline=pipeline, tried=(trial,), weighed=(), memory_limit_bytes=100, notes=(), predicted=predicted
    )
    cluster = types.SimpleNamespace(num_devices=1)
    return types.SimpleNamespace(record=record, predicted=predicted, cluster=cluster)


def too_large(needed_bytes):
    return MemoryLimitError(where="step", limit_bytes=100, needed_bytes=needed_bytes, largest=[], hint="")


WAYS = (
    StepWay(attention=Attention.AS_WRITTEN, least_s=1.0, saved_bytes=150),
    StepWay(attention=Attention.KERNEL, least_s=2.0, saved_bytes=30),
    StepWay(attention=Attention.BLOCKWISE, least_s=float("inf")),
)


def tried(answers, ways=WAYS):
    """(attention of the ways that were planned, the plans or the error): of those that fit as one program, which are
    tried first, then of those in any program.
    """
    asked, one_program = [], []

    def plans_with(request):
        if not request.defer_stages:
            asked.append(request.attention.value)
        elif request.attention in answers and not isinstance(answers[request.attention], Exception):
            one_program.append(request.attention.value)
        answer = answers[request.attention]
        if isinstance(answer, Exception):
            raise answer
        return (answer,)

    try:
        found = plans_in_memory(PlanRequest(), ways, plans_with, 1)
    except MemoryLimitError as error:
        found = error
    return one_program + asked, found


def test_where_memory_is_ample_the_first_way_is_taken():
    plan = made_up(3.0, trial_bytes=50, trial_s=3.0)
    assert tried({Attention.AS_WRITTEN: plan}) == (["as written"], (plan,))


def test_a_way_that_may_be_faster_is_tried_and_taken_where_it_is():
    slow, fast = made_up(3.0), made_up(2.5)
    answers = {Attention.AS_WRITTEN: slow, Attention.KERNEL: fast}
    assert tried(answers) == (["as written", "kernel"], (fast,))
    assert tried({Attention.AS_WRITTEN: fast, Attention.KERNEL: slow}) == (["as written", "kernel"], (fast,))
    at_its_bound = made_up(2.0)
    assert tried({Attention.AS_WRITTEN: at_its_bound}) == (["as written"], (at_its_bound,))


def test_a_slower_program_that_does_not_fit_asks_for_no_leaner_way():
    plan = made_up(3.0, trial_s=4.0)
    assert tried({Attention.AS_WRITTEN: plan}) == (["as written"], (plan,))


def test_a_pipeline_that_is_faster_than_a_program_that_fits_is_not_searched_for_again():
    plan = made_up(1.9, trial_bytes=90, trial_s=2.0, microbatches=4)
    assert tried({Attention.AS_WRITTEN: plan}, WAYS[:1]) == (["as written"], (plan,))


SAVING = [
    StepWay(attention=attention, least_s=least_s, saved_bytes=saved_bytes)
    for attention, least_s, saved_bytes in zip(Attention, (1.0, 1.2, 1.4, 1.6), (150, 90, 60, 10), strict=False)
]


def test_the_way_comes_next_that_saves_as_much_as_fits():
    # In one micro-batch 200 bytes are 60 more than fit, in two 120: the way with 90 of 150 fits in two.
    first = made_up(2.0, peak_bytes=80, microbatches=4)
    answers = {SAVING[0].attention: first, SAVING[1].attention: made_up(1.3), SAVING[2].attention: made_up(1.9)}
    of_first, of_second = SAVING[0].attention.value, SAVING[1].attention.value
    # The first was planned as one stage alone before the second: a search over stages may make it the fastest.
    assert tried(answers, SAVING) == ([of_first, of_second, of_first], (made_up(1.3),))


def test_where_the_first_does_not_fit_the_leanest_is_next_and_then_what_lies_between():
    answers = {way.attention: too_large(300 - 10 * i) for i, way in enumerate(SAVING)}
    answers[SAVING[3].attention] = made_up(2.0, trial_bytes=50)
    asked, found = tried(answers, SAVING)
    assert found == (answers[SAVING[3].attention],)
    # Each is of another attention: that one does not fit tells nothing of the others.
    assert asked == [SAVING[i].attention.value for i in (3, 0, 2, 1)]


def test_of_one_attention_what_saves_more_than_half_of_the_way_to_one_that_does_not_fit_is_left_out():
    ways = [dataclasses.replace(way, attention=Attention.KERNEL, scan_recompute=str(i)) for i, way in enumerate(SAVING)]
    asked = []

    def plans_with(request):
        asked.append((request.scan_recompute, request.defer_stages))
        if request.scan_recompute == "3":
            return (made_up(2.0, trial_bytes=50),)
        raise too_large(300)

    plans_in_memory(PlanRequest(), ways, plans_with, 1)
    # 90 bytes lie beyond (60 + 10) / 2
    assert asked == [("0", True), ("3", True), ("0", False), ("2", False)]


@pytest.mark.parametrize(("needed_bytes", "others"), [(300, []), (120, [("2", False)])])
def test_what_saves_less_by_as_much_as_another_is_over_the_limit_is_not_left_out(needed_bytes, others):
    ways = [dataclasses.replace(way, attention=Attention.KERNEL, scan_recompute=str(i)) for i, way in enumerate(SAVING)]
    asked = []

    def plans_with(request):
        asked.append((request.scan_recompute, request.defer_stages))
        if request.scan_recompute == "3":
            return (made_up(2.0, peak_bytes=20, trial_bytes=20),)
        raise too_large(needed_bytes if request.scan_recompute == "1" else 300)

    plans_in_memory(PlanRequest(), ways, plans_with, 1)
    # 60 bytes lie beyond (90 + 10) / 2, and not beyond 90 - 20
    assert asked == [("0", True), ("3", True), ("1", False), *others]


@pytest.mark.parametrize(("trial_bytes", "asked_bytes"), [(140, 110), (120, 130), (218, None)])
def test_a_choice_by_value_is_made_for_the_memory_of_a_program_that_is_known(trial_bytes, asked_bytes):
    # A program of 150 saved bytes takes 40, 20 or 118 bytes more than there are; that of 30 saved bytes is slow.
    more, less = (
        StepWay(attention=Attention.KERNEL, scan_recompute=str(n), least_s=s, saved_bytes=n, kept_bytes=n - 10.0)
        for n, s in ((150, 1.0), (30, 1.9))
    )
    made, asked = dataclasses.replace(less, scan_recompute="made", least_s=1.2, saved_bytes=100, kept_bytes=90.0), []

    def within(near, most_bytes):
        asked.append((near, most_bytes))
        return made if near is less else None

    def plans_with(request):
        if request.scan_recompute == "made":
            return (made_up(1.3, trial_bytes=50),)
        return (made_up(1.9, trial_bytes=trial_bytes, trial_s=1.0),)

    (plan,) = plans_in_memory(PlanRequest(), [more, less], plans_with, 1, within=within)
    if asked_bytes is None:  # 32 bytes would take 1.885 s, not 1 % less than the plan
        assert (asked, plan.predicted.step_time_s) == ([], 1.9)
    else:
        assert asked[0] == (less, pytest.approx(asked_bytes))
        assert plan.predicted.step_time_s == 1.3


def test_one_program_is_tried_first_and_then_what_is_faster_in_micro_batches():
    first, *_, leanest = SAVING
    asked = []

    def plans_with(request):
        asked.append((request.attention, request.defer_stages, request.to_beat_s))
        if request.attention is leanest.attention:
            return (made_up(1.65, trial_bytes=50, trial_s=1.65),)
        raise too_large(200)

    (plan,) = plans_in_memory(PlanRequest(), SAVING, plans_with, 1)
    assert plan.predicted.step_time_s == 1.65
    # Of the 200 bytes 140 less are saved in the leanest, which takes 1.6 s at least.
    assert asked[:2] == [(first.attention, True, float("inf")), (leanest.attention, True, float("inf"))]
    assert asked[2] == (first.attention, False, 1.65)
    assert all(to_beat_s == 1.65 for _, _, to_beat_s in asked[2:])


def test_ways_that_recompute_otherwise_are_compared_as_one_stage_before_any_is_searched_for_in_full():
    ways = [dataclasses.replace(way, attention=Attention.KERNEL, scan_recompute=str(i)) for i, way in enumerate(SAVING)]
    one_stage_s, asked = {"1": 1.8, "2": 1.7, "3": 1.9}, []

    def plans_with(request):
        way = request.scan_recompute
        asked.append((way, request.defer_stages))
        if way not in one_stage_s:
            raise too_large(300)
        faster_s = 0.0 if request.defer_stages else 0.2
        return (made_up(one_stage_s[way] - faster_s, peak_bytes=80, trial_bytes=150, microbatches=2),)

    (plan,) = plans_in_memory(PlanRequest(), ways, plans_with, 1)
    assert plan.predicted.step_time_s == pytest.approx(1.5)
    # The leanest first, then those that may be faster than it; 0.2 s less than 1.8 s do not beat 1.5 s.
    assert asked == [("0", True), ("3", True), ("2", True), ("1", True), ("2", False)]


@pytest.mark.parametrize("first_s", [1.9, 1.2])
def test_a_way_that_is_the_best_as_one_stage_is_searched_for_in_full(first_s):
    one_stage_s = {Attention.AS_WRITTEN: 2.6, Attention.KERNEL: 1.7}
    in_full_s = {Attention.AS_WRITTEN: first_s, Attention.KERNEL: 1.4}
    ways = [
        StepWay(attention=Attention.AS_WRITTEN, least_s=1.0, saved_bytes=50),
        StepWay(attention=Attention.KERNEL, least_s=0.8, saved_bytes=40),
    ]

    def plans_with(request):
        of = one_stage_s if request.defer_stages else in_full_s
        return (made_up(of[request.attention], peak_bytes=80, trial_bytes=150, microbatches=2),)

    (plan,) = plans_in_memory(PlanRequest(), ways, plans_with, 1)
    assert plan.predicted.step_time_s == min(first_s, 1.4)


def test_where_every_plan_has_stages_the_fastest_way_is_first():
    asked = []

    def plans_with(request):
        asked.append((request.attention, request.defer_stages))
        return (made_up(1.1, microbatches=4),)

    plans_in_memory(PlanRequest(), SAVING[::-1], plans_with, 512, in_stages=True)
    assert asked == [(SAVING[0].attention, False)]
    nearly = dataclasses.replace(SAVING[1], least_s=1.005)
    plans_in_memory(PlanRequest(), (nearly, *SAVING[2:], SAVING[0]), plans_with, 512, in_stages=True)
    assert asked[1:] == [(nearly.attention, False)]


def test_the_last_way_is_taken_where_nothing_else_fits():
    plan = made_up(9.0)
    answers = {Attention.AS_WRITTEN: too_large(300), Attention.KERNEL: too_large(150), Attention.BLOCKWISE: plan}
    assert tried(answers) == (["as written", "kernel", "blockwise"], (plan,))
    found = tried(answers | {Attention.BLOCKWISE: too_large(200)})[1]
    assert found.needed_bytes == 150


def test_a_way_says_that_it_was_chosen():
    plan = dataclasses.replace(planned(step_of(causal)), trees=None)
    (way,) = (dataclasses.replace(WAYS[0], notes=("chosen",)),)
    _, (found,) = tried({Attention.AS_WRITTEN: plan}, (way,))
    assert found.record.notes == (*plan.record.notes, "chosen")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rounding_in_16_bits_is_told_where_attention_has_them(dtype):
    notes = planned(step_of(causal, dtype), "tpu-v5p:2x2x1").record.notes
    (note,) = [note for note in notes if note.startswith("attention runs by")]
    assert ("in 16 bits" in note) == (dtype == jnp.bfloat16)
