"""The best setting of a recipe that is found by bounds, estimates and a few plans is the best of all settings."""

import dataclasses

import pytest

from autopar import parallelize, recipes
from autopar.benching import problem_of
from autopar.common.progress import Progress
from autopar.errors import MemoryLimitError
from autopar.hardware.cluster import Cluster
from autopar.ir.rules import RuleBook
from autopar.plan.context import StepGraphs
from autopar.recipes import ways
from autopar.recipes.walks import RECOMPUTE
from autopar.search.planner import make_plan
from benchmarks.auto_vs_manual.models import Model
from benchmarks.auto_vs_manual.recipes import RECIPES

SHARE = 7**5  # examples of each device
DEEP = Model(family="mlp", size="deep", case="mlp", sizes={"layers": 16, "width": 8192, "batch": 8 * SHARE})
MICROBATCHES = (None, 7, 49)  # more fit as well, and take longer
V100 = Cluster.preset("p3.16xlarge")


def traced(cluster: Cluster):
    return problem_of(parallelize(DEEP.build().step, cluster=cluster, cache_dir=None), *DEEP.shapes())


def best_of_all(options: dict[str, int], cluster: Cluster) -> float:
    """The least time of all settings that fit, each planned."""
    problem = traced(cluster)
    rules, graphs, times_s = RuleBook(), StepGraphs(), []
    for recompute in RECOMPUTE:
        for m in MICROBATCHES:
            request = recipes.combine(**options, num_microbatches=m, recompute=recompute).request
            try:
                plan = make_plan(
                    problem.traced, problem.trees, cluster, request, rules, Progress("", show=False), graphs
                )
            except MemoryLimitError:
                continue
            times_s.append(plan.predicted.step_time_s)
    return min(times_s)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "options", "memory_bytes"),
    [
        ("data parallel", {}, 20e9),
        ("zero 3", {"zero": 3}, 12e9),
        pytest.param("data parallel", {}, 15.5e9, marks=pytest.mark.slow),
        pytest.param("tensor parallel", {"tp": 8}, 40e9, marks=pytest.mark.slow),
    ],
)
def test_the_best_setting_is_the_best_of_all(monkeypatch, recipe, options, memory_bytes):
    cluster = dataclasses.replace(V100, device=dataclasses.replace(V100.device, memory_bytes=int(memory_bytes)))
    made = []
    monkeypatch.setattr(ways, "make_plan", lambda *args: made.append(args[3]) or make_plan(*args))
    problem = traced(cluster)
    found = ways.made_of(problem, RECIPES[recipe](problem))
    assert found.plan.predicted.step_time_s == pytest.approx(best_of_all(options, cluster), rel=1e-9)
    assert len(made) < found.attempts
