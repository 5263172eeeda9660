"""Layers: groups of neighbouring forward operations that a pipeline never separates.

Layers follow the model's modules where it numbers them (`GPT/layer0`, `h/3`), else the repetition of its matrix
products, else a clustering as Alpa's (Zheng et al., OSDI 2022, section 5.2): about equal arithmetic, few bytes between.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from autopar.common.paths import is_scan_part
from autopar.frontend.recompute_in_scans import is_product
from autopar.ir.graph import Op, OpGraph, OpKind, Section, read_by, walk
from autopar.ir.primitives import MATRIX_PRODUCTS
from autopar.ir.rewrite import CanonicalForm
from autopar.ops.kernels.local import runs_locally

# Labels of forward operations: those of one label belong to one layer, those without a label lie between layers.
#
# By the model's modules, else by the repetition of its matrix products, else by a clustering as Alpa's (Zheng et al.,
# OSDI 2022, section 5.2).

_NUMBERED = re.compile(r"^(.*?)(\d+(?::\d+)?)(\D*)$")  # `layer3`, `layers[4:8]`

CLUSTERS = 16  # layers of a model without modules and repetition; Alpa's experiments use 8 to 16 a model
SLACK = 0.5  # how far the arithmetic of a cluster may exceed the mean (Alpa's delta)


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
    most = 2 * covered >= sum(work) or 2 * of_products > len(products)
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


# Work that a stage would rather receive than do once more. Everything else streams through its operands.
_COSTLY = MATRIX_PRODUCTS | {
    "sort", "top_k", "fft", "cholesky", "triangular_solve", "lu", "qr", "eigh", "svd", "random_bits", "threefry2x32",
    "scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max",
}  # fmt: skip
_AT_THE_LOOP = frozenset({OpKind.SPLIT, OpKind.ACCUMULATE, OpKind.STACK, OpKind.SEND})

MAX_LAYERS = 160  # of a model with 128 blocks each is one, beside embedding and loss; beyond it neighbours are joined
HEAVY = 0.1  # of the mean layer's arithmetic or parameters: from here on a group of operations stands alone


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """Contiguous groups of the forward section's operations, in program order.

    `ops[l]` are operation ids; `flops[l]` of one micro-batch, forward only; `kind_of[l]` is equal for layers of equal
    structure; `crossing_bytes[l]` are made in layers up to l and read behind it (the last is 0), without what each
    stage can make for itself (`portable_ops`).
    """

    ops: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]
    flops: tuple[float, ...]
    kind_of: tuple[int, ...]
    crossing_bytes: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.ops)


def find_layers(graph: OpGraph, flops: Callable[[Op], float], max_layers: int = MAX_LAYERS) -> Layers:
    """The layers of a step cut into sections. `flops(op)` is the arithmetic of one run of an equation."""
    ops = layer_ops(graph)
    if not ops:
        # Everything is done once for the whole batch, before or after the micro-batches: one layer, for one stage.
        return Layers(ops=((),), names=("",), flops=(0.0,), kind_of=(0,), crossing_bytes=(0,))
    work = [_flops(op, flops) for op in ops]
    portable = portable_ops(graph)
    crossing = _crossing(graph, ops, portable)
    parameters = _parameter_bytes(graph, ops)
    products = [i for i, op in enumerate(ops) if is_product(op)]
    labels = module_labels(ops, work, products, portable)
    if labels is None:
        labels = repetition_labels(ops, work, products, crossing)
    if labels is None:
        labels = cluster_labels(work, products, crossing, max_layers)
    labels = _with_edges(ops, labels, work, parameters, portable)
    starts = _cuts(labels, crossing)
    starts = _merge_small(starts, work, parameters, crossing, products)
    starts = starts[:: math.ceil(len(starts) / max_layers)]
    bounds = list(itertools.pairwise([*starts, len(ops)]))
    groups = tuple(tuple(op.id for op in ops[a:b]) for a, b in bounds)
    keys = [structure([op for op in ops[a:b] if op.id not in portable], graph) for a, b in bounds]
    number: dict[tuple, int] = {}
    return Layers(
        ops=groups,
        names=_names([{labels[i]: None for i in range(a, b) if labels[i]} for a, b in bounds]),
        flops=tuple(sum(work[a:b]) for a, b in bounds),
        kind_of=tuple(number.setdefault(key, len(number)) for key in keys),
        crossing_bytes=tuple(crossing[b] for _, b in bounds),
    )


def layer_ops(graph: OpGraph) -> list[Op]:
    """The forward section without the operations at the bounds of the loop over micro-batches."""
    return [op for op in graph.block.ops if op.section is Section.FORWARD and op.kind not in _AT_THE_LOOP]


def is_costly(op: Op) -> bool:
    """Whether an operation is too much work to do twice."""
    return op.primitive in _COSTLY or runs_locally(op.eqn)


def portable_ops(graph: OpGraph) -> frozenset[int]:
    """Ids of cheap operations that depend on the batch and on constants only: masks, positions, zeros.

    Every stage can run a copy of its own, which is cheaper than sending the result. SPLITs are portable too. Barriers
    count as the values in front of them.
    """
    state = set(graph.block.inputs[len(graph.constants) :])
    state -= {graph.block.inputs[i] for i in graph.batch}
    portable: set[int] = set()
    fixed = set(state)  # values that depend on state, or are too much work to make twice
    for op in graph.block.ops:
        bound = {v for v in read_by(op) if v in fixed}
        if op.kind is OpKind.BARRIER:
            fixed |= {out for a, out in zip(op.inputs, op.outputs, strict=True) if a in bound}
            continue
        cheap = op.kind in (OpKind.EQUATION, OpKind.SPLIT) and not is_costly(op)
        if cheap and (op.kind is OpKind.SPLIT or not bound):
            portable.add(op.id)
        if not cheap or bound:
            fixed |= set(op.outputs)
    return frozenset(portable)


def structure(ops: Sequence[Op], graph: OpGraph) -> tuple:
    """The key of a group of operations: equal for groups that compute the same on other values."""
    form = CanonicalForm(graph, lambda op: None)
    return tuple(map(form.op_key, ops))


def _flops(op: Op, flops: Callable[[Op], float]) -> float:
    if op.kind is OpKind.EQUATION:
        return flops(op)
    return sum(flops(o) * o.count / op.count for b in op.blocks for o in walk(b) if o.kind is OpKind.EQUATION)


def _crossing(graph: OpGraph, ops: Sequence[Op], portable: frozenset[int]) -> list[int]:
    """Bytes over the cut in front of each operation, and behind the last (0): made before it and read behind it."""
    position: dict[int, int] = {}
    last: dict[int, int] = {}
    for i, op in enumerate(ops):
        last |= {v: i for v in read_by(op) if v in position}
        if op.id not in portable:
            position |= dict.fromkeys(op.outputs, i)
    change = [0] * (len(ops) + 1)
    for v, end in last.items():
        change[position[v] + 1] += graph.values[v].nbytes
        change[end + 1] -= graph.values[v].nbytes
    return list(itertools.accumulate(change))


def _parameter_bytes(graph: OpGraph, ops: Sequence[Op]) -> list[int]:
    """Bytes of the state's arrays that each operation is the first to combine with examples, casts seen through; none
    in a step whose batch is not split.
    """
    if all(op.kind is not OpKind.SPLIT for op in graph.block.ops):
        return [0] * len(ops)
    behind: dict[int, set[int]] = {v: {v} for v in graph.block.inputs[len(graph.constants) :]}
    for i in graph.batch:
        behind.pop(graph.block.inputs[i], None)
    from_batch: set[int] = set()
    seen: set[int] = set()
    first: dict[int, int] = {}
    for op in graph.block.ops:
        operands = read_by(op)
        origins = [behind[v] for v in operands if v in behind]
        origin = origins[0] if len(origins) == 1 else set().union(*origins)
        if op.kind is OpKind.SPLIT or not from_batch.isdisjoint(operands):
            from_batch |= set(op.outputs)
            if origin:
                first[op.id] = sum(graph.values[v].nbytes for v in origin - seen)
                seen |= origin
        elif op.section in (Section.BEFORE, Section.FORWARD):
            behind.update(dict.fromkeys(op.outputs, origin))
    return [first.get(op.id, 0) for op in ops]


def _with_edges(
    ops: Sequence[Op],
    labels: Sequence[str],
    work: Sequence[float],
    parameters: Sequence[int],
    portable: frozenset[int],
) -> list[str]:
    """Labels heavy operations without a label: in front of the first layer, behind the last, between two.

    A matrix product inside of a layer's extent belongs to the layer.
    """
    layers = max(1, len({*labels} - {""}))
    heavy_work, heavy_bytes = HEAVY * sum(work) / layers, HEAVY * sum(parameters) / layers
    out = list(labels)
    labelled = [i for i, label in enumerate(labels) if label]
    for a, b in itertools.pairwise([-1, *labelled, len(ops)]):
        if a >= 0 and b < len(ops) and labels[a] == labels[b]:
            continue
        inside = [
            i
            for i in range(a + 1, b)
            if ops[i].id not in portable
            and (parameters[i] > heavy_bytes or (is_product(ops[i]) and work[i] > heavy_work))
        ]
        name = next((ops[i].module for i in inside if ops[i].module), "")
        # Numbered, so that two edges of one name stay two.
        for i in inside:
            out[i] = f"{name} #{a + 1}"
    return out


def _cuts(labels: Sequence[str], crossing: Sequence[int]) -> list[int]:
    """The first operation of each layer: between two labels, where the fewest bytes cross.

    Of equal places the one as far behind the label as at the cut before, so that equal layers end alike; else the last.
    """
    labelled = [i for i, label in enumerate(labels) if label]
    starts, distance = [0], 0
    for a, b in itertools.pairwise(labelled):
        if labels[a] != labels[b]:
            fewest = min(crossing[a + 1 : b + 1])
            places = [p for p in range(a + 1, b + 1) if crossing[p] == fewest]
            starts.append(a + distance if a + distance in places else places[-1])
            distance = starts[-1] - a
    return starts


def _merge_small(
    starts: list[int],
    work: Sequence[float],
    parameters: Sequence[int],
    crossing: Sequence[int],
    products: Sequence[int],
) -> list[int]:
    """Joins layers of little arithmetic and few parameters with the neighbour behind the cut that more bytes cross.

    The measure is the median of the layers with matrix products: one head of a large vocabulary does not make all
    others small.
    """
    starts = list(starts)
    bounds = list(itertools.pairwise([*starts, len(work)]))
    major = [(a, b) for a, b in bounds if any(a <= i < b for i in products)] or bounds
    heavy_work = HEAVY * statistics.median(sum(work[a:b]) for a, b in major)
    heavy_bytes = HEAVY * statistics.median(sum(parameters[a:b]) for a, b in major)
    index = 0
    while index < len(starts):
        a, b = starts[index], starts[index + 1] if index + 1 < len(starts) else len(work)
        small = sum(work[a:b]) <= heavy_work and sum(parameters[a:b]) <= heavy_bytes
        if not small or len(starts) == 1:
            index += 1
        elif index + 1 < len(starts) and (index == 0 or crossing[b] > crossing[a]):
            del starts[index + 1]
        else:
            del starts[index]
            index = max(index - 1, 0)
    return starts


def _names(labels: Sequence[Mapping[str, None]]) -> tuple[str, ...]:
    """A name for each layer from its labels, made unique."""
    names = [next(iter(label)).split("#")[0].strip() if label else "" for label in labels]
    names = [name or f"layer {i}" for i, name in enumerate(names)]
    seen = collections.Counter(names)
    return tuple(f"{name} ({i})" if seen[name] > 1 else name for i, name in enumerate(names))
