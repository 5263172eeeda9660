"""How recipes are walked through, and how rows are kept and compared, without any planning."""

import dataclasses
import json
import sys
import threading

import pytest

from autopar import Cluster
from autopar.errors import MemoryLimitError, UnsupportedError
from autopar.manual.settings import Outcome, Point, Problem
from autopar.manual.walks import first_points, frontier, walk
from autopar.manual.ways import megatron
from benchmarks.auto_vs_manual import findings, manual, processes, reports
from benchmarks.auto_vs_manual.models import chosen, models
from benchmarks.auto_vs_manual.planning import ROW_IS_MADE, cluster_of, line_of, refused
from benchmarks.auto_vs_manual.processes import finished, lines_of
from benchmarks.auto_vs_manual.rows import Row, Rows, Status
from benchmarks.auto_vs_manual.suites import HARDWARE, Job, selected

GPT = models()["gpt-2.6B"]
ROW = Row(model="gpt-2.6B", cluster="p3.16xlarge", recipe="auto", devices=8, status=Status.PLANNED, step_time_s=1.0)


def problem(cluster: str = "p3.16xlarge") -> Problem:
    return Problem(traced=None, trees=None, cluster=Cluster.parse(cluster), examples=GPT.sizes["batch"])


def walked(made, outcome_of) -> list[str]:
    """The texts of all attempts, where each comes to what a function of its text says."""
    texts, outcome = [], None
    while True:
        try:
            attempt = made.send(outcome)
        except StopIteration:
            return texts
        texts.append(attempt.text)
        outcome = outcome_of(attempt.text)


def test_a_walk_goes_on_from_the_best_and_ends_where_nothing_is_better():
    times = {"128 micro-batches": 3.0, "64 micro-batches": 2.0, "32 micro-batches": 4.0}
    came_to = lambda text: Outcome(step_time_s=times.get(text.split(",")[0], 9.0), peak_bytes=1, limit_bytes=1)
    start = Point(examples=1, recompute="input")
    texts = walked(walk(problem(), [start], lambda p, m: megatron_recipe()), came_to)
    assert texts[0] == "128 micro-batches, recompute input"
    assert "32 micro-batches, recompute input" in texts  # what lies beyond the best was looked at
    assert not [t for t in texts if t.startswith("16 ")]
    assert len(texts) == len(set(texts))


def test_what_needs_more_than_a_point_that_did_not_fit_is_not_tried():
    refusing = lambda text: Outcome(step_time_s=1.0, peak_bytes=2, limit_bytes=1)
    texts = walked(walk(problem(), [Point(examples=4, recompute="input")], lambda p, m: megatron_recipe()), refusing)
    assert texts == ["32 micro-batches, recompute input", "64 micro-batches, recompute input"]


def test_a_point_with_smaller_micro_batches_is_tried_where_a_larger_one_does_not_fit():
    fits = lambda text: Outcome(step_time_s=1.0, peak_bytes=5 if text.startswith("32 ") else 1, limit_bytes=1)
    texts = walked(walk(problem(), [Point(examples=4, recompute="input")], lambda p, m: megatron_recipe()), fits)
    assert "64 micro-batches, recompute input" in texts


def test_micro_batches_shrink_as_far_as_memory_asks_and_grow_as_far_as_it_allows():
    """128 examples on each device need 1,290 bytes of 100, of which 10 stay with any number."""
    examples = {"whole batch": 128} | {f"{m} micro-batches": 128 // m for m in (2, 4, 8, 16, 32, 64, 128)}
    peak_of = lambda text: 10 + 10 * examples[text.split(", ")[0]] if "recompute" not in text else 100
    came_to = lambda text: Outcome(step_time_s=1.0 + ("recompute" in text), peak_bytes=peak_of(text), limit_bytes=100)
    texts = walked(walk(problem(), [Point(examples=128, recompute="nothing")], lambda p, m: megatron_recipe()), came_to)
    assert texts[:3] == ["whole batch", "8 micro-batches", "4 micro-batches, recompute matmuls"]
    assert "16 micro-batches" in texts
    start = Point(examples=1, recompute="nothing")
    texts = walked(walk(problem(), [start], lambda p, m: megatron_recipe()), came_to)
    assert texts[:2] == ["128 micro-batches", "32 micro-batches"]


def test_micro_batches_grow_by_what_divides_their_number():
    wide = dataclasses.replace(problem(), examples=1536)  # 192 examples on each device
    came_to = lambda text: Outcome(step_time_s=float(text.split(" micro")[0]), peak_bytes=1, limit_bytes=40)
    texts = walked(walk(wide, [Point(examples=4, recompute="nothing")], lambda p, m: megatron_recipe()), came_to)
    assert texts[:2] == ["48 micro-batches", "3 micro-batches"]


def test_one_that_fits_as_the_batch_is_ends_the_walk():
    room = lambda text: Outcome(step_time_s=1.0, peak_bytes=1, limit_bytes=100)
    assert walked(walk(problem(), first_points(problem()), lambda p, m: megatron_recipe()), room) == ["whole batch"]


def on_a_frontier(at_rest: float, each: dict[str, float]) -> list[str]:
    """The settings that are tried where a peak is `at_rest` and a part for each of the 128 examples of a copy."""

    def came_to(text: str) -> Outcome:
        parts = text.split(", ")
        m = next((int(part.split()[0]) for part in parts if "micro" in part), 1)
        recompute = next((part.split()[1] for part in parts if "recompute" in part), "nothing")
        return Outcome(step_time_s=1.0, peak_bytes=int(at_rest + each[recompute] * 128 / m), limit_bytes=100)

    return walked(frontier(problem(), lambda point, m: megatron_recipe()), came_to)


def test_of_each_recomputation_the_largest_micro_batches_that_fit_are_found():
    """Without recomputation 16 examples fit, where products are kept 32, and everything else recomputed all 128."""
    tried = on_a_frontier(10, {"nothing": 5.0, "matmuls": 2.0, "input": 0.5})
    assert tried == [
        "whole batch",  # 650 of 100: 16 examples at most
        "8 micro-batches",  # 90
        "4 micro-batches, recompute matmuls",  # 74
        "recompute matmuls",  # 266: by the line through both, 64 examples need 138
        "2 micro-batches, recompute input",  # larger than those that fit with less
        "recompute input",
    ]


def test_a_line_through_two_settings_ends_what_cannot_fit():
    """What stays needs more than there is: two settings of each recomputation say so."""
    tried = on_a_frontier(200, {"nothing": 5.0, "matmuls": 2.0, "input": 0.5})
    assert tried == [
        "whole batch",
        "16 micro-batches",
        "recompute matmuls",
        "8 micro-batches, recompute matmuls",
        "recompute input",
        "4 micro-batches, recompute input",
    ]


def test_a_recipe_that_is_refused_whatever_the_setting_is_left():
    assert walked(frontier(problem(), lambda p, m: megatron_recipe()), lambda text: None) == [
        "whole batch",
        "2 micro-batches",
    ]


def megatron_recipe():
    from autopar import recipes

    return recipes.combine()


def test_the_grid_holds_all_products_of_tensor_pipeline_and_data_parallelism():
    first = []
    made, outcome = megatron(problem()), None
    for _ in range(14):  # those without stages have two starts
        first.append(made.send(outcome).text)
        outcome = None
    shapes = {tuple(part for part in text.split(", ") if part.startswith("tp") or "stages" in part) for text in first}
    assert len(shapes) == 10  # tp x pp with tp * pp a divisor of 8
    assert ("tp 2", "4 stages") in shapes


def test_a_walk_begins_with_the_batch_as_it_is_and_with_a_few_examples():
    few = Point(examples=4, recompute="input")
    assert first_points(problem()) == [Point(examples=128, recompute="nothing"), few]
    assert first_points(problem(), pp=2) == [dataclasses.replace(few, pp=2)]
    assert first_points(dataclasses.replace(problem(), examples=8), pp=2, tp=1)[0].examples == 2


def test_descriptions_of_machines_stay_with_their_rows(tmp_path):
    rows = Rows(tmp_path)
    for model, machine in (("a", "first"), ("b", "second"), ("a", "third")):
        rows.add(dataclasses.replace(ROW, model=model), machine)
    again = Rows(tmp_path)  # no row is of the first one any more
    again.add(dataclasses.replace(ROW, model="c"), "fourth")
    stored = json.loads((tmp_path / "rows.json").read_text())
    made_on = {row["model"]: stored["machines"][row["machine"]] for row in stored["rows"]}
    assert made_on == {"a": "third", "b": "second", "c": "fourth"}


def test_rows_survive_their_file(tmp_path):
    row = dataclasses.replace(ROW, collectives={"all-reduce": (2.0, 3.0)}, measured_quartiles_s=(1.0, 2.0))
    Rows(tmp_path).add(row, "machine")
    known = Rows(tmp_path)
    assert known.get(*row.key) == row
    assert list(known.machines.values()) == ["machine"]
    known.add(dataclasses.replace(row, step_time_s=2.0), "another")
    assert [r.step_time_s for r in Rows(tmp_path)] == [2.0]
    assert (tmp_path / "rows.csv").read_text().startswith("model,cluster,recipe")


def test_a_row_without_a_plan_says_by_how_much_it_is_over():
    error = MemoryLimitError(where="", limit_bytes=10**9, needed_bytes=3 * 10**9, largest=[], hint="")
    row = refused(dataclasses.replace(ROW, status=Status.FAILED), "dp", error)
    assert row.status is Status.OUT_OF_MEMORY
    assert row.came_to() == "out of memory, 2 GB over"


def test_what_is_not_supported_says_where():
    error = UnsupportedError(where="BatchNorm", expected="a mean", got="a statistic", hint="")
    row = refused(dataclasses.replace(ROW, status=Status.FAILED), "dp", error)
    assert row.came_to() == "unsupported: BatchNorm: expected a mean, got a statistic"


def test_a_slower_search_is_found():
    row = dataclasses.replace(ROW, recipe="zero 3", step_time_s=0.9)
    assert [reports.is_slower(own, other) for other, own in reports.beside_auto([ROW, row])] == [True]
    missing = dataclasses.replace(ROW, status=Status.OUT_OF_MEMORY)
    assert [reports.is_slower(own, other) for other, own in reports.beside_auto([missing, row])] == [True]
    assert not reports.is_slower(ROW, dataclasses.replace(row, step_time_s=1.5))


def test_a_process_that_takes_too_long_leaves_its_row_as_far_as_it_came():
    said = []
    wrong = lines_of(["python", "-c", "import time; print('so far', flush=True); time.sleep(60)"], 3.0, said.append)
    assert said == ["so far\n"]
    job = Job(model=GPT, cluster="p3.16xlarge", recipe="auto")
    assert finished(job, dataclasses.replace(ROW, attempts=2), wrong).cut_short == "stopped after 3 s and 2 attempts"
    assert finished(job, None, wrong).status is Status.FAILED


def lines_that_say(script, begun):
    """Stands for `lines_of`: a process that reads recipes and says of each what `script` has of its attempts; after a
    number of attempts that is None it takes too long. `begun` gets the recipes of each process.
    """

    def lines(command, timeout_s, each, given, environment):
        begun.append(recipes := [])
        while (recipe := next(given, None)) is not None:
            recipes.append(recipe)
            for attempts in script[recipe]:
                if attempts is None:
                    return "stopped after 1 s"
                assert each(line_of(dataclasses.replace(ROW, recipe=recipe, attempts=attempts))) is False
            assert each(f"{ROW_IS_MADE}\n") is True
        return ""

    return lines


def test_a_row_is_what_its_process_said_last(monkeypatch):
    """The second of three recipes takes too long; another process makes the third."""
    begun, told, done = [], [], []
    script = {"auto": [1, 2], "zero 1": [1, 2, None], "zero 3": [1, 2]}
    monkeypatch.setattr(processes, "lines_of", lines_that_say(script, begun))
    monkeypatch.setattr(processes, "worker_processes", list)
    jobs = [Job(model=GPT, cluster="p3.16xlarge", recipe=recipe) for recipe in script]
    processes.planned(jobs, 1.0, 4, told.append, done.append)
    assert begun == [["auto", "zero 1"], ["zero 3"]]
    assert [(row.recipe, row.attempts, row.cut_short) for row in done] == [
        ("auto", 2, ""),
        ("zero 1", 2, "stopped after 1 s and 2 attempts"),
        ("zero 3", 2, ""),
    ]
    assert [row.attempts for row in told] == [1, 2] * 3


def test_each_processor_makes_rows(monkeypatch):
    """Two processes; the first is at its first row until the other one has made the rest."""
    begun, told, done, rest_is_made = [], [], [], threading.Event()
    script = {"auto": [1], "zero 1": [1], "zero 3": [1]}
    lines = lines_that_say(script, begun)

    def each_beside(command, timeout_s, each, given, environment):
        assert environment == {"AUTOPAR_PLANNING_PROCESSES": "1"}

        def slowly(line):
            if '"auto"' in line:
                assert rest_is_made.wait(10)
            return each(line)

        return lines(command, timeout_s, slowly, given, environment)

    def ended(row):
        done.append(row.recipe)
        if len(done) == 2:
            rest_is_made.set()

    monkeypatch.setattr(processes, "lines_of", each_beside)
    monkeypatch.setattr(processes, "worker_processes", lambda: ["another processor"])
    jobs = [Job(model=GPT, cluster="p3.16xlarge", recipe=recipe) for recipe in script]
    processes.planned(jobs, 1.0, 4, told.append, ended)
    assert sorted(begun) == [["auto"], ["zero 1", "zero 3"]]
    assert done == ["zero 1", "zero 3", "auto"]


def test_a_process_reads_the_next_line_with_each_that_it_is_done_with():
    program = "import sys\nfor line in sys.stdin: print('made', line.strip(), flush=True)"
    said = []
    wrong = lines_of([sys.executable, "-c", program], 30.0, lambda line: not said.append(line), iter(["a", "b", "c"]))
    assert (said, wrong) == (["made a\n", "made b\n", "made c\n"], "")


def test_a_process_that_fails_tells_why():
    assert "boom" in lines_of(["python", "-c", "raise SystemExit('boom')"], 30.0, lambda line: None)


def test_models_are_chosen_by_family_name_and_pattern():
    known = list(models())
    assert chosen(["gpt-2.6B"], known) == ["gpt-2.6B"]
    assert {models()[name].family for name in chosen(["llama", "bert*"], known)} == {"llama", "bert"}
    with pytest.raises(SystemExit, match="nothing-like-it"):
        chosen(["nothing-like-it"], known)


def test_jobs_of_a_suite_are_narrowed_down():
    jobs = selected(["weak-scaling"], ["gpt"], ["p3.16xlargex2"], ["auto", "megatron*"])
    assert [job.key for job in jobs] == [
        ("gpt-6.7B", "p3.16xlargex2", "auto"),
        ("gpt-6.7B", "p3.16xlargex2", "megatron grid"),
    ]


def test_every_family_is_planned_for_every_kind_of_hardware():
    jobs = selected(["hardware"], None, None, ["auto"])
    families = {model.family for model in models().values()}
    assert {(job.model.family, job.cluster) for job in jobs} == {(f, c) for f in families for c in HARDWARE}
    assert len(jobs) == len(families) * len(HARDWARE)


def test_a_part_of_a_host_is_a_cluster():
    assert cluster_of("p3.16xlarge/4").num_devices == 4
    assert cluster_of("p3.16xlargex2").num_devices == 16


def test_findings_say_what_is_missing_and_what_holds():
    rows = [
        dataclasses.replace(ROW, model="moe-2.4B", flops=1.0),
        dataclasses.replace(ROW, model="moe-2.4B", recipe="expert and data", step_time_s=2.0),
    ]
    moe = [finding for finding in findings.findings(rows) if finding.published.startswith("MoE")]
    assert [(f.ours, f.holds) for f in moe] == [("2.4B on 1: 2.00x", None)]
    assert {finding.holds for finding in findings.findings([])} == {None}


@pytest.mark.parametrize(
    ("others_s", "holds"),
    [
        ((2.0, 3.0, 4.0), True),
        ((2.0, 1.5, 4.0), False),
        ((2.0, 3.0, 3.0), False),
        ((2.0, 3.0, None), None),
        ((2.0, 3.0), None),
    ],
)
def test_an_advantage_that_is_said_to_grow_has_to(others_s, holds):
    """`others_s` on 1, 2 and 4 hosts, where the search takes a second; None: out of memory."""
    rows = []
    places = [("moe-2.4B", "p3.16xlarge"), ("moe-10B", "p3.16xlargex2"), ("moe-27B", "p3.16xlargex4")]
    for (model, cluster), other_s in zip(places, others_s, strict=False):
        own = dataclasses.replace(ROW, model=model, cluster=cluster, step_time_s=1.0, flops=1.0)
        other = dataclasses.replace(own, recipe="expert and data", step_time_s=other_s)
        if other_s is None:
            other = dataclasses.replace(other, status=Status.OUT_OF_MEMORY, peak_bytes=20, limit_bytes=10)
        rows += [own, other]
    (moe,) = (f for f in findings.findings(rows) if f.published.startswith("MoE"))
    assert moe.holds is holds, moe.ours


@pytest.mark.parametrize(("cut", "holds", "note"), [("", True, ""), ("ended after 4 attempts", None, "the best of 1")])
def test_a_recipe_that_was_ended_early_may_yet_fit(cut, holds, note):
    out = dataclasses.replace(ROW, model="gpt-15B", cluster="p3.16xlargex4", recipe="megatron grid")
    out = dataclasses.replace(
        out, status=Status.OUT_OF_MEMORY, peak_bytes=20, limit_bytes=10, attempts=1, cut_short=cut
    )
    own = dataclasses.replace(out, recipe="auto", status=Status.PLANNED, cut_short="", step_time_s=1.0)
    (grid,) = (f for f in findings.findings([own, out]) if "Megatron-LM" in f.published)
    assert grid.holds is holds
    assert "out of memory" in grid.ours
    assert note in grid.ours


def test_the_search_is_measured_beside_the_fastest_recipe():
    own = dataclasses.replace(ROW, model="gpt-small", cluster="local:8", plan="x=8", measured_s=0.1)
    rows = [own]
    for recipe, beside in (("zero 1", 1.0), ("zero 2", 0.98), ("zero 3", 1.4)):
        rows.append(dataclasses.replace(own, recipe=recipe, measured_s=0.1 * beside, measured_beside_auto=beside))
    assert findings.measured_cells(rows) == [
        ("gpt-small", "search", "x=8", "100.0 ms", "zero 2", "98.0 ms", "0.98", "yes"),
    ]
    slow = dataclasses.replace(own, recipe="data parallel", measured_s=0.09, measured_beside_auto=0.9)
    assert findings.measured_cells([*rows, slow])[0][4:] == ("data parallel", "90.0 ms", "0.90", "no")
    assert findings.measured_cells([own, rows[1]])[0][4:] == ("none", "", "", "yes")


def test_what_the_clock_chose_is_measured_beside_the_fastest_recipe():
    """It is no recipe: the search's own plan is not beaten by it."""
    own = dataclasses.replace(ROW, model="gpt-small", cluster="local:8", plan="x=8", measured_s=0.1)
    timed = dataclasses.replace(own, recipe=manual.TIMED, measured_s=0.09, measured_beside_auto=0.9)
    same = dataclasses.replace(timed, recipe="zero 1", measured_beside_timed=1.0)
    other = dataclasses.replace(
        own, recipe="zero 2", measured_s=0.085, measured_beside_auto=0.85, measured_beside_timed=0.96
    )
    assert findings.measured_cells([own, timed, same, other]) == [
        ("gpt-small", "search", "x=8", "100.0 ms", "zero 2", "85.0 ms", "0.85", "no"),
        ("gpt-small", "clock", "x=8", "90.0 ms", "zero 2", "85.0 ms", "0.96", "no"),
    ]
    assert [row.recipe for row, _ in reports.beside_auto([own, timed, same])] == ["zero 1"]
    assert findings.measured_cells([timed, same])[0][4:] == ("none", "", "", "yes")
    apart = dataclasses.replace(other, measured_beside_timed=None)  # not in the same turns
    assert findings.measured_cells([timed, apart])[0][4:] == ("none", "", "", "")
