"""Tree moves in limited memory, compiled: `autopar.solver.local_search` with prices on the rows.

Where a result passes the limit, the worst row's price is set to where the last result that fits and this one cost the
same (the cutting-plane step of Lagrangian duality in one variable), and the tree is solved again.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from autopar.solver.local_search import Graph, grow, prepare, solve_tree, tree_cost

TRIES = 12  # priced solutions of one tree: a row's price to a few bits is all that a discrete choice needs


@njit(cache=True, nogil=True)
def charge(
    span_first: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
    span_bytes: np.ndarray,
    bytes_of: np.ndarray,
    sums: np.ndarray,
    size: int,
    tree: np.ndarray,
    at: np.ndarray,
    rate: np.ndarray,
) -> tuple[int, int]:
    """Fill rate with the price of the bytes of every strategy; returns the first and last row held, plus one."""
    begin, end = len(sums) - 1, 0
    for k in range(size):
        v, width = tree[k], at[k + 1] - at[k]
        for s in range(width):
            rate[at[k] + s] = 0.0
        for x in range(span_first[v], span_first[v + 1]):
            begin = min(begin, low[x])
            end = max(end, high[x])
            price = sums[high[x]] - sums[low[x]]
            if price > 0.0:
                for s in range(width):
                    rate[at[k] + s] += price * bytes_of[span_bytes[x] + s]
    return begin, end


@njit(cache=True, nogil=True)
def raise_price(
    span_first: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
    span_bytes: np.ndarray,
    bytes_of: np.ndarray,
    row: int,
    rise: float,
    size: int,
    tree: np.ndarray,
    at: np.ndarray,
    rate: np.ndarray,
) -> None:
    """Add a rise of one row's price to the rates."""
    for k in range(size):
        v = tree[k]
        for x in range(span_first[v], span_first[v + 1]):
            if low[x] <= row < high[x]:
                for s in range(at[k + 1] - at[k]):
                    rate[at[k] + s] += rise * bytes_of[span_bytes[x] + s]


@njit(cache=True, nogil=True)
def shift(
    span_first: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
    span_bytes: np.ndarray,
    bytes_of: np.ndarray,
    choice: np.ndarray,
    size: int,
    tree: np.ndarray,
    pick: np.ndarray,
    change: np.ndarray,
) -> bool:
    """Add to change, the bytes that pick holds more than choice; False when they agree."""
    differs = False
    for k in range(size):
        v = tree[k]
        if pick[k] != choice[v]:
            differs = True
            for x in range(span_first[v], span_first[v + 1]):
                more = bytes_of[span_bytes[x] + pick[k]] - bytes_of[span_bytes[x] + choice[v]]
                change[low[x]] += more
                change[high[x]] -= more
    return differs


@njit(cache=True, nogil=True)
def assess(left: np.ndarray, begin: int, end: int, change: np.ndarray) -> tuple[int, int, int]:
    """Bytes over after the change, the row that it passes the most (-1 = none) and its rise; change is cleared."""
    over, worst, excess = 0, -1, 0
    level = worst_level = 0
    for r in range(begin, end):
        level += change[r]
        change[r] = 0
        if level > left[r]:
            over += level - left[r]
            if level > 0 and level - left[r] > excess:
                worst, worst_level, excess = r, level, level - left[r]
    change[end] = 0
    return over, worst, worst_level


@njit(cache=True, nogil=True)
def total(size: int, at: np.ndarray, rate: np.ndarray, pick: np.ndarray) -> float:
    """The price of what a choice of the tree holds."""
    held = 0.0
    for k in range(size):
        held += rate[at[k] + pick[k]]
    return held


@njit(cache=True, nogil=True)
def search(
    graph: Graph, span_first: np.ndarray, low: np.ndarray, high: np.ndarray, span_bytes: np.ndarray,
    bytes_of: np.ndarray, price: np.ndarray, choice: np.ndarray, left: np.ndarray, seed: int, moves: int, largest: int,
) -> None:  # fmt: skip
    """Make `moves` tree moves from a choice; choice and left (bytes still free a row) are updated.

    price: (R,) cost a byte; a move is kept when cost + price * bytes falls. While some row is over its limit, moves
    that lower the bytes over are kept first.
    """
    first = graph[0]
    np.random.seed(seed)
    n = len(first) - 1
    free = np.flatnonzero(first[1:] - first[:-1] > 1)
    if len(free) == 0:
        return
    stamp, touched = np.full(n, -1), np.full(n, -1)
    count, tree, parent, link = (
        np.zeros(n, np.int64),
        np.zeros(n, np.int64),
        np.zeros(n, np.int64),
        np.zeros(n, np.int64),
    )
    queue, pick, kept = np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros(n, np.int64)
    at = np.zeros(n + 1, np.int64)
    own, rate, value, toll = np.zeros(first[n]), np.zeros(first[n]), np.zeros(first[n]), np.zeros(first[n])
    both = np.zeros(first[n])
    back = np.zeros((largest + 1, np.max(first[1:] - first[:-1])), np.int32)
    change = np.zeros(len(left) + 1, np.int64)
    sums = np.zeros(len(left) + 1)
    for r in range(len(left)):
        sums[r + 1] = sums[r] + price[r]
    for move in range(moves):
        most = int(2.0 * (largest / 2.0) ** np.random.random())
        root = free[np.random.randint(0, len(free))]
        size = grow(
            graph, root, most, np.random.randint(0, 3), stamp, touched, count, move,
            tree, parent, link, queue,
        )  # fmt: skip
        prepare(graph, choice, size, tree, stamp, at, own, kept)
        begin, end = charge(span_first, low, high, span_bytes, bytes_of, sums, size, tree, at, toll)
        rate[: at[size]] = toll[: at[size]]
        before = tree_cost(graph, size, tree, parent, link, at, own, kept)
        toll_before = total(size, at, toll, kept)
        best_over, best_score = assess(left, begin, end, change)[0], before + toll_before
        found = False
        for attempt in range(TRIES):
            both[: at[size]] = own[: at[size]] + rate[: at[size]]
            solve_tree(graph, size, tree, parent, link, at, both, value, back, pick)
            if not shift(span_first, low, high, span_bytes, bytes_of, choice, size, tree, pick, change):
                break
            over, worst, level = assess(left, begin, end, change)
            now = tree_cost(graph, size, tree, parent, link, at, own, pick)
            score = now + total(size, at, toll, pick)
            least = best_score - 1e-9 * abs(best_score) if best_score < np.inf else np.inf
            if over < best_over or (over == best_over and score < least):
                best_over, best_score, found = over, score, True
                kept[:size] = pick[:size]
            if worst < 0:
                break
            # Where this result and the present choice would cost the same, and a little more to leave the tie.
            held = 0.0
            for k in range(size):
                held += rate[at[k] + choice[tree[k]]] - rate[at[k] + pick[k]]
            rise = max((before + held) - now, 1e-9 * abs(before)) / level
            raise_price(
                span_first, low, high, span_bytes, bytes_of, worst, rise * (1.05 if attempt < 5 else 2.1), size, tree,
                at, rate,
            )  # fmt: skip
        if found:
            shift(span_first, low, high, span_bytes, bytes_of, choice, size, tree, kept, change)
            level = 0
            for r in range(begin, end):
                level += change[r]
                change[r] = 0
                left[r] -= level
            change[end] = 0
            for k in range(size):
                choice[tree[k]] = kept[k]
