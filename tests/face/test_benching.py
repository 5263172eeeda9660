"""`autopar.bench`: the search beside manual ways, what does not fit, plans from files, and what is measured."""

import dataclasses
import json
import math
import re
from html import escape, unescape

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar import recipes
from autopar.benching import INTERRUPTED, WAITS, Bench, problem_of
from autopar.common.text import text_of_interval_s, text_of_part, text_of_s
from autopar.errors import InvalidArgumentError, MemoryLimitError
from autopar.hardware import step_errors
from autopar.plan import summary
from autopar.plan.bench import PARTS, BenchRow, limits, parts, ranked
from autopar.plan.rivals import advice_and_notes
from autopar.recipes.parse import ALIASES
from autopar.recipes.walks import Outcome, Point, Problem, least_bubbles, more_stages_are_slower, takes_too_long
from autopar.recipes.ways import WAYS, applicable, made_of, way_called
from tests.small_steps import MLP_BATCH, MLP_STATE, mlp_batch, mlp_step, new_mlp_state

OPTIONS = dict(cache_dir=None)


def wide_step(state, batch):
    """Four matrices of 64 MB: enough that a way of running it matters."""

    def loss(weights):
        hidden = batch["x"]
        for weight in weights:
            hidden = jnp.tanh(hidden @ weight)
        return jnp.mean(hidden**2)

    grads = jax.grad(loss)(state)
    return [weight - 0.1 * grad for weight, grad in zip(state, grads, strict=True)]


WIDE = ([jax.ShapeDtypeStruct((4096, 4096), "float32")] * 4, {"x": jax.ShapeDtypeStruct((1024, 4096), "float32")})


@pytest.fixture(scope="module")
def wide():
    step = autopar.parallelize(wide_step, **OPTIONS)
    return autopar.bench(step, *WIDE, clusters="dgx-h100x2", recipes=["fsdp", "dp", "tensor_parallel(size=16)"])


def test_the_fastest_comes_first_and_each_other_way_says_where_it_loses(wide):
    rows = wide.of("dgx-h100x2")
    assert {row.name for row in rows} == {"search", "ZeRO-3 (FSDP)", "data parallel", "tensor_parallel(size=16)"}
    assert wide.best().name == "search"
    times_s = [row.step_time_s for row in rows]
    assert times_s == sorted(times_s)
    slowest = rows[-1]
    assert "more exposed collectives" in slowest.loses(wide.best())
    assert wide.best().loses(wide.best()) == ""


def test_a_recipe_as_text_is_the_plan_that_planning_under_it_makes(wide):
    own = next(row for row in wide.rows if row.name == "tensor_parallel(size=16)")
    plan = autopar.plan(wide_step, *WIDE, cluster="dgx-h100x2", plan=recipes.tensor_parallel(size=16), **OPTIONS)
    assert own.step_time_s == plan.predicted.step_time_s
    assert own.record.decisions == plan.record.decisions


def test_the_parts_of_a_step_are_the_step(wide):
    for row in wide.rows:
        assert list(parts(row.record)) == list(PARTS)
        # What is less than a thousandth of the step is no part of its own.
        assert sum(parts(row.record).values()) == pytest.approx(row.step_time_s, rel=0.01)


def test_the_table_has_a_line_for_each_way(wide):
    text = str(wide)
    assert "wide_step on dgx-h100x2 (16 x H100-SXM5-80GB, 2 hosts of 8): a batch of 1,024 examples" in text
    for row in wide.rows:
        told = len(re.findall(rf"^{re.escape(row.name)}[ ,:]", text, re.MULTILINE))
        assert told == 3  # its bar, its shares and its sentence
    assert max(map(len, text.splitlines())) <= 100


def test_a_long_name_takes_several_lines_and_no_column_of_the_table(wide):
    """Of a recipe with many arguments: `combine(tp=8, zero=1, num_microbatches=16, recompute='matmuls')`."""
    best, *others = wide.rows
    name = "combine(tp=8, zero=1, num_microbatches=16, recompute='matmuls', offload='activations')"
    text = str(Bench(step="wide_step", rows=(best, *others[:-1], dataclasses.replace(others[-1], name=name))))
    assert max(map(len, text.splitlines())) <= 100
    (header,) = (line for line in text.splitlines() if "examples/s" in line)
    assert header.split() == ["step", "in", "9", "of", "10", "examples/s", "MFU", "peak", "of", "a", "device"]
    (row,) = (line for line in text.splitlines() if line.startswith("combine(tp=8,") and " of 72 GB" in line)
    assert "%" in row


def test_ways_nearer_than_published_ratios_resolve_are_equal_within_the_error(wide, monkeypatch):
    best, other, *_, last = wide.rows
    ratio = other.step_time_s / best.step_time_s
    assert ratio < last.step_time_s / best.step_time_s
    for resolution, is_equal in ((1.01 * ratio, True), (0.99 * ratio, False)):
        monkeypatch.setattr(step_errors, "resolution", lambda resolution=resolution: resolution)
        assert other.is_equal_within_error(best) is is_equal
        assert other.beside(best).endswith("; equal within the error") is is_equal
        assert not last.is_equal_within_error(best)
        assert best.beside(best) == "the fastest"
        assert f"nearer than {text_of_part(resolution - 1)} is equal within the error" in " ".join(str(wide).split())


def test_the_table_has_the_intervals_of_steps(wide, tmp_path):
    wide.report(tmp_path / "bench.html")
    for row in wide.rows:
        assert row.interval == text_of_interval_s(row.record.step_interval_s)
        assert row.interval in str(wide)
        assert f'<td class="n nowrap">{row.interval}</td>' in (tmp_path / "bench.html").read_text()
        assert row.to_dict()["step_interval_s"] == row.record.step_interval_s


def test_the_devices_and_their_memory_are_told(wide, tmp_path):
    """`dgx-h100x2` are 16 devices, and a plan may use nine tenths of their memory."""
    text = " ".join(str(wide).split())
    wide.report(tmp_path / "bench.html")
    for told in ("16 x H100-SXM5-80GB, 2 hosts of 8", "72 GB are available: 90 % of the 80 GB of a device."):
        assert told in text
        assert told in (tmp_path / "bench.html").read_text()


def test_a_setting_names_the_groups_that_share_the_state_and_those_of_interleaved_stages():
    assert Point(zero=3, zero_size=8, examples=1, recompute="nothing").text(1) == "ZeRO 3 in groups of 8"
    assert Point(pp=2, examples=1, recompute="nothing").text(4) == "2 stages, 4 micro-batches"
    interleaved = Point(pp=2, examples=1, recompute="nothing", schedule="interleaved")
    assert interleaved.text(4) == "2 groups of interleaved stages, 4 micro-batches"


def test_the_page_has_the_shares_as_numbers(wide, tmp_path):
    wide.report(tmp_path / "bench.html")
    page = (tmp_path / "bench.html").read_text()
    (table,) = re.findall(r"<table><caption>Share of the step</caption>.*?</table>", page, re.DOTALL)
    for row in wide.rows:
        (cells,) = re.findall(rf"<td>{re.escape(row.name)}</td>(.*)</tr>", table)
        shares = [escape(text_of_part(share.seconds / row.step_time_s)) for share in summary.shares(row.record)]
        assert all(f">{share}</td>" in cells for share in shares)


def test_what_does_not_fit_says_by_how_much_and_is_not_compared():
    step = autopar.parallelize(wide_step, search=autopar.Search(memory_limit_bytes=200_000_000), **OPTIONS)
    found = autopar.bench(step, *WIDE, clusters="dgx-h100x2", recipes=["dp", "fsdp"])
    (row,) = (row for row in found.rows if row.name == "data parallel")
    assert not row.fits
    assert row.step_time_s is None
    assert row.excess_bytes == row.peak_bytes - 200_000_000 > 0
    assert row.loses(found.best()) == ""
    told = next(line for line in str(found).splitlines() if line.startswith("data parallel"))
    assert "does not fit:" in told
    assert found.rows[-1] is row


def test_a_saved_plan_is_compared_and_one_of_another_step_says_why_not(tmp_path):
    saved, other = tmp_path / "plan.json", tmp_path / "other.json"
    plan = autopar.plan(wide_step, *WIDE, cluster="dgx-h100x2", plan=recipes.zero(1), **OPTIONS)
    plan.save(saved)
    autopar.plan(mlp_step, MLP_STATE, MLP_BATCH, cluster="dgx-h100x2", **OPTIONS).save(other)
    step = autopar.parallelize(wide_step, **OPTIONS)
    found = autopar.bench(step, *WIDE, clusters="dgx-h100x2", recipes={"mine": str(saved), "wrong": str(other)})
    rows = {row.name: row for row in found.rows}
    assert rows["mine"].step_time_s == plan.predicted.step_time_s
    assert not rows["wrong"].fits
    assert "expected" in rows["wrong"].why


def test_the_values_are_json(wide):
    values = json.loads(json.dumps(wide.to_dict()))
    assert values["step"] == "wide_step"
    first = values["rows"][0]
    assert (first["name"], first["cluster"], first["fits"]) == ("search", "dgx-h100x2", True)
    assert set(first["parts_s"]) == set(PARTS)
    assert first["examples_per_s"] == pytest.approx(1024 / first["step_time_s"])


def test_the_page_has_every_way_and_asks_for_nothing(wide, tmp_path):
    wide.report(tmp_path / "bench.html")
    page = (tmp_path / "bench.html").read_text()
    assert page.count('class="way"') == len(wide.rows)
    assert "http" not in page.replace("http-equiv", "")


def test_ways_are_called_by_short_names_in_any_case():
    assert way_called("FSDP") == way_called("zero-3 (fsdp)") == "ZeRO-3 (FSDP)"
    assert way_called("tp") == "tensor parallel"
    assert way_called("tensor_parallel") == "tensor parallel"
    assert way_called("tensor_parallel(size=8)") is None


@pytest.mark.parametrize(
    ("cluster", "of_step", "missing"),
    [
        ("dgx-h100x2", dict(experts=1), {"ZeRO-2", "expert"}),
        ("dgx-h100x2", dict(experts=8), {"ZeRO-2"}),
        ("dgx-h100x2", dict(experts=8, attends=False), {"ZeRO-2", "sequence"}),
        ("dgx-h100", dict(experts=1), {"ZeRO-2", "expert", "hybrid sharded"}),
    ],
)
def test_ways_that_a_cluster_or_a_step_has_no_use_for_are_left_out(cluster, of_step, missing):
    problem = Problem(traced=None, trees=None, cluster=autopar.Cluster.parse(cluster), examples=64, **of_step)
    assert set(WAYS) - set(applicable(problem)) == missing


def test_sequences_are_no_way_for_a_step_without_attention():
    problem = problem_of(autopar.parallelize(wide_step, cluster="dgx-h100x2", **OPTIONS), *WIDE)
    assert not problem.attends
    assert "sequence" not in applicable(problem)


@pytest.mark.parametrize("alias", ALIASES)
def test_every_alias_of_a_recipe_names_a_way(alias):
    assert way_called(alias) in WAYS


def test_state_that_exceeds_the_memory_alone_is_told_without_an_estimate():
    """Matrices of 268 MB that every device holds, of which two gradients at least come on top in any plan."""
    step = autopar.parallelize(
        wide_step, search=autopar.Search(memory_limit_bytes=200_000_000), cluster="dgx-h100x2", **OPTIONS
    )
    made = made_of(problem_of(step, *WIDE), WAYS["data parallel"](problem_of(step, *WIDE)))
    assert (made.attempts, made.plan) == (1, None)
    assert made.outcome == Outcome(
        step_time_s=math.inf, peak_bytes=4 * 4096 * 4096 * 4, limit_bytes=200_000_000, of_state=True
    )
    assert isinstance(made.error, MemoryLimitError)
    found = autopar.bench(step, *WIDE, recipes=["dp", "tp"])
    told = {row.name: row.why_none for row in found.rows}
    assert told["data parallel"].startswith("does not fit: the state alone takes 268 MB a device, of 200 MB")
    assert {row.name for row in found.rows if row.fits} == {"search", "tensor parallel"}


def test_the_bubbles_of_equal_stages_are_no_less_than_the_bound():
    assert least_bubbles(1, 8) == 1.0
    assert least_bubbles(2, 1) == 2.0
    for stages in (2, 3, 8):
        for m in (2, 7, 64):
            assert 1.0 < least_bubbles(stages, m) < (m + stages - 1) / m
    m, of_stage = 4, (4.0, 3.0, 2.25)  # each is shorter by a quarter of what is before it: all end at once
    assert least_bubbles(3, m) * m * sum(of_stage) / 3 == pytest.approx(m * of_stage[0])


def test_deeper_pipelines_are_left_out_once_they_became_slower():
    def at(pp: int, **changes) -> Point:
        return Point(**{"tp": 2, "pp": pp, "zero": 1, "examples": 4, "recompute": "input"} | changes)

    def took(seconds: float, peak_bytes: int = 1) -> Outcome:
        return Outcome(step_time_s=seconds, peak_bytes=peak_bytes, limit_bytes=2)

    slower = {at(2): took(1.0), at(4): took(1.5)}
    assert more_stages_are_slower(at(8), slower)
    assert more_stages_are_slower(at(16, zero=0), slower)
    assert not more_stages_are_slower(at(8, tp=4), slower)
    assert not more_stages_are_slower(at(8, examples=2), slower)
    assert not more_stages_are_slower(at(8), {at(2): took(1.5), at(4): took(1.0)})
    assert not more_stages_are_slower(at(8), {at(2): took(1.0, peak_bytes=3), at(4): took(1.5)})  # they need the memory


def test_schedules_and_smaller_micro_batches_of_what_works_too_long_are_left_out():
    def at(**others):
        return Point(**{"tp": 4, "pp": 2, "zero": 1, "examples": 4, "recompute": "input"} | others)

    def seen(work_s):
        slow = Outcome(step_time_s=4.0, peak_bytes=1, limit_bytes=2, work_s=work_s)
        return {at(): slow, at(recompute="matmuls"): Outcome(step_time_s=3.0, peak_bytes=1, limit_bytes=2, work_s=2.0)}

    assert takes_too_long(at(schedule="zb-h1"), seen(3.2))
    assert not takes_too_long(at(schedule="zb-h1"), seen(3.1))  # within what the work may differ
    assert takes_too_long(at(examples=2), seen(3.2))
    assert not takes_too_long(at(examples=2), seen(3.1))
    assert not takes_too_long(at(examples=8), seen(3.2))  # larger ones may be less work
    assert not takes_too_long(at(schedule="zb-h1", pp=4), seen(3.2))
    assert not takes_too_long(at(recompute="nothing", schedule="zb-h1"), seen(3.2))


def test_rows_without_a_plan_come_last():
    row = BenchRow(name="refused", cluster="c", examples=1, why="expected experts, got none")
    over = BenchRow(name="over", cluster="c", examples=1, peak_bytes=3, limit_bytes=1)
    near = BenchRow(name="near", cluster="c", examples=1, peak_bytes=2, limit_bytes=1)
    assert [r.name for r in ranked([row, over, near])] == ["near", "over", "refused"]


def test_what_fits_is_measured_in_turns_with_its_numbers():
    step = autopar.parallelize(mlp_step, **OPTIONS)
    state, batch = new_mlp_state(), mlp_batch()
    found = autopar.bench(step, state, batch, recipes=["dp", "zero(1)"], measure=True, seconds=0.1)
    assert all(row.measured_s > 0 for row in found.rows)
    assert all(row.quartiles_s[0] <= row.measured_s <= row.quartiles_s[1] for row in found.rows)
    assert all(row.difference <= 1e-5 and not row.differs for row in found.rows)
    assert "measured" in str(found)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_only_the_hardware_here_is_measured():
    with pytest.raises(InvalidArgumentError, match="expected the devices here"):
        autopar.bench(mlp_step, MLP_STATE, MLP_BATCH, clusters="dgx-h100", measure=True)


def test_a_way_that_nobody_knows_is_refused():
    with pytest.raises(InvalidArgumentError, match="'expert', a call of"):
        autopar.bench(mlp_step, MLP_STATE, MLP_BATCH, clusters="dgx-h100", recipes=["zebra"])
    with pytest.raises(InvalidArgumentError, match="expected 'data parallel', 'ZeRO-1'"):
        autopar.bench(mlp_step, MLP_STATE, MLP_BATCH, clusters="dgx-h100", recipes=[3])


def test_advice_on_the_fastest_is_in_the_table_and_on_the_page(wide, tmp_path):
    (best, *_) = wide.rows
    (advice, *_) = advice_and_notes(best.record)
    assert "of the memory is free" in advice
    assert f"- {advice}." in " ".join(str(wide).split())
    wide.report(tmp_path / "bench.html")
    assert f"<li>{advice}</li>" in (tmp_path / "bench.html").read_text()


def test_what_limits_the_fastest_is_in_the_table_and_on_the_page(wide, tmp_path):
    (best, *_) = wide.rows
    told = limits(best.record)
    assert told.startswith("Of the step: ")
    least = text_of_s(best.record.least_step_time_s)
    assert told.endswith(f" No plan of the step as it is written takes less than {least}.")
    assert f"What limits {best.name}, the fastest, and what could be changed: - {told}" in " ".join(str(wide).split())
    wide.report(tmp_path / "bench.html")
    assert f"<li>{told}</li>" in unescape((tmp_path / "bench.html").read_text())


def test_a_row_tells_between_which_times_half_of_its_measured_steps_lie(wide):
    best, other, *_ = wide.rows
    measured = dataclasses.replace(other, measured_s=0.02, quartiles_s=(0.015, 0.03))
    assert measured.beside(best) == f"{other.beside(best)}; half of the measured steps took 15 ms to 30 ms"
    assert best.beside(best) == "the fastest"


def test_an_interrupted_comparison_has_the_ways_that_were_planned(monkeypatch, tmp_path):
    """Ctrl-C after minutes does not lose them; the rest is neither planned nor on further clusters."""
    made = []

    def interrupted(problem, way, **options):
        made.append(way)
        if len(made) == 2:
            raise KeyboardInterrupt
        return made_of(problem, way, **options)

    monkeypatch.setattr("autopar.benching.made_of", interrupted)
    step, clusters = autopar.parallelize(mlp_step, **OPTIONS), ["dgx-h100", "dgx-a100-80g"]
    ways = ["tensor_parallel(size=2)", "zero(3)"]
    found = autopar.bench(step, MLP_STATE, MLP_BATCH, clusters=clusters, recipes=ways, report=tmp_path / "bench.html")
    assert [(row.name, row.why) for row in found.rows] == [
        ("tensor_parallel(size=2)", ""),
        ("search", INTERRUPTED),
        ("zero(3)", INTERRUPTED),
    ]
    assert found.best().name == "tensor_parallel(size=2)"
    assert f"zero(3): {INTERRUPTED}" in str(found)
    assert INTERRUPTED in (tmp_path / "bench.html").read_text()
    made[:] = [None]
    with pytest.raises(KeyboardInterrupt):
        autopar.bench(step, MLP_STATE, MLP_BATCH, clusters="dgx-h100")
    made[:] = []
    found = autopar.bench(step, MLP_STATE, MLP_BATCH, clusters=clusters, recipes=[])
    assert [(row.name, row.cluster) for row in found.rows] == [("search", "dgx-h100")]


def test_the_page_is_written_after_each_way(monkeypatch, tmp_path):
    pages, page = [], tmp_path / "bench.html"

    def read_before(problem, way, **options):
        pages.append(page.read_text() if page.exists() else "")
        return made_of(problem, way, **options)

    monkeypatch.setattr("autopar.benching.made_of", read_before)
    step = autopar.parallelize(mlp_step, **OPTIONS)
    autopar.bench(step, MLP_STATE, MLP_BATCH, clusters="dgx-h100", recipes=["fsdp", "zero(1)"], report=page)
    told = [[name for name in ("ZeRO-3 (FSDP)", "zero(1)", "search") if f"<td>{name}</td>" in text] for text in pages]
    assert told == [[], ["ZeRO-3 (FSDP)"], ["ZeRO-3 (FSDP)", "zero(1)"]]
    assert [text.count(WAITS) for text in pages] == [0, 2, 1]
    assert "<td>search</td>" in page.read_text()


def test_the_search_comes_before_what_is_as_fast(wide):
    best = wide.best()
    other = dataclasses.replace(best, name="zero(1)")
    assert [row.name for row in ranked([other, best])] == ["search", "zero(1)"]


def test_what_is_told_while_ways_are_planned_names_the_cluster_as_it_was_written(caplog):
    caplog.set_level("INFO", logger="autopar")
    step, names = autopar.parallelize(mlp_step, **OPTIONS), ["fsdp", "tensor_parallel(size=3)"]
    autopar.bench(step, MLP_STATE, MLP_BATCH, clusters="dgx-h100x2", recipes=names)
    first, *rows = caplog.messages
    assert first == "mlp_step on dgx-h100x2: plans ZeRO-3 (FSDP), tensor_parallel(size=3), search"
    assert all(" on dgx-h100x2: " in row for row in rows)
    (refused,) = (row for row in rows if row.startswith("tensor_parallel(size=3)"))
    assert "(planned" not in refused
