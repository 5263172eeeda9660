"""Local search by tree moves in limited memory: a random induced tree of nodes is chosen anew, exactly, with everything
else held. Compiled.

With the rest fixed, the best choice of an induced tree is a dynamic program (subtree moves of Hamze and de Freitas,
UAI 2004, made minimising). Memory enters by prices on rows: where a result passes the limit, the worst row's price is
set to where the last result that fits and this one cost the same (the cutting-plane step of Lagrangian duality in one
variable), and the tree is solved again. `graph`: the arrays of `problem.Flat`.
"""

from __future__ import annotations

import numpy as np
from numba import njit

Graph = tuple[np.ndarray, ...]
Spans = tuple[np.ndarray, ...]  # of memory: span_first, low, high, span_bytes and bytes of `memory.FlatLimited`
FLAGS = {"nnan", "nsz", "arcp", "contract"}  # reorder freely, but infinities are kept: they mean "not allowed"
TRIES = 12  # priced solutions of one tree: a row's price to a few bits is all that a discrete choice needs


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
def charge(
    spans: Spans,
    sums: np.ndarray,
    size: int,
    tree: np.ndarray,
    at: np.ndarray,
    rate: np.ndarray,
) -> tuple[int, int]:
    """Fill rate with the price of the bytes of every strategy; returns the first and last row held, plus one."""
    span_first, low, high, span_bytes, bytes_of = spans
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
    spans: Spans,
    row: int,
    rise: float,
    size: int,
    tree: np.ndarray,
    at: np.ndarray,
    rate: np.ndarray,
) -> None:
    """Add a rise of one row's price to the rates."""
    span_first, low, high, span_bytes, bytes_of = spans
    for k in range(size):
        v = tree[k]
        for x in range(span_first[v], span_first[v + 1]):
            if low[x] <= row < high[x]:
                for s in range(at[k + 1] - at[k]):
                    rate[at[k] + s] += rise * bytes_of[span_bytes[x] + s]


@njit(cache=True, nogil=True)
def shift(
    spans: Spans,
    choice: np.ndarray,
    size: int,
    tree: np.ndarray,
    pick: np.ndarray,
    change: np.ndarray,
) -> bool:
    """Add to change, the bytes that pick holds more than choice; False when they agree."""
    span_first, low, high, span_bytes, bytes_of = spans
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
    graph: Graph, spans: Spans, price: np.ndarray, choice: np.ndarray, left: np.ndarray, seed: int, moves: int,
    largest: int,
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
    count, tree = np.zeros(n, np.int64), np.zeros(n, np.int64)
    parent, link = np.zeros(n, np.int64), np.zeros(n, np.int64)
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
        begin, end = charge(spans, sums, size, tree, at, toll)
        rate[: at[size]] = toll[: at[size]]
        before = tree_cost(graph, size, tree, parent, link, at, own, kept)
        toll_before = total(size, at, toll, kept)
        best_over, best_score = assess(left, begin, end, change)[0], before + toll_before
        found = False
        for attempt in range(TRIES):
            both[: at[size]] = own[: at[size]] + rate[: at[size]]
            solve_tree(graph, size, tree, parent, link, at, both, value, back, pick)
            if not shift(spans, choice, size, tree, pick, change):
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
            raise_price(spans, worst, rise * (1.05 if attempt < 5 else 2.1), size, tree, at, rate)
        if found:
            shift(spans, choice, size, tree, kept, change)
            level = 0
            for r in range(begin, end):
                level += change[r]
                change[r] = 0
                left[r] -= level
            change[end] = 0
            for k in range(size):
                choice[tree[k]] = kept[k]
