"""The JSON of the ASPLOS / EuroSys 2025 contest on intra-operator parallelism: problems read, solutions written.

Format: github.com/google/iopddl. Interval i, costs i and usages i belong to node i; edge costs are row by row, the
first node's strategy choosing the row. Costs of 10^18 and more mean "not allowed". Nodes of an empty interval hold no
memory.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from autopar.solver.ilp.problem import Edge, Problem, Use

NOT_ALLOWED = 10**18


def read_contest(path: str | Path) -> Problem:
    """The problem of a .json or .json.gz file; equal edge matrices become one array.

    Raises: ValueError when the file does not follow the contest's format.
    """
    path = Path(path)
    raw = path.read_bytes()
    try:
        stored = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)["problem"]
        intervals, costs, usages = (stored["nodes"][key] for key in ("intervals", "costs", "usages"))
        pairs, matrices = stored["edges"]["nodes"], stored["edges"]["costs"]
        limit = stored.get("usage_limit")
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path.name}: not a contest problem: {type(error).__name__} {error}") from error
    if not len(intervals) == len(costs) == len(usages) or len(pairs) != len(matrices):
        raise ValueError(f"{path.name}: intervals, costs and usages differ in number, or edges from their costs")
    node_cost = tuple(_costs(row) for row in costs)
    pool: dict[tuple[int, bytes], np.ndarray] = {}
    edges = []
    for number, ((source, target), values) in enumerate(zip(pairs, matrices, strict=True)):
        rows, columns = len(node_cost[source]), len(node_cost[target])
        if len(values) != rows * columns:
            raise ValueError(f"{path.name}: edge {number} has {len(values)} costs, expected {rows} x {columns}")
        flat = _costs(values)
        matrix = pool.setdefault((rows, flat.tobytes()), flat.reshape(rows, columns))
        edges.append(Edge(source=source, target=target, cost=matrix))
    uses = tuple(
        Use(node=node, start=start, stop=stop, bytes=np.array(size, dtype=np.int64))
        for node, ((start, stop), size) in enumerate(zip(intervals, usages, strict=True))
        if start < stop and any(size)
    )
    return Problem(node_cost=node_cost, edges=tuple(edges), uses=uses, limit_bytes=limit)


def write_contest(problem: Problem, path: str | Path, *, name: str) -> None:
    """Write a problem in the contest's format.

    Raises: ValueError when a node has two uses, or a cost is negative or not whole: the format cannot hold these.
    """
    use_of = {use.node: use for use in problem.uses}
    if len(use_of) != len(problem.uses):
        raise ValueError("the contest's format has one use a node")
    spans = [(use_of[v].start, use_of[v].stop) if v in use_of else (0, 0) for v in range(len(problem.node_cost))]
    sizes = [use_of[v].bytes.tolist() if v in use_of else [0] * len(c) for v, c in enumerate(problem.node_cost)]
    stored: dict[str, object] = {
        "name": name,
        "nodes": {"intervals": spans, "costs": [_whole(cost) for cost in problem.node_cost], "usages": sizes},
        "edges": {
            "nodes": [(edge.source, edge.target) for edge in problem.edges],
            "costs": [_whole(edge.cost.ravel()) for edge in problem.edges],
        },
    }
    if problem.limit_bytes is not None:
        stored["usage_limit"] = problem.limit_bytes
    Path(path).write_text(json.dumps({"problem": stored}))


def write_choice(choice: Sequence[int], path: str | Path) -> None:
    """Write the list of strategy indices, as the contest wants it."""
    Path(path).write_text(json.dumps([int(strategy) for strategy in choice]))


def _costs(values: list[int]) -> np.ndarray:
    cost = np.array(values, dtype=np.float64)
    cost[cost >= NOT_ALLOWED] = np.inf
    return cost


def _whole(costs: np.ndarray) -> list[int]:
    finite = costs[np.isfinite(costs)]
    if (finite < 0).any() or (finite != np.round(finite)).any():
        raise ValueError("the contest's format has whole costs of zero or more")
    return [int(cost) if np.isfinite(cost) else NOT_ALLOWED for cost in costs]
