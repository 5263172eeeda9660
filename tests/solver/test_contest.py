"""The contest's files: read, written, solved by the command, on instances made here."""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autopar.solver import Edge, Problem, Status, Use, brute_force, evaluate, solve
from benchmarks.contest_format import read_contest, write_choice, write_contest
from benchmarks.iopddl import main
from benchmarks.own_instances import Instance, least_bytes, made, with_one_use_each
from tests.solver.cases import layered_problem

# The example of the contest's description.
EXAMPLE = {
    "problem": {
        "name": "example",
        "nodes": {
            "intervals": [[30, 70], [40, 70], [50, 120], [110, 140], [110, 150]],
            "costs": [[15], [55, 65], [25, 45, 35], [85, 75], [95]],
            "usages": [[10], [25, 25], [15, 20, 15], [10, 10], [15]],
        },
        "edges": {
            "nodes": [[0, 1], [0, 2], [1, 3], [2, 4], [3, 4]],
            "costs": [[30, 40], [50, 10, 40], [90, 10, 20, 80], [60, 20, 30], [70, 60]],
        },
        "usage_limit": 50,
    }
}


def test_example_is_read_and_solved(tmp_path: Path) -> None:
    file = tmp_path / "example.json"
    file.write_text(json.dumps(EXAMPLE))
    problem = read_contest(file)
    assert problem.limit_bytes == 50
    assert evaluate(problem, (0, 0, 2, 1, 0)) == (445.0, 50)
    assert main([str(file), "--seconds", "20", "--out", str(tmp_path / "out")]) == 0
    choice = json.loads((tmp_path / "out" / "example.json").read_text())
    assert evaluate(problem, choice)[0] == brute_force(problem).objective
    assert (tmp_path / "out" / "example.svg").read_text().startswith("<svg")


def test_huge_costs_are_forbidden_and_equal_matrices_shared(tmp_path: Path) -> None:
    stored = {
        "nodes": {
            "intervals": [[0, 0], [5, 2], [0, 9]],
            "costs": [[1, 10**18], [0, 2**64 - 1], [3, 4]],
            "usages": [[9, 9], [9, 9], [0, 7]],
        },
        "edges": {"nodes": [[0, 1], [1, 2]], "costs": [[0, 10**18, 3, 4], [0, 10**18, 3, 4]]},
    }
    file = tmp_path / "huge.json.gz"
    file.write_bytes(gzip.compress(json.dumps({"problem": stored}).encode()))
    problem = read_contest(file)
    assert problem.limit_bytes is None
    assert problem.node_cost[1][1] == math.inf
    assert problem.edges[0].cost is problem.edges[1].cost
    assert problem.edges[0].cost.tolist() == [[0.0, math.inf], [3.0, 4.0]]
    assert [use.node for use in problem.uses] == [2]


def test_writing_is_the_inverse_of_reading(tmp_path: Path) -> None:
    problem = layered_problem(4, width=3, strategies=4, seed=2, tight=1.4)
    write_contest(problem, tmp_path / "p.json", name="p")
    again = read_contest(tmp_path / "p.json")
    choice = np.random.default_rng(0).integers(0, 4, len(problem.node_cost)).tolist()
    assert evaluate(again, choice) == evaluate(problem, choice)
    write_choice(choice, tmp_path / "c.json")
    assert json.loads((tmp_path / "c.json").read_text()) == choice


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"problem": {"nodes": {}}}')
    with pytest.raises(ValueError, match=r"x\.json: not a contest problem"):
        read_contest(tmp_path / "x.json")
    problem = layered_problem(2, width=2, strategies=2, seed=0)
    double = replace(problem, uses=(*problem.uses, problem.uses[0]))
    with pytest.raises(ValueError, match="one use a node"):
        write_contest(double, tmp_path / "y.json", name="y")


def test_save_and_load_keep_everything(tmp_path: Path) -> None:
    problem = replace(
        layered_problem(4, width=3, strategies=4, seed=2, tight=1.4), node_names=tuple(f"n{k}" for k in range(12))
    )
    problem.save(tmp_path / "p.npz")
    again = Problem.load(tmp_path / "p.npz")
    assert again.node_names == problem.node_names
    assert again.limit_bytes == problem.limit_bytes
    assert all((a.cost == b.cost).all() for a, b in zip(again.edges, problem.edges, strict=True))
    assert evaluate(again, [1] * 12) == evaluate(problem, [1] * 12)
    Problem(node_cost=()).save(tmp_path / "empty.npz")
    assert Problem.load(tmp_path / "empty.npz").node_cost == ()


def test_a_node_with_two_uses_becomes_two_that_choose_alike() -> None:
    problem = Problem(
        node_cost=(np.array([3.0, 1.0]), np.array([0.0, 0.0])),
        edges=(Edge(source=0, target=1, cost=np.array([[0.0, 5.0], [5.0, 0.0]])),),
        uses=(
            Use(node=0, start=0, stop=2, bytes=np.array([1, 4])),
            Use(node=0, start=3, stop=5, bytes=np.array([2, 8])),
            Use(node=1, start=4, stop=6, bytes=np.array([1, 1])),
        ),
        limit_bytes=8,
    )
    split = with_one_use_each(problem)
    assert [use.node for use in split.uses] == [0, 2, 1]
    assert least_bytes(split.uses) == least_bytes(problem.uses) == 3
    assert brute_force(problem).choice == brute_force(split).choice[:2] == (0, 0)
    assert brute_force(split).objective == brute_force(problem).objective == 3.0


def test_an_instance_of_a_training_step_has_memory_that_binds_and_is_read_back(tmp_path: Path) -> None:
    instance = Instance(case="mlp", sizes={}, cluster="dgx-h100", axis_sizes=(2, 4), memory=0.3)
    problem = made(instance)
    write_contest(problem, tmp_path / "mlp.json", name="mlp")
    again = read_contest(tmp_path / "mlp.json")
    free, limited = solve(replace(again, limit_bytes=None)), solve(again)
    assert again.limit_bytes is not None
    assert free.status is limited.status is Status.OPTIMAL
    assert least_bytes(problem.uses) < limited.peak_bytes <= again.limit_bytes < free.peak_bytes
    assert limited.objective > free.objective
