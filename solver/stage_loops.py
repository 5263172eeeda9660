"""The dynamic programme's loops, compiled. `stage_search` says what they compute.

A move is a stage that could be: layers [first, to[i]) on units[i] device units. Moves are sorted by their first layer:
those of layer a are begin[a] to begin[a + 1]. add_s = fill + drain, last_s = add + once. A row is kept for every
(level, layer): level k holds the ways to run the layers from there on in k stages, by the units they use.
"""

from __future__ import annotations

import numpy as np
from numba import njit

Moves = tuple[np.ndarray, ...]  # as DynamicProgram.graph has them
FLAGS = {"nnan", "nsz"}  # minima become single instructions; infinities are kept: they mean "not possible"


@njit(cache=True, nogil=True)
def over_ranges(values: np.ndarray, largest: bool) -> np.ndarray:
    """(options, layers) to (options, ranges): the sum, or the largest, over each range, by first layer, then last."""
    options, layers = values.shape
    out = np.empty((options, layers * (layers + 1) // 2), dtype=values.dtype)
    for o in range(options):
        at = 0
        for first in range(layers):
            total = values[o, first]
            out[o, at] = total
            at += 1
            for layer in range(first + 1, layers):
                total = max(total, values[o, layer]) if largest else total + values[o, layer]
                out[o, at] = total
                at += 1
    return out


@njit(cache=True, nogil=True)
def least_rounds(seconds: np.ndarray, groups: int, rounds: int) -> np.ndarray:
    """The ends of chunks, of a layer or more each, for which the sum over rounds of the largest of `groups` chunks is
    least, of layers that take so many seconds. Of equal sums that with rounds of about equal length is taken.
    """
    layers = len(seconds)
    sums = np.zeros((layers, layers + 1))
    for a in range(layers):
        for b in range(a + 1, layers + 1):
            sums[a, b] = sums[a, b - 1] + seconds[b - 1]
    longest = layers - groups * rounds + 1
    found = np.empty(layers * longest)
    number = 0
    for a in range(layers):
        for b in range(a + 1, min(a + longest, layers) + 1):
            found[number] = sums[a, b]
            number += 1
    limits = np.unique(found[:number])
    # largest[a, b]: the largest chunk of a round of layers [a, b), at its least.
    largest = np.full((layers + 1, layers + 1), np.inf)
    begun = np.arange(layers + 1) + groups  # [a] -> the next end that no limit so far has reached
    for limit in limits:
        after = np.arange(layers + 1)
        for a in range(layers):
            after[a] = np.searchsorted(sums[a, a + 1 :], limit, side="right") + a
        reached, left = np.arange(layers + 1), groups  # [a] -> the end of `groups` chunks, by squaring
        while left:
            if left % 2:
                reached = after[reached]
            after, left = after[after], left // 2
        for a in range(layers):
            while begun[a] <= reached[a]:
                largest[a, begun[a]] = limit
                begun[a] += 1
    even = 1e-6 / max(sums[0, layers], 1e-30)  # what a longer round costs more
    least = np.full((rounds + 1, layers + 1), np.inf)
    least[0, 0] = 0.0
    before = np.zeros((rounds + 1, layers + 1), dtype=np.int64)
    for r in range(1, rounds + 1):
        for b in range(r * groups, layers + 1):
            for a in range((r - 1) * groups, b - groups + 1):
                total = least[r - 1, a] + largest[a, b] * (1 + even * largest[a, b])
                if total < least[r, b]:
                    least[r, b] = total
                    before[r, b] = a
    ends = np.empty(groups * rounds, dtype=np.int64)
    b = layers
    for r in range(rounds, 0, -1):
        a = before[r, b]
        limit = largest[a, b]
        for g in range(groups):
            end = a + 1
            while end < b - (groups - 1 - g) and sums[a, end + 1] <= limit:
                end += 1
            ends[(r - 1) * groups + g] = end
            a = end
        b = before[r, b]
    return ends


@njit(cache=True, nogil=True, fastmath=FLAGS)
def suffixes(
    moves: Moves,
    flight: np.ndarray,
    open_end: bool,
    steady_most_s: float,
    prefix_s: np.ndarray,
    prefix_fill_s: np.ndarray,
    room_s: float,
    sums: np.ndarray,
    ends: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
) -> None:
    """Fills sums (least sum of add) and ends (least time to the end of the last update, from below) of every state.

    flight: micro-batches in flight of a move at each level. open_end: the last level stands for as many stages or more.
    prefix_s, prefix_fill_s: (layers + 1, units + 1) bounds on what comes before a state, by the units it uses, that
    `prefixes` made; states that are not below room_s with them are dropped. low, high: (levels + 1, layers + 1) the
    units between which a row has states.
    """
    begin, to, units, add_s, last_s, fill_s, steady_s, allowed = moves
    levels, layers, total = sums.shape[0] - 1, sums.shape[1] - 1, sums.shape[2] - 1
    low[:, :] = total + 1
    high[:, :] = -1
    sums[0, layers, 0] = 0.0
    ends[0, layers, 0] = -np.inf
    low[0, layers] = 0
    high[0, layers] = 0
    for k in range(1, levels + 1):
        for a in range(layers - 1, -1, -1):
            row_s, row_e = sums[k, a], ends[k, a]
            bottom, top = total + 1, -1
            for i in range(begin[a], begin[a + 1]):
                if steady_s[i] > steady_most_s or allowed[i] < flight[k]:
                    continue
                b, n, add, last, fill = to[i], units[i], add_s[i], last_s[i], fill_s[i]
                for step in range(2 if open_end and k == levels else 1):
                    source = k - 1 + step
                    start, stop = low[source, b], min(high[source, b], total - n)
                    if start > stop:
                        continue
                    if top < 0:
                        row_s[:] = np.inf
                        row_e[:] = np.inf
                    bottom, top = min(bottom, start + n), max(top, stop + n)
                    from_s, from_e = sums[source, b], ends[source, b]
                    for d in range(start, stop + 1):
                        row_s[d + n] = min(row_s[d + n], from_s[d] + add)
                        row_e[d + n] = min(row_e[d + n], max(from_s[d] + last, from_e[d] + fill))
            first, final = total + 1, -1
            for d in range(bottom, top + 1):
                if row_s[d] + prefix_s[a, total - d] < room_s and row_e[d] + prefix_fill_s[a, total - d] < room_s:
                    first, final = min(first, d), d
                else:
                    row_s[d] = np.inf
                    row_e[d] = np.inf
            low[k, a], high[k, a] = first, final


@njit(cache=True, nogil=True)
def follow(
    moves: Moves,
    flight: np.ndarray,
    open_end: bool,
    steady_most_s: float,
    sums: np.ndarray,
    ends: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
    level: int,
    turn: bool,
    path: np.ndarray,
) -> int:
    """Writes the moves behind the best end of a level into path, front to back; returns how many.

    turn: once a stage's own update is what ends last, follow the least sum from there on.
    """
    begin, to, units, add_s, last_s, fill_s, steady_s, allowed = moves
    layers, d = sums.shape[1] - 1, sums.shape[2] - 1
    levels = sums.shape[0] - 1
    a, k, count = 0, level, 0
    by_sum = False
    while a < layers:
        best, chosen, chosen_level = np.inf, -1, -1
        for i in range(begin[a], begin[a + 1]):
            if steady_s[i] > steady_most_s or allowed[i] < flight[k]:
                continue
            rest = d - units[i]
            for step in range(2 if open_end and k == levels else 1):
                source, b = k - 1 + step, to[i]
                if rest < low[source, b] or rest > high[source, b]:
                    continue
                value = sums[source, b, rest] + add_s[i]
                if not by_sum:
                    value = max(sums[source, b, rest] + last_s[i], ends[source, b, rest] + fill_s[i])
                if value < best:
                    best, chosen, chosen_level = value, i, source
        if chosen < 0:
            return 0
        path[count] = chosen
        count += 1
        d -= units[chosen]
        k, a = chosen_level, to[chosen]
        if turn and sums[k, a, d] + last_s[chosen] >= ends[k, a, d] + fill_s[chosen]:
            by_sum = True
    return count


@njit(cache=True, nogil=True, fastmath=FLAGS)
def prefixes(moves: Moves, first_s: np.ndarray, other_s: np.ndarray, prefix_s: np.ndarray) -> None:
    """Fills prefix_s[b, d]: the least sum over the layers before b on d units, first_s of stage 0, else other_s."""
    begin, to, units = moves[:3]
    layers, total = prefix_s.shape[0] - 1, prefix_s.shape[1] - 1
    prefix_s[:, :] = np.inf
    prefix_s[0, 0] = 0.0
    for a in range(layers):
        for i in range(begin[a], begin[a + 1]):
            b, n = to[i], units[i]
            cost = first_s[i] if a == 0 else other_s[i]
            source, target = prefix_s[a], prefix_s[b]
            for d in range(total - n + 1):
                target[d + n] = min(target[d + n], source[d] + cost)


@njit(cache=True, nogil=True)
def labels(
    moves: Moves,
    flight: np.ndarray,
    open_end: bool,
    steady_most_s: float,
    prefix_s: np.ndarray,
    prefix_fill_s: np.ndarray,
    prefix_hidden_s: np.ndarray,
    room_s: float,
    low: np.ndarray,
    high: np.ndarray,
    head: np.ndarray,
    pool: np.ndarray,
    link: np.ndarray,
) -> int:
    """As `suffixes`, keeping every pair (sum, end) of a state that no other is as good as.

    Returns how many, or -1 when pool is full.

    prefix_hidden_s: the least drain of what comes before a state and update of its stage 0. low, high: as `suffixes`
    left them for the same arguments. head: (levels + 1, layers + 1, units + 1) first label of a state. pool: (labels,
    2) sum, end. link: (labels, 3) next label of the state, the move taken, the label of what comes behind.
    """
    begin, to, units, add_s, last_s, fill_s, steady_s, allowed = moves
    levels, layers, total = head.shape[0] - 1, head.shape[1] - 1, head.shape[2] - 1
    head[:, :, :] = -1
    pool[0, 0], pool[0, 1] = 0.0, -np.inf
    link[0, 0], link[0, 1], link[0, 2] = -1, -1, -1
    head[0, layers, 0] = 0
    count = 1
    for k in range(1, levels + 1):
        for a in range(layers - 1, -1, -1):
            for i in range(begin[a], begin[a + 1]):
                if steady_s[i] > steady_most_s or allowed[i] < flight[k]:
                    continue
                for step in range(2 if open_end and k == levels else 1):
                    source, b = k - 1 + step, to[i]
                    first, last = low[source, b], min(high[source, b], total - units[i])
                    for d in range(first, last + 1):
                        old = head[source, b, d]
                        while old >= 0:
                            used = d + units[i]
                            value = pool[old, 0] + add_s[i]
                            end = max(pool[old, 0] + last_s[i], pool[old, 1] + fill_s[i])
                            behind = old
                            old = link[old, 0]
                            if not (
                                value + prefix_s[a, total - used] < room_s
                                and end + prefix_fill_s[a, total - used] < room_s
                            ):
                                continue
                            # Whatever comes before, its own update ends no earlier than this would have: ends below it
                            # are as good as it, which leaves few pairs.
                            end = max(end, value + prefix_hidden_s[a, total - used])
                            beaten = False
                            other = head[k, a, used]
                            while other >= 0 and not beaten:
                                beaten = pool[other, 0] <= value and pool[other, 1] <= end
                                other = link[other, 0]
                            if beaten:
                                continue
                            if count == len(pool):
                                return -1
                            pool[count, 0], pool[count, 1] = value, end
                            link[count, 0], link[count, 1], link[count, 2] = head[k, a, used], i, behind
                            head[k, a, used] = count
                            count += 1
    return count


@njit(cache=True, nogil=True)
def undominated(
    first: np.ndarray,
    to: np.ndarray,
    kind: np.ndarray,
    fill_s: np.ndarray,
    add_s: np.ndarray,
    last_s: np.ndarray,
    steady_s: np.ndarray,
    allowed: np.ndarray,
) -> np.ndarray:
    """Whether to keep each move: sorted by layers, kind and add_s, another of the same is not as good throughout."""
    kept = np.ones(len(first), dtype=np.bool_)
    start = 0
    for i in range(len(first)):
        if first[i] != first[start] or to[i] != to[start] or kind[i] != kind[start]:
            start = i
        for j in range(start, i):
            if (
                kept[j]
                and add_s[j] <= add_s[i]
                and fill_s[j] <= fill_s[i]
                and last_s[j] <= last_s[i]
                and steady_s[j] <= steady_s[i]
                and allowed[j] >= allowed[i]
            ):
                kept[i] = False
                break
    return kept
