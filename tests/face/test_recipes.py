"""Manual plans: what they send is what the literature says, and they compute what plain `jax.jit` does."""

import jax
import pytest

import autopar
from autopar import recipes
from autopar.errors import InvalidArgumentError, UnsupportedError
from benchmarks.zoo import CASES
from tests.small_steps import verified

MLP = CASES["mlp"](batch=32)
GPT = CASES["gpt"](layers=2, width=64, length=32, batch=16)
MOE = CASES["moe"](batch=16)
WIDTH, LENGTH, BATCH, LAYERS, HEADS = 64, 32, 16, 2, 4


def sent(made):
    return {c.name: c.compiled for c in made.collectives}


def counts(made):
    return {c.name: c.compiled for c in made.counts}


def parameter_bytes(case):
    state = jax.eval_shape(case.init, jax.random.key(0))
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.params))


@pytest.mark.cases(1)
@pytest.mark.parametrize("case", [MLP, GPT], ids=["mlp", "gpt"])
def test_data_parallelism_reduces_every_gradient_once(case):
    made, plan = verified(case, recipes.data_parallel(), 8)
    assert set(sent(made)) == {"all-reduce", "total"}
    assert sent(made)["all-reduce"] == pytest.approx(2 * 7 / 8 * parameter_bytes(case), rel=0.001)
    assert plan.groups() == {"data": [list(range(8))]}


@pytest.mark.cases(1)
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("case", [MLP, GPT], ids=["mlp", "gpt"])
def test_zero_1_and_2_send_as_much_as_data_parallelism(case, stage):
    made, plan = verified(case, recipes.zero(stage), 8)
    once = 7 / 8 * parameter_bytes(case)
    assert sent(made)["reduce-scatter"] == pytest.approx(once, rel=0.001)
    assert sent(made)["all-gather"] == pytest.approx(once, rel=0.001)
    optimizer = [v for v in plan.record.arguments if ".trace" in v.path]
    assert optimizer
    assert all(any(v.layout.dims) for v in optimizer)
    assert not any(any(v.layout.dims) for v in plan.record.arguments if ".params[" in v.path and ".trace" not in v.path)


def test_master_weights_in_parts_are_gathered_once_for_all_passes_and_micro_batches():
    case = CASES["gpt_bf16"](layers=2, width=64, length=32, batch=16)
    made, plan = verified(case, recipes.combine(zero=1, gather="ahead", num_microbatches=2), 8)
    # CPU devices send bfloat16 in 32 bits. The lookup and the logits each read a cast of the embedding.
    gathered = 7 / 8 * (parameter_bytes(case) + 4 * 64 * 64)
    assert sent(made)["all-gather"] == pytest.approx(gathered, rel=0.001)
    assert all(any(v.layout.dims) for v in plan.record.arguments if v.kind == "state" and max(v.shape, default=0) > 7)


def test_zero_3_gathers_parameters_for_each_pass():
    made, plan = verified(GPT, recipes.zero(3), 8)
    once = 7 / 8 * parameter_bytes(GPT)
    assert sent(made)["reduce-scatter"] == pytest.approx(once, rel=0.001)
    # The first matrices and the norms' offsets are not read again by the backward pass.
    # The embedding is gathered for the lookup, freed, and gathered again for the logits.
    table = 7 / 8 * 4 * 64 * 64
    assert 1.9 * once <= sent(made)["all-gather"] <= 2 * once + table
    assert all(any(v.layout.dims) for v in plan.record.arguments if v.kind == "state" and max(v.shape, default=0) > 7)


def test_statistics_of_the_batch_become_state_in_parts():
    case = CASES["nnx_model"](batch=16)
    _, plan = verified(case, recipes.zero(3), 8)
    statistics = [v for v in plan.record.arguments if "['mean']" in v.path or "['var']" in v.path]
    assert [v.layout.dims for v in statistics] == [((0,),), ((0,),)]


def test_tensor_parallelism_reduces_four_activations_a_layer():
    _, plan = verified(GPT, recipes.tensor_parallel(), HEADS)
    activation = 2 * (HEADS - 1) / HEADS * BATCH * LENGTH * WIDTH * 4
    reduces = [
        use
        for use in plan.predicted.collectives
        if "layer" in use.module and use.kind == "all-reduce" and use.sent_bytes / use.count > 0.5 * activation
    ]
    assert sum(use.count for use in reduces) == 4 * LAYERS
    assert sum(use.sent_bytes for use in reduces) == pytest.approx(4 * LAYERS * activation)
    assert plan.groups() == {"model": [[0, 1, 2, 3]]}


def test_sequence_parallelism_has_no_large_all_reduce():
    made, _ = verified(GPT, recipes.combine(dp=1, tp=HEADS, sequence_parallel=True), HEADS)
    activation = BATCH * LENGTH * WIDTH * 4
    assert sent(made).get("all-reduce", 0.0) < 0.3 * activation
    assert sent(made)["reduce-scatter"] >= 4 * LAYERS * (HEADS - 1) / HEADS * activation


def test_megatrons_sequence_parallelism_by_either_name():
    assert recipes.sequence_parallel(size=HEADS) == recipes.combine(tp=HEADS, sequence_parallel=True)


def test_ulysses_exchanges_positions_for_heads_and_back():
    made, plan = verified(GPT, recipes.combine(dp=2, sp=HEADS), 8)
    # Of queries, keys, values and what attention makes of them in each pass, of a whole copy's part of the batch.
    part = BATCH * LENGTH * WIDTH * 4 / 8
    assert counts(made)["all-to-all"] == 2 * 4 * LAYERS
    assert sent(made)["all-to-all"] == 2 * 4 * LAYERS * part * (HEADS - 1) / HEADS
    assert set(sent(made)) == {"all-to-all", "all-reduce", "total"}
    # Every device has the whole model, but for the positions of the embedding that are its own.
    whole = parameter_bytes(GPT) - LENGTH * WIDTH * 4
    assert sent(made)["all-reduce"] == pytest.approx(2 * 7 / 8 * whole + LENGTH * WIDTH * 4 / HEADS, rel=0.001)
    assert plan.groups() == {"data": [[0, 4], [1, 5], [2, 6], [3, 7]], "sequence": [[0, 1, 2, 3], [4, 5, 6, 7]]}


@pytest.mark.parametrize(
    ("wanted", "runs"),
    [
        pytest.param({"dp": 2, "sp": 4, "zero": 1}, 1, marks=pytest.mark.slow),
        pytest.param({"dp": 2, "sp": 4, "zero": 3}, 1, marks=pytest.mark.slow),
        pytest.param({"dp": 2, "sp": 2, "tp": 2}, 1, marks=pytest.mark.slow),
        ({"dp": 1, "sp": 4, "pp": 2, "num_microbatches": 2}, 2),
    ],
    ids=["zero 1", "zero 3", "tensor", "pipeline"],
)
def test_ulysses_with_other_kinds_of_parallelism(wanted, runs):
    made, _ = verified(GPT, recipes.combine(**wanted), 8)
    part = BATCH * LENGTH * WIDTH * 4 / (8 / wanted.get("pp", 1))
    assert counts(made)["all-to-all"] == 2 * 4 * LAYERS * runs
    assert sent(made)["all-to-all"] == 2 * 4 * LAYERS * part * (1 - 1 / wanted["sp"])
    assert made.total.predicted == made.total.compiled


def test_what_one_projection_makes_is_exchanged_at_once():
    made, _ = verified(CASES["gpt_scan"](layers=LAYERS, batch=8, length=16, width=32), recipes.combine(dp=2, sp=4), 8)
    part = 8 * 16 * 32 * 4 / 8
    assert counts(made)["all-to-all"] == 2 * 2 * LAYERS
    assert sent(made)["all-to-all"] == 2 * (3 + 1) * LAYERS * part * 3 / 4


@pytest.mark.slow
def test_ulysses_leaves_experts_alone():
    made, _ = verified(MOE, recipes.combine(dp=2, sp=4), 8)
    assert counts(made)["all-to-all"] == 2 * 4


@pytest.mark.parametrize(
    ("wanted", "runs"),
    [
        ({"dp": 1, "sp": 8}, 1),
        pytest.param({"dp": 2, "sp": 4, "zero": 3}, 1, marks=pytest.mark.slow),
        pytest.param({"dp": 2, "sp": 2, "tp": 2}, 1, marks=pytest.mark.slow),
        pytest.param({"dp": 1, "sp": 4, "pp": 2, "num_microbatches": 2}, 2, marks=pytest.mark.slow),
    ],
    ids=["alone", "zero 3", "tensor", "pipeline"],
)
def test_a_ring_hands_keys_and_values_on_in_each_pass(wanted, runs):
    made, _ = verified(GPT, recipes.combine(sequence="ring", **wanted), 8)
    part = BATCH * LENGTH * WIDTH * 4 / (8 / wanted.get("pp", 1))
    # Keys and values forward; keys, values and their gradients backward.
    turns = (2 + 4) * LAYERS * (wanted["sp"] - 1)
    # Halves of positions change places, but the first of two devices: queries, keys, values and what attention makes of
    # them forward, also the gradients of the four backward, with one number of each row and pass.
    halves = LAYERS * (1 if wanted["sp"] == 2 else 2)
    assert counts(made)["collective-permute"] == (turns + (4 + 8 + 2) * halves) * runs
    of_rows = part * HEADS / WIDTH
    assert sent(made)["collective-permute"] == turns * part + (12 * part + 2 * of_rows) * halves / 2
    assert "all-to-all" not in sent(made)
    assert made.total.predicted == made.total.compiled


def test_a_ring_never_holds_all_scores():
    case = CASES["gpt"](layers=1, width=16, length=512, batch=1, heads=1, vocabulary=16)
    made, _ = verified(case, recipes.sequence_parallel("ring"), 8)
    scores = 512 * 512 * 4
    # Blocks of an eighth of the queries by an eighth of the keys, and activations.
    assert made.peak.compiled < scores / 2
    assert made.peak.predicted == pytest.approx(made.peak.compiled, rel=0.25)


@pytest.mark.parametrize(
    ("case", "turns", "exchanged"),
    [
        # Of causal attention the halves of 14 arrays of each layer change places.
        pytest.param(CASES["gpt_bf16"](batch=8), 2 * 6, 2 * 14, marks=pytest.mark.slow),
        pytest.param(MOE, 2 * 6, 2 * 14, marks=pytest.mark.slow),
        # Scores are computed again: keys and values come round once more, and four arrays more change places, for in
        # the first forward pass nobody reads the numbers of rows.
        pytest.param(CASES["gpt_scan_remat"](layers=2, batch=8), 2 * 8, 2 * 18, marks=pytest.mark.slow),
        (CASES["gpt_scan"](layers=2, batch=8), 2 * 6, 2 * 14),
        pytest.param(CASES["bert"](), 2 * 6, 0, marks=pytest.mark.slow),
    ],
    ids=["bfloat16", "moe", "recomputed", "scan", "padded"],
)
def test_rings_of_other_models(case, turns, exchanged):
    made, _ = verified(case, recipes.combine(dp=2, sp=4, sequence="ring"), 8)
    assert counts(made)["collective-permute"] == turns * 3 + 2 * exchanged


def test_a_plan_with_a_ring_is_saved_and_run(tmp_path):
    recipe = recipes.sequence_parallel("ring", size=4)
    state, batch = jax.jit(GPT.init)(jax.random.key(0)), GPT.batch(0)
    step = autopar.parallelize(GPT.step, plan=recipe, cache_dir=None)
    step.plan(state, batch).save(tmp_path / "plan.json")
    loaded = autopar.Plan.load(tmp_path / "plan.json")
    again = autopar.verify(autopar.parallelize(GPT.step, plan=loaded, cache_dir=None), state, batch)
    assert counts(again)["collective-permute"] == (6 * 3 + 2 * 14) * LAYERS
    assert again.difference <= GPT.tolerance


def test_positions_that_cannot_be_shared_evenly_are_named():
    case = CASES["gpt"](length=12)
    step = autopar.parallelize(case.step, plan=recipes.sequence_parallel("ring"), cache_dir=None)
    with pytest.raises(UnsupportedError, match=r"layer0/self_attention.*8 devices can share evenly.*12 positions"):
        step.plan(jax.eval_shape(case.init, jax.random.key(0)), case.batch(0))


@pytest.mark.parametrize("kind", ["ulysses", "ring"])
def test_a_step_without_attention_has_no_sequences_to_share(kind):
    step = autopar.parallelize(MLP.step, plan=recipes.sequence_parallel(kind), cache_dir=None)
    with pytest.raises(UnsupportedError, match="a step with attention"):
        step.plan(jax.eval_shape(MLP.init, jax.random.key(0)), MLP.batch(0))


def test_attention_without_enough_heads_is_named():
    step = autopar.parallelize(GPT.step, plan=recipes.sequence_parallel("ulysses"), cache_dir=None)
    with pytest.raises(UnsupportedError, match=r"layer0/self_attention.*8 devices can share.*heads: \[4\]"):
        step.plan(jax.eval_shape(GPT.init, jax.random.key(0)), GPT.batch(0))


@pytest.mark.parametrize("case", [GPT, pytest.param(MOE, marks=pytest.mark.slow)], ids=["gpt", "moe"])
def test_three_kinds_of_parallelism_together(case):
    recipe = recipes.combine(dp=2, tp=2, pp=2, num_microbatches=2)
    _, plan = verified(case, recipe, 8)
    assert plan.groups() == {
        "data": [[0, 2], [1, 3], [4, 6], [5, 7]],
        "model": [[0, 1], [2, 3], [4, 5], [6, 7]],
        "pipeline": [[0, 4], [1, 5], [2, 6], [3, 7]],
    }


def test_stages_of_one_device_take_several_examples_at_a_time():
    _, plan = verified(CASES["mlp"](layers=4, batch=8), recipes.combine(pp=4, num_microbatches=4), 4)
    assert [stage.axis_sizes for stage in plan.record.pipeline.stages] == [(1,)] * 4
    assert plan.predicted.sent_bytes == 0


def test_micro_batches_that_are_not_asked_for_leave_every_copy_an_example():
    case, recipe = CASES["mlp"](batch=16), recipes.combine(pp=2)  # four copies of two stages
    step = autopar.parallelize(case.step, plan=recipe, cache_dir=None)
    plan = step.plan(jax.eval_shape(case.init, jax.random.key(0)), case.batch(0))
    assert plan.record.pipeline.num_microbatches == 4


def test_groups_of_sixteen_devices_are_megatrons():
    cluster = autopar.Cluster.preset("dgx-a100-40g", hosts=2)
    case = CASES["gpt"](layers=4, batch=16)
    state = jax.eval_shape(case.init, jax.random.key(0))
    recipe = recipes.combine(dp=2, tp=2, pp=4, num_microbatches=4)
    options = {"plan": recipe, "cache_dir": None}
    plan = autopar.plan(case.step, state, case.batch(0), cluster=cluster, **options)
    assert plan.groups() == {
        "data": [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]],
        "model": [[i, i + 1] for i in range(0, 16, 2)],
        "pipeline": [[i, i + 4, i + 8, i + 12] for i in range(4)],
    }


def test_zero_2_keeps_parts_of_the_sums_over_micro_batches():
    _, whole = verified(MLP, recipes.combine(num_microbatches=2), 8)
    made, parts = verified(MLP, recipes.combine(zero=2, num_microbatches=2), 8)
    assert sent(made)["reduce-scatter"] == pytest.approx(2 * 7 / 8 * parameter_bytes(MLP), rel=0.001)
    assert max(parts.predicted.peak_bytes) < max(whole.predicted.peak_bytes)


def test_micro_batches_asked_for_beside_a_recipe_are_bound_by_it():
    step = autopar.parallelize(
        MLP.step, plan=recipes.zero(3), search=autopar.Search(num_microbatches=2), cache_dir=None
    )
    plan = step.plan(jax.eval_shape(MLP.init, jax.random.key(0)), MLP.batch(0))
    assert plan.record.pipeline.num_microbatches == 2
    assert plan.groups() == {"data": [list(range(8))]}
    assert all(any(v.layout.dims) for v in plan.record.arguments if v.kind == "state" and max(v.shape, default=0) > 7)


@pytest.mark.parametrize(
    ("make", "where"),
    [
        (lambda: recipes.zero(4), "zero"),
        (lambda: recipes.tensor_parallel("4d"), "tensor_parallel"),
        (lambda: recipes.sequence_parallel("rings"), "sequence_parallel"),
        (lambda: recipes.combine(sp=2, sequence="rings"), "sequence"),
        (lambda: recipes.combine(sp=0), "sp"),
        (lambda: recipes.zero(1, gather="before"), "gather"),
        (lambda: recipes.combine(gather="ahead"), "gather"),
        (lambda: recipes.combine(tp=0), "tp"),
        (lambda: recipes.tensor_parallel(size=0), "size"),
        (lambda: recipes.combine(schedule="2f2b"), "schedule"),
        (lambda: recipes.combine(recompute="everything"), "recompute"),
    ],
)
def test_wrong_wishes_are_named(make, where):
    with pytest.raises(InvalidArgumentError, match=where):
        make()


def test_sizes_that_do_not_make_up_the_devices():
    step = autopar.parallelize(MLP.step, plan=recipes.combine(dp=3), cache_dir=None)
    with pytest.raises(InvalidArgumentError, match="make up the 8 devices"):
        step.plan(jax.eval_shape(MLP.init, jax.random.key(0)), MLP.batch(0))


@pytest.mark.parametrize("cut", [{}, pytest.param({"num_microbatches": 2}, marks=pytest.mark.slow)])
def test_fewer_heads_of_keys_than_devices(cut):
    # Grouped attention with two heads of keys for four devices: heads' own widths are split, and gathered for the
    # rotation of positions, which takes them apart.
    _, plan = verified(CASES["llama"](layers=1, kv_heads=2), recipes.combine(tp=4, **cut), 4)
    matrices = [v for v in plan.record.arguments if ".params['layers']" in v.path and len(v.shape) > 1]
    assert len(matrices) == 7
    assert all(any(v.layout.dims) for v in matrices)
    assert any("are gathered and cut anew" in note for note in plan.record.notes)
