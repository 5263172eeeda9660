"""Labels of forward operations: those of one label belong to one layer, those without a label lie between layers.

By the model's modules, else by the repetition of its matrix products, else by a clustering as Alpa's (Zheng et al.,
OSDI 2022, section 5.2).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence

import numpy as np

from autopar.common.paths import is_scan_part
from autopar.ir.graph import Op

_NUMBERED = re.compile(r"^(.*?)(\d+(?::\d+)?)(\D*)$")  # `layer3`, `layers[4:8]`

CLUSTERS = 16  # layers of a model without modules and repetition; Alpa's experiments use 8 to 16 a model
SLACK = 0.5  # how far the arithmetic of a cluster may exceed the mean (Alpa's delta)
COVERED = 0.5  # the share of the arithmetic that modules or repetition must explain to be trusted


def module_labels(
    ops: Sequence[Op], work: Sequence[float], products: Sequence[int], portable: frozenset[int]
) -> list[str] | None:
    """The path up to the outermost numbered part that is repeated; None where modules explain too little.

    A part of a scan over layers is a layer of its own, whatever numbers the modules around the scan have.
    """
    paths = [op.module.split("/") if op.module and op.id not in portable else [] for op in ops]
    numbers: dict[tuple[str, ...], set[str]] = {}
    for path in paths:
        for depth, part in enumerate(path):
            if match := _NUMBERED.match(part):
                template = (*path[:depth], f"{match[1]}#{match[3]}")
                numbers.setdefault(template, set()).add(match[2])
    labels = []
    for path in paths:
        label = ""
        in_scan = any(map(is_scan_part, path))
        for depth, part in enumerate(path):
            match = _NUMBERED.match(part) if not in_scan or is_scan_part(part) else None
            if match and (in_scan or len(numbers[*path[:depth], f"{match[1]}#{match[3]}"]) > 1):
                label = "/".join(path[: depth + 1])
                break
        labels.append(label)
    return labels if _explains(labels, work, products) else None


def _explains(labels: Sequence[str], work: Sequence[float], products: Sequence[int]) -> bool:
    """Whether there are several labels, on most of the arithmetic or, beside a large head, of the products."""
    covered = sum(w for label, w in zip(labels, work, strict=True) if label)
    of_products = sum(bool(labels[i]) for i in products)
    most = covered >= COVERED * sum(work) or of_products > COVERED * len(products)
    return len({*labels} - {""}) > 1 and most


def repetition_labels(
    ops: Sequence[Op], work: Sequence[float], products: Sequence[int], crossing: Sequence[int]
) -> list[str] | None:
    """Numbers the repetitions of a sequence of matrix products; None where there is none that explains the work."""
    number: dict[str, int] = {}
    keys = np.array([number.setdefault(ops[i].key or ops[i].primitive, len(number)) for i in products])
    covered, start, period = 0, 0, 1
    for candidate in range(1, len(products) // 2 + 1):
        first, length = _longest_run(keys[candidate:] == keys[:-candidate])
        # A longer period must cover clearly more: two layers at a time repeat as well as one.
        if length >= candidate and length + candidate > 1.2 * covered:
            covered, start, period = length + candidate, first, candidate
    if not covered:
        return None
    gaps = [min(crossing[a + 1 : b + 1]) for a, b in itertools.pairwise(products)]

    def mean_cut_bytes(shift: int) -> float:
        """Of the cuts between whole repetitions, the first of which begins `shift` products late."""
        times = (covered - shift) // period
        cuts = [gaps[start + shift + k * period - 1] for k in range(1, times)]
        return sum(cuts) / len(cuts) if cuts else math.inf

    shift = min(range(period), key=lambda s: (mean_cut_bytes(s), s))
    labels = [""] * len(ops)
    for k in range((covered - shift) // period * period):
        labels[products[start + shift + k]] = f"#{k // period}"
    # What stands between the products of one layer is the layer's too.
    filled = list(labels)
    inside = [i for i, label in enumerate(labels) if label]
    for a, b in itertools.pairwise(inside):
        filled[a:b] = [labels[a]] * (b - a)
    return labels if _explains(filled, work, products) else None


def _longest_run(equal: np.ndarray) -> tuple[int, int]:
    """(start, length) of the longest run of true entries, the first of its length."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], equal.astype(np.int8), [0]))))
    starts, ends = edges[::2], edges[1::2]
    if not len(starts):
        return 0, 0
    best = int(np.argmax(ends - starts))
    return int(starts[best]), int(ends[best] - starts[best])


def cluster_labels(
    work: Sequence[float], products: Sequence[int], crossing: Sequence[int], max_clusters: int
) -> list[str]:
    """Clusters of the matrix products: the fewest bytes over the cuts with about equal arithmetic in each.

    least[k][i]: bytes over the cuts when the first i products make k clusters; the sum of squared arithmetic breaks
    ties. The bound on a cluster's arithmetic is widened until there is a clustering.
    """
    labels = [""] * len(work)
    if not products:
        return labels
    # A product's arithmetic includes what follows it up to the next.
    share = [sum(work[a:b]) for a, b in itertools.pairwise([0, *products[1:], len(work)])]
    # Every cluster has arithmetic: the products of an empty batch have none.
    clusters = min(CLUSTERS, max(1, max_clusters), sum(s > 0 for s in share))
    if clusters == 0:
        return labels
    before = np.concatenate(([0.0], np.cumsum(share)))
    gaps = np.array([0, *(min(crossing[a + 1 : b + 1]) for a, b in itertools.pairwise(products))], dtype=float)
    bound = (1 + SLACK) * before[-1] / clusters
    while True:
        ends = _least_cuts(before, gaps, clusters, bound)
        if ends is not None:
            break
        bound *= 1 + SLACK
    for k, (a, b) in enumerate(itertools.pairwise([0, *ends])):
        for i in products[a:b]:
            labels[i] = f"#{k}"
    return labels


def _least_cuts(before: np.ndarray, gaps: np.ndarray, clusters: int, bound: float) -> list[int] | None:
    n = len(gaps)
    arithmetic = before[None, :] - before[:-1, None]  # [a, b]: of products a to b - 1
    allowed = (arithmetic > 0) & (arithmetic <= bound)
    balance = (arithmetic / before[-1]) ** 2 if before[-1] else np.zeros_like(arithmetic)
    # One byte outweighs all balance, which is at most 1 in sum.
    step = np.where(allowed, 2.0 * gaps[:, None] + balance, np.inf)
    least = np.full(n + 1, np.inf)
    least[0] = 0.0
    origins = []
    for _ in range(clusters):
        total = least[:-1, None] + step
        origins.append(np.argmin(total, axis=0))
        least = np.min(total, axis=0)
    if not np.isfinite(least[n]):
        return None
    ends = [n]
    for origin in reversed(origins):
        ends.append(int(origin[ends[-1]]))
    return ends[-2::-1]
