"""Lower bounds by tree-reweighted message passing over edges. Compiled.

Sequential tree-reweighted message passing (Kolmogorov, TPAMI 2006) on node costs `theta`. `graph`: the arrays of
`problem.Flat`, with theta for its cost, and where messages lie: messages[head[e] + s] into the source of edge e,
messages[tail[e] + t] into its target.
"""

from __future__ import annotations

import numpy as np
from numba import njit

Graph = tuple[np.ndarray, ...]
FLAGS = {"nnan", "nsz", "arcp", "contract"}  # reorder freely, but infinities are kept: they mean "not allowed"


@njit(cache=True, nogil=True, fastmath=FLAGS)
def sweep(graph: Graph, messages: np.ndarray, forward: bool, work: np.ndarray) -> None:
    """One pass over the nodes in order (or back), sending messages to the nodes after (before); order = node number."""
    first, theta, source, target, start, matrix, near_first, near, head, tail = graph
    n = len(first) - 1
    for k in range(n):
        i = k if forward else n - 1 - k
        a, size = first[i], first[i + 1] - first[i]
        ahead = behind = 0
        for s in range(size):
            work[s] = theta[a + s]
        for q in range(near_first[i], near_first[i + 1]):
            e = near[q]
            if source[e] == i:
                other, base = target[e], head[e]
            else:
                other, base = source[e], tail[e]
            if (other > i) == forward:
                ahead += 1
            else:
                behind += 1
            for s in range(size):
                work[s] += messages[base + s]
        if ahead == 0:
            continue
        share = 1.0 / max(ahead, behind)
        for q in range(near_first[i], near_first[i + 1]):
            e = near[q]
            at = start[e]
            if source[e] == i:
                j = target[e]
                if (j > i) != forward:
                    continue
                own, out, count = head[e], tail[e], first[j + 1] - first[j]
                for t in range(count):
                    messages[out + t] = np.inf
                for s in range(size):
                    h = share * work[s] - messages[own + s]
                    row = at + s * count
                    for t in range(count):
                        messages[out + t] = min(messages[out + t], h + matrix[row + t])
            else:
                j = source[e]
                if (j > i) != forward:
                    continue
                own, out, count = tail[e], head[e], first[j + 1] - first[j]
                for s in range(size):
                    work[size + s] = share * work[s] - messages[own + s]
                for t in range(count):
                    row = at + t * size
                    low = np.inf
                    for s in range(size):
                        low = min(low, work[size + s] + matrix[row + s])
                    messages[out + t] = low
            low = np.inf
            for t in range(count):
                low = min(low, messages[out + t])
            for t in range(count):
                messages[out + t] -= low


@njit(cache=True, nogil=True, fastmath=FLAGS)
def bound(graph: Graph, messages: np.ndarray, extra: np.ndarray) -> float:
    """The bound that the messages prove.

    extra: (strategies,) filled with how much the bound would rise at least, were the strategy chosen: each part of the
    bound that has the node is minimised anew with its strategy held.
    """
    first, theta, source, target, start, matrix, near_first, near, head, tail = graph
    n = len(first) - 1
    belief = np.zeros(first[n])  # theta plus the messages
    share = np.zeros(n)
    widest = 0
    total = 0.0
    for i in range(n):
        a, size = first[i], first[i + 1] - first[i]
        widest = max(widest, size)
        ahead = behind = 0
        for s in range(size):
            belief[a + s] = theta[a + s]
        for q in range(near_first[i], near_first[i + 1]):
            e = near[q]
            base = head[e] if source[e] == i else tail[e]
            other = target[e] if source[e] == i else source[e]
            if other > i:
                ahead += 1
            else:
                behind += 1
            for s in range(size):
                belief[a + s] += messages[base + s]
        if ahead > 0:
            share[i] = 1.0 / max(ahead, behind)
        left = 1.0 - ahead * share[i]
        low = np.inf
        for s in range(size):
            low = min(low, belief[a + s])
        if left > 1e-12:
            total += left * low
        for s in range(size):
            extra[a + s] = max(0.0, left) * (belief[a + s] - low)
    column = np.zeros(widest)
    line = np.zeros(widest)
    for e in range(len(source)):
        i, j = source[e], target[e]
        a, b = first[i], first[j]
        rows, columns = first[i + 1] - a, first[j + 1] - b
        wi = share[i] if i < j else 0.0
        wj = share[j] if j < i else 0.0
        for t in range(columns):
            column[t] = np.inf
        low = np.inf
        for s in range(rows):
            h = wi * belief[a + s] - messages[head[e] + s]
            row = start[e] + s * columns
            least = np.inf
            for t in range(columns):
                value = matrix[row + t] - messages[tail[e] + t] + wj * belief[b + t]
                least = min(least, value)
                column[t] = min(column[t], h + value)
            line[s] = h + least
            low = min(low, h + least)
        total += low
        for s in range(rows):
            extra[a + s] += line[s] - low
        for t in range(columns):
            extra[b + t] += column[t] - low
    return total


@njit(cache=True, nogil=True, fastmath=FLAGS)
def decode(graph: Graph, messages: np.ndarray, forward: bool, work: np.ndarray, choice: np.ndarray) -> None:
    """Choose node after node (or back): settled neighbours count by their edge, the others by their messages; choice
    is filled.

    Read after a sweep the other way. Kolmogorov 2006, section 4.
    """
    first, theta, source, target, start, matrix, near_first, near, head, tail = graph
    n = len(first) - 1
    for k in range(n):
        i = k if forward else n - 1 - k
        a, size = first[i], first[i + 1] - first[i]
        for s in range(size):
            work[s] = theta[a + s]
        for q in range(near_first[i], near_first[i + 1]):
            e = near[q]
            j = target[e] if source[e] == i else source[e]
            if (j > i) == forward:
                base = head[e] if source[e] == i else tail[e]
                for s in range(size):
                    work[s] += messages[base + s]
            elif source[e] == i:
                step = first[j + 1] - first[j]
                for s in range(size):
                    work[s] += matrix[start[e] + s * step + choice[j]]
            else:
                row = start[e] + choice[j] * size
                for s in range(size):
                    work[s] += matrix[row + s]
        best = 0
        for s in range(size):
            if work[s] < work[best]:
                best = s
        choice[i] = best
