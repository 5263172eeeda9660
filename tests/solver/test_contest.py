"""The contest's files: read, written, solved by the command, on instances made here."""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.solver import Problem, brute_force, evaluate
from benchmarks.iopddl import main, read_contest
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


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"problem": {"nodes": {}}}')
    with pytest.raises(ValueError, match=r"x\.json: not a contest problem"):
        read_contest(tmp_path / "x.json")


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
