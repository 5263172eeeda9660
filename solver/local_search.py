"""Local search by tree moves: a random induced tree of nodes is chosen anew, exactly, with everything else held.
Compiled.

With the rest fixed, the best choice of an induced tree is a dynamic program (subtree moves of Hamze and de Freitas,
UAI 2004, made minimising). `graph`: the arrays of `problem.Flat`.
"""

from __future__ import annotations

import numpy as np
from numba import njit

Graph = tuple[np.ndarray, ...]
FLAGS = {"nnan", "nsz", "arcp", "contract"}


@njit(cache=True, nogil=True)
def grow(
    graph: Graph,
    root: int,
    most: int,
    mode: int,
    stamp: np.ndarray,
    touched: np.ndarray,
    count: np.ndarray,
    mark: int,
    tree: np.ndarray,
    parent: np.ndarray,
    link: np.ndarray,
    queue: np.ndarray,
) -> int:
    """Grow an induced tree from root to at most `most` nodes; returns how many. mode: 0 wide, 1 deep, 2 random."""
    first, _, source, target, _, _, near_first, near = graph
    size = 0
    front = 1
    begin = 0
    queue[0] = root
    touched[root] = mark
    count[root] = 1
    parent[0] = -1
    while begin < front and size < most:
        if mode == 0:
            v = queue[begin]
            begin += 1
        elif mode == 1:
            front -= 1
            v = queue[front]
        else:
            k = np.random.randint(begin, front)
            front -= 1
            v = queue[k]
            queue[k] = queue[front]
        if count[v] != 1 or first[v + 1] - first[v] == 1:
            continue
        up = -1
        for q in range(near_first[v], near_first[v + 1]):
            e = near[q]
            w = target[e] if source[e] == v else source[e]
            if stamp[w] >= 0:
                up = stamp[w]
                link[size] = e
        parent[size] = up
        tree[size] = v
        stamp[v] = size
        size += 1
        for q in range(near_first[v], near_first[v + 1]):
            e = near[q]
            w = target[e] if source[e] == v else source[e]
            if stamp[w] >= 0:
                continue
            if touched[w] != mark:
                touched[w] = mark
                count[w] = 1
                queue[front] = w
                front += 1
            else:
                count[w] += 1
    for k in range(size):
        stamp[tree[k]] = -1
    return size


@njit(cache=True, nogil=True, fastmath=FLAGS)
def solve_tree(
    graph: Graph,
    size: int,
    tree: np.ndarray,
    parent: np.ndarray,
    link: np.ndarray,
    at: np.ndarray,
    own: np.ndarray,
    value: np.ndarray,
    back: np.ndarray,
    pick: np.ndarray,
) -> None:
    """The cheapest choice of a tree whose nodes cost own; pick: (size,) filled. at: where costs begin."""
    _, _, source, _, start, matrix, _, _ = graph
    for k in range(size):
        for s in range(at[k + 1] - at[k]):
            value[at[k] + s] = own[at[k] + s]
    for k in range(size - 1, 0, -1):
        v, e, p = tree[k], link[k], parent[k]
        count = at[k + 1] - at[k]
        above = at[p + 1] - at[p]
        here = at[k]
        if source[e] == v:  # rows are this node's strategies
            for t in range(above):
                best = np.inf
                which = 0
                for s in range(count):
                    c = value[here + s] + matrix[start[e] + s * above + t]
                    if c < best:
                        best = c
                        which = s
                value[at[p] + t] += best
                back[k, t] = which
        else:
            for t in range(above):
                best = np.inf
                which = 0
                row = start[e] + t * count
                for s in range(count):
                    c = value[here + s] + matrix[row + s]
                    if c < best:
                        best = c
                        which = s
                value[at[p] + t] += best
                back[k, t] = which
    best = np.inf
    pick[0] = 0
    for s in range(at[1]):
        if value[s] < best:
            best = value[s]
            pick[0] = s
    for k in range(1, size):
        pick[k] = back[k, pick[parent[k]]]


@njit(cache=True, nogil=True)
def tree_cost(
    graph: Graph,
    size: int,
    tree: np.ndarray,
    parent: np.ndarray,
    link: np.ndarray,
    at: np.ndarray,
    own: np.ndarray,
    pick: np.ndarray,
) -> float:
    """The true cost of a choice of the tree, with its edges to the rest."""
    _, _, source, _, start, matrix, _, _ = graph
    total = 0.0
    for k in range(size):
        total += own[at[k] + pick[k]]
        if k > 0:
            e, p = link[k], parent[k]
            if source[e] == tree[k]:
                total += matrix[start[e] + pick[k] * (at[p + 1] - at[p]) + pick[p]]
            else:
                total += matrix[start[e] + pick[p] * (at[k + 1] - at[k]) + pick[k]]
    return total


@njit(cache=True, nogil=True)
def prepare(
    graph: Graph,
    choice: np.ndarray,
    size: int,
    tree: np.ndarray,
    stamp: np.ndarray,
    at: np.ndarray,
    own: np.ndarray,
    kept: np.ndarray,
) -> None:
    """Fill at, own (costs of the tree's nodes with their edges to the rest) and kept (their present choice)."""
    first, cost, source, target, start, matrix, near_first, near = graph
    for k in range(size):
        stamp[tree[k]] = k
    for k in range(size):
        v = tree[k]
        width = first[v + 1] - first[v]
        at[k + 1] = at[k] + width
        for s in range(width):
            own[at[k] + s] = cost[first[v] + s]
        for q in range(near_first[v], near_first[v + 1]):
            e = near[q]
            w = target[e] if source[e] == v else source[e]
            if stamp[w] >= 0:
                continue
            if source[e] == v:
                step = first[w + 1] - first[w]
                for s in range(width):
                    own[at[k] + s] += matrix[start[e] + s * step + choice[w]]
            else:
                row = start[e] + choice[w] * width
                for s in range(width):
                    own[at[k] + s] += matrix[row + s]
        kept[k] = choice[v]
    for k in range(size):
        stamp[tree[k]] = -1


@njit(cache=True, nogil=True)
def search(graph: Graph, choice: np.ndarray, seed: int, moves: int, largest: int) -> None:
    """Make `moves` tree moves from a choice, which is updated; a move is kept when the cost falls."""
    first = graph[0]
    np.random.seed(seed)
    n = len(first) - 1
    free = np.flatnonzero(first[1:] - first[:-1] > 1)
    if len(free) == 0:
        return
    stamp, touched = np.full(n, -1), np.full(n, -1)
    count, tree, parent = np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros(n, np.int64)
    link, queue = np.zeros(n, np.int64), np.zeros(n, np.int64)
    pick, kept = np.zeros(n, np.int64), np.zeros(n, np.int64)
    at = np.zeros(n + 1, np.int64)
    own, value = np.zeros(first[n]), np.zeros(first[n])
    back = np.zeros((largest + 1, np.max(first[1:] - first[:-1])), np.int32)
    for move in range(moves):
        most = int(2.0 * (largest / 2.0) ** np.random.random())
        root = free[np.random.randint(0, len(free))]
        size = grow(
            graph, root, most, np.random.randint(0, 3), stamp, touched, count, move,
            tree, parent, link, queue,
        )  # fmt: skip
        prepare(graph, choice, size, tree, stamp, at, own, kept)
        before = tree_cost(graph, size, tree, parent, link, at, own, kept)
        solve_tree(graph, size, tree, parent, link, at, own, value, back, pick)
        now = tree_cost(graph, size, tree, parent, link, at, own, pick)
        if now < (before - 1e-9 * abs(before) if before < np.inf else np.inf):
            for k in range(size):
                choice[tree[k]] = pick[k]
