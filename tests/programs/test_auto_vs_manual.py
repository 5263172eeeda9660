"""How recipes are walked through, and how rows are kept and compared, without any planning."""

import dataclasses

from autopar import Cluster, recipes
from autopar.recipes.walks import Outcome, Point, Problem, first_points, frontier, walk
from autopar.recipes.ways import megatron
from benchmarks.auto_vs_manual.__main__ import HARDWARE, beside_search, came_to, selected
from benchmarks.auto_vs_manual.models import cluster_of, models

GPT = models()["gpt-2.6B"]


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


def test_stages_with_room_recompute_nothing_and_are_tried_with_whole_state_too():
    """Of 1 to 128 micro-batches 16 are the fastest, in which everything may be kept."""
    times = {"16": 1.0, "32": 2.0, "8": 2.0}

    def came_to(text: str) -> Outcome:
        (m,) = (part.split()[0] for part in text.split(", ") if "micro" in part)
        time_s = times.get(m, 3.0) + ("recompute" in text) + ("ZeRO" in text) / 10
        return Outcome(step_time_s=time_s, peak_bytes=1, limit_bytes=100)

    start = Point(pp=2, zero=1, examples=16, recompute="input")
    texts = walked(walk(problem(), [start], lambda p, m: megatron_recipe()), came_to)
    assert texts[0] == "2 stages, ZeRO 1, 16 micro-batches, recompute input"
    assert "2 stages, 16 micro-batches" in texts
    assert not [text for text in texts if "matmuls" in text]


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


def test_every_family_is_planned_for_every_kind_of_hardware():
    jobs = selected(["hardware", "| auto"])
    families = {model.family for model in models().values()}
    assert {(models()[name].family, cluster) for name, cluster, _ in jobs} == {
        (f, c) for f in families for c in HARDWARE
    }
    assert len(jobs) == len(families) * len(HARDWARE)


def test_a_part_of_a_host_is_a_cluster():
    assert cluster_of("p3.16xlarge/4").num_devices == 4
    assert cluster_of("p3.16xlargex2").num_devices == 16


def test_a_row_without_a_plan_says_by_how_much_it_is_over_and_has_no_factor():
    rows = {
        "gpt-2.6B | p3.16xlarge | auto": {"step_time_s": 2.0},
        "gpt-2.6B | p3.16xlarge | zero 3": {"step_time_s": 3.0},
        "gpt-2.6B | p3.16xlarge | zero 1": {"why": "too much", "peak_bytes": 3 * 10**9, "limit_bytes": 10**9},
    }
    assert [beside_search(name, rows) for name in rows] == [1.0, 1.5, None]
    assert came_to(rows["gpt-2.6B | p3.16xlarge | zero 1"]) == "out of memory, 2 GB over"
