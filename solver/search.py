"""Local search by tree moves: a random induced tree of nodes is chosen anew, exactly, with everything else held.
Compiled.

With the rest fixed, the best choice of an induced tree is a dynamic program (subtree moves of Hamze and de Freitas,
UAI 2004, made minimising). Memory enters by prices on rows: where a result passes the limit, the worst row's price is
set to where the last result that fits and this one cost the same (the cutting-plane step of Lagrangian duality in one
variable), and the tree is solved again.
"""

from __future__ import annotations

import numpy as np
from numba import njit

FLAGS = {"nnan", "nsz", "arcp", "contract"}
TRIES = 12  # priced solutions of one tree: a row's price to a few bits is all that a discrete choice needs


@njit(cache=True, nogil=True)
def grow(
    first, source, target, near_first, near, root, most, mode, stamp, touched, count, mark, tree, parent, link, queue
):
    """Grow an induced tree from root to at most `most` nodes; returns how many. mode: 0 wide, 1 deep, 2 random."""
    size = 0
    front = 1
    begin = 0
    queue[0] = root
    touched[root] = mark
    count[root] = 1
    parent[0] = -1
    up = np.int64(-1)
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
def solve_tree(first, source, start, matrix, size, tree, parent, link, at, own, rate, value, back, pick):
    """The cheapest choice of a tree whose nodes cost own + rate; pick: (size,) filled. at: where costs begin."""
    for k in range(size):
        for s in range(at[k + 1] - at[k]):
            value[at[k] + s] = own[at[k] + s] + rate[at[k] + s]
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
def tree_cost(source, start, matrix, size, tree, parent, link, at, own, pick):
    """The true cost of a choice of the tree, with its edges to the rest."""
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
def search(
    first, cost, source, target, start, matrix, near_first, near, span_first, low, high, span_bytes, size_of, price,
    choice, left, seed, moves, largest, pull,
):  # fmt: skip
    """Make `moves` tree moves from a choice; choice and left (bytes still free a row) are updated. Returns the change
    of cost.

    price: (R,) cost a byte, the dual's; a move starts from `pull` times it and is kept when cost + pull * price *
    bytes falls. While some row is over its limit, moves that lower the bytes over are kept first.
    """
    np.random.seed(seed)
    n = len(first) - 1
    rows = len(left)
    widest = 0
    for v in range(n):
        widest = max(widest, first[v + 1] - first[v])
    stamp = np.full(n, -1)
    touched = np.full(n, -1)
    count = np.zeros(n, dtype=np.int64)
    tree = np.zeros(n, dtype=np.int64)
    parent = np.zeros(n, dtype=np.int64)
    link = np.zeros(n, dtype=np.int64)
    queue = np.zeros(n, dtype=np.int64)
    at = np.zeros(n + 1, dtype=np.int64)
    own = np.zeros(first[n])
    rate = np.zeros(first[n])
    value = np.zeros(first[n])
    back = np.zeros((largest + 1, widest), dtype=np.int32)
    pick = np.zeros(n, dtype=np.int64)
    kept = np.zeros(n, dtype=np.int64)
    change = np.zeros(rows + 1, dtype=np.int64)
    sums = np.zeros(rows + 1)
    for r in range(rows):
        sums[r + 1] = sums[r] + price[r] * pull
    free = np.zeros(n, dtype=np.int64)
    many = 0
    for v in range(n):
        if first[v + 1] - first[v] > 1:
            free[many] = v
            many += 1
    gained = 0.0
    if many == 0:
        return gained
    for move in range(moves):
        most = int(2.0 * (largest / 2.0) ** np.random.random())
        root = free[np.random.randint(0, many)]
        size = grow(
            first, source, target, near_first, near, root, most, np.random.randint(0, 3), stamp, touched, count, move,
            tree, parent, link, queue,
        )  # fmt: skip
        if size == 0:
            continue
        for k in range(size):
            stamp[tree[k]] = k
        begin, end = rows, 0
        for k in range(size):
            v = tree[k]
            at[k + 1] = at[k] + first[v + 1] - first[v]
            width = first[v + 1] - first[v]
            for s in range(width):
                own[at[k] + s] = cost[first[v] + s]
                rate[at[k] + s] = 0.0
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
            for x in range(span_first[v], span_first[v + 1]):
                begin = min(begin, low[x])
                end = max(end, high[x])
                charge = sums[high[x]] - sums[low[x]]
                if charge > 0.0:
                    for s in range(width):
                        rate[at[k] + s] += charge * size_of[span_bytes[x] + s]
            kept[k] = choice[v]
        for k in range(size):
            stamp[tree[k]] = -1
        before = tree_cost(source, start, matrix, size, tree, parent, link, at, own, kept)
        toll_before = 0.0
        for k in range(size):
            toll_before += rate[at[k] + kept[k]]
        over_before = 0
        for r in range(begin, end):
            if left[r] < 0:
                over_before -= left[r]
        best_over = over_before
        best_score = before + toll_before
        found = False
        for attempt in range(TRIES):
            solve_tree(first, source, start, matrix, size, tree, parent, link, at, own, rate, value, back, pick)
            same = True
            for k in range(size):
                v = tree[k]
                if pick[k] != choice[v]:
                    same = False
                for x in range(span_first[v], span_first[v + 1]):
                    more = size_of[span_bytes[x] + pick[k]] - size_of[span_bytes[x] + choice[v]]
                    change[low[x]] += more
                    change[high[x]] -= more
            if same:
                break
            over, worst, excess = 0, -1, 0
            level = 0
            worst_level = 0
            for r in range(begin, end):
                level += change[r]
                change[r] = 0
                if level > left[r]:
                    over += level - left[r]
                    if level > 0 and level - left[r] > excess:
                        excess = level - left[r]
                        worst = r
                        worst_level = level
            change[end] = 0
            now = tree_cost(source, start, matrix, size, tree, parent, link, at, own, pick)
            if over <= best_over:
                toll = 0.0
                for k in range(size):
                    v = tree[k]
                    for x in range(span_first[v], span_first[v + 1]):
                        toll += (sums[high[x]] - sums[low[x]]) * size_of[span_bytes[x] + pick[k]]
                score = now + toll
                if over < best_over or score < best_score - 1e-9 * abs(best_score):
                    best_over, best_score = over, score
                    found = True
                    for k in range(size):
                        kept[k] = pick[k]
            if worst < 0:
                break
            # The row's price at which this result and the present choice would cost the same, a little more to leave
            # the tie.
            held_now, held_before = 0.0, 0.0
            for k in range(size):
                held_now += rate[at[k] + pick[k]]
                held_before += rate[at[k] + choice[tree[k]]]
            rise = max(0.0, (before + held_before) - (now + held_now)) / worst_level
            rise = rise * 1.05 + 1e-12
            if attempt > 4:
                rise *= 2.0
            for k in range(size):
                v = tree[k]
                for x in range(span_first[v], span_first[v + 1]):
                    if low[x] <= worst < high[x]:
                        for s in range(at[k + 1] - at[k]):
                            rate[at[k] + s] += rise * size_of[span_bytes[x] + s]
        for k in range(size):  # a result equal to the present choice leaves changes behind
            v = tree[k]
            for x in range(span_first[v], span_first[v + 1]):
                change[low[x]] = 0
                change[high[x]] = 0
        if not found:
            continue
        gained += tree_cost(source, start, matrix, size, tree, parent, link, at, own, kept) - before
        for k in range(size):
            v = tree[k]
            for x in range(span_first[v], span_first[v + 1]):
                more = size_of[span_bytes[x] + kept[k]] - size_of[span_bytes[x] + choice[v]]
                change[low[x]] += more
                change[high[x]] -= more
            choice[v] = kept[k]
        level = 0
        for r in range(begin, end):
            level += change[r]
            change[r] = 0
            left[r] -= level
        change[end] = 0
    return gained
