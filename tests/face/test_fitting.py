"""`autopar.fit`: the largest batch that fits, by bisection over plans."""

import dataclasses
import json
import logging
import re

import jax
import jax.export
import jax.numpy as jnp
import pytest

import autopar
from autopar import recipes
from autopar.errors import InvalidArgumentError, MemoryLimitError
from autopar.fitting import FitRow, Fitting, check_batch, largest, resized, unit_of
from autopar.plan.fit_data import fit_values
from autopar.step_views import peak_on_other_batch
from tests.small_steps import MLP_BATCH, MLP_STATE, assert_close, grouped, mlp_step, slow_cluster

OPTIONS = dict(cache_dir=None)
LIMIT_BYTES = 100_000


SHARES = {
    "linear": lambda n, limit: n / (limit + 0.5),
    "with state": lambda n, limit: 0.7 + 0.3 * n / (limit + 0.5) if n <= limit else 1.0 + n / 1e6,
    "a leaner plan where memory is full": lambda n, limit: min(1.0, 4 * n / (limit + 1)) if n <= limit else 3.0,
    "constant": lambda n, limit: 0.5 if n <= limit else 2.0,
}


@pytest.mark.parametrize("kind", SHARES)
@pytest.mark.parametrize("limit", [0, 1, 2, 3, 7, 8, 9, 100, 5000])
@pytest.mark.parametrize("most", [1, 5, 8, 100_000])
def test_the_largest_number_that_fits(kind, limit, most):
    asked = []

    def share(n):
        asked.append(n)
        return SHARES[kind](n, limit)

    assert largest(share, most) == min(limit, most)
    assert len(set(asked)) == len(asked)
    assert 1 <= min(asked) <= max(asked) <= most
    assert len(asked) <= 4 * max(1, min(limit, most)).bit_length() + 2


@pytest.mark.parametrize("kind", SHARES)
@pytest.mark.parametrize("limit", [0, 1, 3, 100, 127, 128, 129, 130, 5000, 99_999])
def test_numbers_of_few_digits_need_few_plans(kind, limit):
    """Creeping up to a full memory, one number after the other, would take as long as planning for all."""
    asked = []

    def share(n):
        asked.append(n)
        return SHARES[kind](n, limit)

    found = largest(share, 2**24, bits=7)
    assert found <= limit < found + unit_of(found, 7)
    assert all(n % unit_of(n, 7) == 0 for n in asked)
    assert len(set(asked)) == len(asked)
    assert len(asked) <= 7 + 2 * max(1, limit).bit_length()


def test_a_leaner_plan_for_each_size_is_not_followed_to_the_last():
    asked = []

    def share(n):
        asked.append(n)
        return 0.9 + 0.1 * n / 2384 if n <= 2384 else 4.0

    guess = lambda fitting: max(2212, fitting[-1][0] + 1)
    assert 2384 - 32 < largest(share, 2**24, guess, bits=7) <= 2384
    assert len(asked) <= 13


def test_linear_memory_needs_few_plans():
    asked = []

    def share(n):
        asked.append(n)
        return n / 4321.5

    assert largest(share, 100_000) == 4321
    assert len(asked) <= 6


@pytest.mark.parametrize("leaner", [0, 1, 3])
def test_plans_whose_memory_is_known_are_few(leaner):
    """Each full memory leads to a plan that takes a tenth less, `leaner` times."""
    asked, plans = [], [100.5 * 1.1**k for k in range(leaner + 1)]

    def fitting_plan(n):
        return next((limit for limit in plans if n <= limit), plans[-1])

    def share(n):
        asked.append(n)
        return n / fitting_plan(n)

    assert largest(share, 10_000, lambda fitting: int(fitting_plan(fitting[-1][0])) if fitting[-1][0] else 1) == int(
        plans[-1]
    )
    assert len(asked) <= 4 + 2 * leaner


def batch_of(examples: int):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((examples, *x.shape[1:]), x.dtype), MLP_BATCH)


@pytest.mark.slow
@pytest.mark.parametrize(
    "cluster", ["local:4", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dgx-h100", "tpu-v5e:2x4"))]
)
def test_the_largest_batch_fits_and_one_more_does_not(cluster):
    step = autopar.parallelize(mlp_step, search=autopar.Search(memory_limit_bytes=LIMIT_BYTES), **OPTIONS)
    found = autopar.fit(step, MLP_STATE, MLP_BATCH, clusters=[cluster])
    size, multiple = found.largest(), found.multiples[cluster]
    assert size > multiple

    def plan(examples):
        options = OPTIONS | {"memory_limit_bytes": LIMIT_BYTES, "num_microbatches": 1}
        made = autopar.parallelize(mlp_step, cluster=cluster, **grouped(**options))
        return made.plan(MLP_STATE, batch_of(examples))

    own = plan(size)
    with pytest.raises(MemoryLimitError) as caught:
        plan(size + multiple)
    rows = {row.batch: row for row in found.rows}
    assert rows[size].step_time_s == own.predicted.step_time_s
    assert rows[size].peak_bytes == max(own.predicted.peak_bytes) <= LIMIT_BYTES
    assert not rows[size + multiple].fits
    assert rows[size + multiple].peak_bytes == caught.value.needed_bytes
    assert found.plans[cluster].predicted == own.predicted


def test_where_more_examples_are_not_tried_the_largest_batch_is_at_least_so_large(monkeypatch, tmp_path):
    monkeypatch.setattr("autopar.fitting.MOST_EXAMPLES", 64)
    found = autopar.fit(mlp_step, MLP_STATE, MLP_BATCH, clusters=["dgx-h100"])
    assert "dgx-h100: the largest batch that fits is at least 64 (of multiples of" in str(found)
    found.report(tmp_path / "fit.html")
    assert "the largest batch that fits is at least <b>64</b>" in (tmp_path / "fit.html").read_text()


def test_where_sizes_are_rounded_the_last_one_before_those_that_are_not_tried_is_told_as_the_least(monkeypatch):
    # Those up to 1,640 are tried, and of 204 times the 8 devices seven binary digits: 1,632 is the last.
    monkeypatch.setattr("autopar.fitting.MOST_EXAMPLES", 1640)
    found = autopar.fit(mlp_step, MLP_STATE, MLP_BATCH, clusters=["dgx-h100"])
    assert "dgx-h100: the largest batch that fits is at least 1632 (of multiples of 16)" in str(found)


@pytest.mark.parametrize(("fits", "text"), [(True, "is at least 8"), (False, "is 8")])
def test_a_larger_batch_that_does_not_fit_bounds_the_largest(fits, text):
    rows = (row_of("c", 8, 1.0), row_of("c", 16, 1.0 if fits else None), row_of("d", 32, 1.0))
    found = Fitting(step="train", rows=rows[:1] if fits else rows, multiples={"c": 8}, plans={})
    assert f"c: the largest batch that fits {text} (of multiples of 8)" in str(found)


@pytest.mark.parametrize(
    ("recipe", "examples"), [(recipes.data_parallel(), 192), (recipes.pipeline(2, num_microbatches=2), 64)]
)
def test_the_memory_of_other_sizes_in_the_same_layouts(recipe, examples):
    options = OPTIONS | {"cluster": slow_cluster(4), "plan": recipe}
    args = (MLP_STATE, batch_of(64))
    own = autopar.parallelize(mlp_step, **grouped(**options)).plan(MLP_STATE, batch_of(examples))
    step = autopar.parallelize(mlp_step, **grouped(**options))
    assert peak_on_other_batch(step, args, (MLP_STATE, batch_of(examples))) == max(own.predicted.peak_bytes)
    other = {name: jax.ShapeDtypeStruct((64, 2, leaf.shape[1]), leaf.dtype) for name, leaf in batch_of(64).items()}
    assert peak_on_other_batch(step, args, (MLP_STATE, other)) is None


def test_each_size_is_logged(caplog):
    step = autopar.parallelize(mlp_step, search=autopar.Search(memory_limit_bytes=LIMIT_BYTES), **OPTIONS)
    with caplog.at_level(logging.INFO, "autopar"):
        found = autopar.fit(step, MLP_STATE, MLP_BATCH, clusters=slow_cluster(2), multiple=64)  # one may stand alone
    told = [record.message for record in caplog.records if "planned in" in record.message]
    assert len(told) == len(found.rows)
    assert told[0].startswith("mlp_step on flat-2, batch 64: ")
    assert sum("does not fit" in line for line in told) == sum(not row.fits for row in found.rows) > 0


def test_several_clusters_with_prices():
    step = autopar.parallelize(mlp_step, search=autopar.Search(memory_limit_bytes=LIMIT_BYTES), **OPTIONS)
    clusters = [slow_cluster(2), slow_cluster(4)]
    found = autopar.fit(step, MLP_STATE, MLP_BATCH, clusters=clusters, multiple=32, prices={"flat-2": 7.2})
    assert set(found.multiples.values()) == {32}
    assert found.largest("flat-4") >= found.largest("flat-2") > 0
    for row in found.rows:
        if row.fits and row.cluster == "flat-2":
            assert row.price == pytest.approx(row.step_time_s / row.batch * 1e6 / 3600 * 7.2)
        else:
            assert row.price is None
    assert f"flat-2: the largest batch that fits is {found.largest('flat-2')} (of multiples of 32)" in str(found)
    assert json.loads(json.dumps(found.to_dict()))["largest"] == {n: found.largest(n) for n in ("flat-2", "flat-4")}


def test_micro_batches_that_are_named_are_kept():
    def most(**options):
        step = autopar.parallelize(mlp_step, **grouped(memory_limit_bytes=LIMIT_BYTES, **OPTIONS, **options))
        return autopar.fit(step, MLP_STATE, MLP_BATCH, clusters=[slow_cluster(2)], multiple=64).largest()

    assert most(num_microbatches=8) > most() > 0


@pytest.mark.slow
def test_batches_are_multiples_of_the_micro_batches_that_are_named():
    step = autopar.parallelize(
        mlp_step, search=autopar.Search(num_microbatches=6, memory_limit_bytes=LIMIT_BYTES // 2), **OPTIONS
    )
    found = autopar.fit(step, MLP_STATE, MLP_BATCH, clusters=[slow_cluster(4)])
    assert found.largest() > 0
    assert all(row.batch % 12 == 0 for row in found.rows)


def test_nothing_fits_where_the_state_alone_is_too_large():
    step = autopar.parallelize(mlp_step, search=autopar.Search(memory_limit_bytes=1000), **OPTIONS)
    found = autopar.fit(step, MLP_STATE, MLP_BATCH, clusters=[slow_cluster(2)])
    assert (found.largest(), found.plans) == (0, {})
    assert "flat-2: no batch fits" in str(found)


def test_other_arguments_may_hold_the_examples():
    def loss_step(state, scale, batch):
        new, metrics = mlp_step(state, batch)
        return jax.tree.map(lambda p: p * scale, new), metrics

    step = autopar.parallelize(
        loss_step, search=autopar.Search(memory_limit_bytes=LIMIT_BYTES), batch_argnums=2, **OPTIONS
    )
    scale = jax.ShapeDtypeStruct((), jnp.float32)
    assert autopar.fit(step, MLP_STATE, scale, MLP_BATCH, clusters=[slow_cluster(2)]).largest() > 2


def two_arguments(state, x, y):
    return mlp_step(state, {"x": x, "y": y})


def test_arguments_with_as_many_rows_are_resized_together():
    search = autopar.Search(memory_limit_bytes=LIMIT_BYTES)
    fitted = [
        autopar.fit(
            autopar.parallelize(function, search=search, **OPTIONS), MLP_STATE, *batch, clusters=[slow_cluster(2)]
        )
        for function, batch in ((two_arguments, MLP_BATCH.values()), (mlp_step, [MLP_BATCH]))
    ]
    assert fitted[0].largest() == fitted[1].largest() > 2


def test_an_error_of_the_function_names_the_arguments_of_another_size():
    step = autopar.parallelize(two_arguments, batch_argnums=1, **OPTIONS)
    with pytest.raises(TypeError) as raised:
        autopar.fit(step, MLP_STATE, *MLP_BATCH.values(), clusters=[slow_cluster(2)])
    (note,) = [note for note in raised.value.__notes__ if "autopar.fit" in note]
    assert note.startswith(
        "autopar.fit gave x 2 examples, and left state, y as given. Where others hold examples, name"
    )


@pytest.mark.slow
def test_a_batch_may_be_a_function_of_its_size():
    def transposed_step(state, batch):
        return mlp_step(state, {"x": batch["x"].T, "y": batch["y"]})

    def transposed(examples):
        batch = batch_of(examples)
        return {"x": jnp.zeros(batch["x"].shape[::-1]), "y": batch["y"]}

    step = autopar.parallelize(transposed_step, search=autopar.Search(memory_limit_bytes=LIMIT_BYTES), **OPTIONS)
    of_function = autopar.fit(step, MLP_STATE, transposed, clusters=[slow_cluster(2)], multiple=64)
    step = autopar.parallelize(mlp_step, search=autopar.Search(memory_limit_bytes=LIMIT_BYTES), **OPTIONS)
    assert (
        of_function.largest()
        >= autopar.fit(step, MLP_STATE, batch_of, clusters=[slow_cluster(2)], multiple=64).largest() / 2
        > 0
    )


def symbolic(*texts, constraints=()):
    """Float arrays by dimensions that are text, in one scope, under the names a, b, c, ..."""
    scope = jax.export.SymbolicScope(constraints)
    dims = [jax.export.symbolic_shape(text, scope=scope) for text in texts]
    return {chr(ord("a") + i): jax.ShapeDtypeStruct(shape, jnp.float32) for i, shape in enumerate(dims)}


def test_symbolic_dimensions_are_evaluated():
    state, batch = symbolic("4, b"), symbolic("b, 128", "2*b + 1, 3", "7, floordiv(b, 2)", "5, 6")
    check_batch("step", [state, batch], [1])
    got = resized([state, jax.ShapeDtypeStruct((9, 9), jnp.int32), batch], [2], 10)
    assert jax.tree.map(lambda leaf: leaf.shape, got) == [
        {"a": (4, 10)},
        (9, 9),
        {"a": (10, 128), "b": (21, 3), "c": (7, 5), "d": (5, 6)},
    ]


def test_symbolic_dimensions_have_one_variable_and_keep_its_constraints():
    with pytest.raises(InvalidArgumentError, match="of one variable, the number of examples, got 2, b, s"):
        check_batch("step", [symbolic("b, s")], [0])
    batch = symbolic("b, 2", constraints=["b >= 8", "mod(b, 4) == 0", "other >= 5"])
    assert resized([batch], [0], 12)[0]["a"].shape == (12, 2)
    with pytest.raises(InvalidArgumentError, match=r"for which b >= 8 holds, as \(b, 2\) says, got 4 examples"):
        resized([batch], [0], 4)
    with pytest.raises(InvalidArgumentError, match=r"got 9 examples"):  # jax words it with a product
        resized([batch], [0], 9)


def test_a_batch_with_symbolic_dimensions_fits_as_a_batch_of_its_size_does():
    (examples, _, _) = jax.export.symbolic_shape("b, 32, 16")
    batch = {name: jax.ShapeDtypeStruct((examples, leaf.shape[1]), leaf.dtype) for name, leaf in MLP_BATCH.items()}
    step = autopar.parallelize(mlp_step, search=autopar.Search(memory_limit_bytes=LIMIT_BYTES), **OPTIONS)
    options = {"clusters": [slow_cluster(2)], "multiple": 256}
    found = autopar.fit(step, MLP_STATE, batch, **options)
    assert found.rows == autopar.fit(step, MLP_STATE, MLP_BATCH, **options).rows
    with pytest.raises(InvalidArgumentError, match=r"batch\['x'\]: expected numbers as dimensions.*got \(b, 32\)"):
        step.plan(MLP_STATE, batch)


def test_a_batch_without_examples_is_refused():
    step = autopar.parallelize(mlp_step, **OPTIONS)
    uneven = {"x": jax.ShapeDtypeStruct((4, 32), jnp.float32), "y": jax.ShapeDtypeStruct((8, 16), jnp.float32)}
    with pytest.raises(InvalidArgumentError, match="a batch whose arrays all have one number of examples"):
        autopar.fit(step, MLP_STATE, uneven, clusters=[slow_cluster(2)])
    with pytest.raises(InvalidArgumentError, match="a positive whole number"):
        autopar.fit(step, MLP_STATE, MLP_BATCH, clusters=[slow_cluster(2)], multiple=0)
    with pytest.raises(InvalidArgumentError, match="got 'dgx-h1000'"):
        autopar.fit(step, MLP_STATE, MLP_BATCH, clusters="dgx-h1000")


def row_of(cluster, batch, step_time_s=None):
    peak_bytes = batch * 10
    return FitRow(
        cluster=cluster,
        batch=batch,
        fits=step_time_s is not None,
        peak_bytes=peak_bytes,
        limit_bytes=1000,
        step_time_s=step_time_s,
    )


def test_the_page_has_a_line_for_each_cluster(tmp_path):
    rows = (row_of("a<b", 1, 1.0), row_of("a<b", 100, 10.0), row_of("a<b", 101), row_of("c", 10, 1.0), row_of("d", 1))
    Fitting(step="train", rows=rows, multiples={"a<b": 1, "c": 10, "d": 1}, plans={}).report(tmp_path / "fit.html")
    page = (tmp_path / "fit.html").read_text()
    # Batches 1, 10 and 100, whose examples take 1 s, 0.1 s and 0.1 s.
    assert '<polyline points="0.0,0.0 360.0,190.0"' in page
    assert '<circle cx="180.0" cy="190.0"' in page
    assert (
        'aria-label="Seconds of an example over batch sizes: a&lt;b 1 s at 1 to 100 ms at 100; c 100 ms at 10"' in page
    )
    assert "a&lt;b, 100 examples: 100 ms each, 100% of the memory" in page
    assert "a<b" not in page
    assert "d: no batch fits" in page
    Fitting(step="train", rows=(row_of("d", 1),), multiples={"d": 1}, plans={}).report(tmp_path / "none.html")
    assert "<svg" not in (tmp_path / "none.html").read_text()


@pytest.mark.parametrize(
    ("batches", "expected"),
    [
        ([8, 288], ["8", "10", "20", "50", "100", "200", "288"]),
        ([1, 1000], ["1", "2", "5", "10", "20", "50", "100", "200", "1,000"]),
        ([1, 2**24], ["1", "16,777,216"]),
        ([64, 72], ["64", "72"]),
        ([8], ["8"]),
    ],
)
def test_the_numbers_of_an_axis_are_round_and_have_room(batches, expected):
    rows = [row_of("c", batch, 1.0 * batch) for batch in batches]
    time, memory = fit_values("train", rows, {"c": 1})["charts"]
    assert [text for _, text in time.x_ticks] == [text for _, text in memory.x_ticks] == expected
    assert [text for _, text in time.y_ticks] == ["1 s"]


def test_rows_have_the_intervals_of_their_steps(tmp_path):
    rows = (dataclasses.replace(row_of("c", 8, 2.0), step_interval_s=(1.9, 2.4)), row_of("c", 101))
    found = Fitting(step="train", rows=rows, multiples={"c": 1}, plans={})
    assert re.search(r"2 s +│ 1.9 to 2.4 s │ 250 ms", str(found))
    assert "in 9 of 10" in str(found)
    found.report(tmp_path / "fit.html")
    assert "<small>(1.9 to 2.4 s)</small>" in (tmp_path / "fit.html").read_text()


def test_what_does_not_fit_is_told_without_times():
    row = FitRow(cluster="c", batch=8, fits=False, peak_bytes=2000, limit_bytes=1000)
    text = str(Fitting(step="train", rows=(row,), multiples={"c": 8}, plans={}))
    assert "does not fit" in text
    assert "2 kB of 1 kB" in text


@pytest.mark.parametrize(
    ("clusters", "prices", "got"),
    [
        ([], {}, "got none"),
        (["local:2", "local:2"], {}, "2 clusters, some of one name"),
        (["local:2"], {"locl:2": 1.0}, "'locl:2'"),
    ],
)
def test_clusters_have_names_of_their_own_and_prices_theirs(clusters, prices, got):
    with pytest.raises(InvalidArgumentError, match=got):
        autopar.fit(mlp_step, MLP_STATE, MLP_BATCH, clusters=clusters, prices=prices)


def token_step(state, batch):
    """Rows of tokens of any length, each of which sees the mean of its row."""

    def loss(state):
        x = state["table"][batch["tokens"]]
        return jnp.mean((jnp.tanh(x - x.mean(1, keepdims=True)) @ state["out"]) ** 2)

    value, grads = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value


TOKEN_STATE = {"table": jax.ShapeDtypeStruct((512, 256), "float32"), "out": jax.ShapeDtypeStruct((256, 64), "float32")}
SAMPLE = [100, 120, 128, 300, 384, 500, 1000, 90]


def tokens_of(examples, length):
    return {"tokens": jax.ShapeDtypeStruct((examples, length), "int32")}


@pytest.mark.cases(1)
@pytest.mark.parametrize("recipe", [None, recipes.zero(3)])
def test_what_padding_of_a_sample_costs(recipe):
    options = OPTIONS | {"search": autopar.Search(memory_limit_bytes="40MB")} | ({"plan": recipe} if recipe else {})
    step = autopar.parallelize(token_step, **options)
    found = autopar.fit(step, TOKEN_STATE, tokens_of, clusters="dgx-h100", lengths=SAMPLE, buckets=3)
    padded, buckets, packed = found.filled
    plans, tokens = found.bucket_plans["dgx-h100"], sum(SAMPLE)
    assert padded.lengths == packed.lengths == (1024,)
    assert padded.batches == packed.batches == (found.fastest(),)
    assert buckets.lengths == (128, 512, 1024) == tuple(sorted(plans))
    assert buckets.batches == (8 * found.fastest(), 2 * found.fastest(), found.fastest())
    assert [row.padding for row in found.filled] == pytest.approx(
        [1 - tokens / (8 * 1024), 1 - tokens / (4 * 128 + 3 * 512 + 1024), 1 - tokens / (3 * 1024)]
    )
    step_s = {length: plan.predicted.step_time_s for length, plan in plans.items()}
    seconds = sum(
        n * step_s[at] / batch for n, at, batch in zip((4, 3, 1), sorted(plans), buckets.batches, strict=True)
    )
    assert buckets.tokens_per_s == pytest.approx(tokens / seconds)
    assert packed.tokens_per_s == pytest.approx(padded.tokens_per_s * 8 / 3)
    layouts = {tuple(v.layout for v in plan.record.arguments if v.kind == "state") for plan in plans.values()}
    assert len(layouts) == 1  # the state is where it is, whichever bucket comes next
    assert "packed" in str(found)
    assert json.loads(json.dumps(found.to_dict()))["filled"][1]["lengths"] == [128, 512, 1024]


def test_lengths_need_a_batch_by_examples_and_length():
    with pytest.raises(InvalidArgumentError, match="a function of the number of examples and their length"):
        autopar.fit(token_step, TOKEN_STATE, tokens_of(8, 64), clusters="dgx-h100", lengths=SAMPLE)


def test_buckets_in_turn_are_those_of_plain_jit():
    """A step for each length, which have the state in common: nothing of it moves between them."""
    keys = jax.random.split(jax.random.key(0), 2)
    state = {n: jax.random.normal(key, TOKEN_STATE[n].shape) for n, key in zip(TOKEN_STATE, keys, strict=True)}
    long = autopar.parallelize(token_step, cluster=slow_cluster(4), **OPTIONS)
    short = autopar.parallelize(token_step, cluster=slow_cluster(4), plan=long, **OPTIONS)
    got, expected, plain, before = jax.tree.map(jnp.copy, state), state, jax.jit(token_step), None
    for turn, (step, length) in enumerate([(long, 64), (short, 16), (long, 64), (short, 16)]):
        batch = {"tokens": jax.random.randint(jax.random.key(turn), (8 * 64 // length, length), 0, 512)}
        given = got
        got, loss = step(given, batch)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given)) or turn == 0  # it is donated
        expected, expected_loss = plain(expected, batch)
        assert loss == pytest.approx(float(expected_loss), rel=1e-5)
        shardings = [leaf.sharding for leaf in jax.tree.leaves(got)]
        assert before is None or shardings == before
        before = shardings
    assert_close(got, expected)
