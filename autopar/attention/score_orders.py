"""In which order of dimensions scores of attention lie in memory, and which products make theirs in another.

In programs of XLA's GPU compiler a product writes (batch, rows, columns), and what is computed element by element of
its result lies as the result does. Of grouped heads one product makes (keys, queries, group), and another, of the
gradients of the weights, (group, queries, keys). The latter is written anew in the order of the former and in the type
in which the two meet, which is float32 in a softmax (seen as well where one makes (keys, queries) and the other
(queries, keys)). Weights are read rows first or columns first, but not with their rows in another order: such weights
the kernel of the gradients of scores writes anew beside these. Where both orders end with the same dimension no copy is
needed: kernels of rows read them as they lie.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from scipy.cluster.hierarchy import DisjointSet

from autopar.ir.graph import Block, Op, OrderCost, Value, read_by

# Order of the dimensions of a value that are larger than one, by numbers that stand for them.
_Order = tuple[int, ...]

# XLA's kernel for transposes moves tiles where the last dimension before and after has at least so many elements
# (kMinDimensionToTransposeTiled of its `ir_emission_utils`).
_LEAST_OF_TILES = 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """`costs` by operation; `columns`: reductions that do not run over the dimension that lies last in memory."""

    costs: Mapping[int, OrderCost]
    columns: frozenset[int]


NO_ORDERS = Orders(costs={}, columns=frozenset())


def orders_of(
    ops: Sequence[Op], block: Block, values: Sequence[Value], found: Collection[int], joined: DisjointSet
) -> Orders:
    """Of the scores `found` in a block, those of one attention `joined`; `ops` are its elementwise ones."""
    scores: dict[object, int] = {}  # the product that decides on the order
    products: list[Op] = []
    for op in block.ops:
        if op.primitive == "dot_general" and op.outputs[0] in found:
            scores.setdefault(joined[op.outputs[0]], op.outputs[0])
            products.append(op)
    order = {v: tuple(range(sum(n > 1 for n in values[v].shape))) for v in scores.values()}
    _spread(order, ops, values)
    costs: dict[int, OrderCost] = {}
    for op in products:
        (made,) = op.outputs
        first = scores[joined[made]]
        if made not in order or made == first:
            continue
        wanted = order[first]
        if wanted[-1:] != order[made][-1:]:
            last = min(_width(lying[-1], first, values) for lying in (wanted, order[made]))
            meeting = _where_it_meets(made, ops, block)
            costs[op.id] = OrderCost(copied_itemsize=values[meeting].itemsize, in_tiles=last >= _LEAST_OF_TILES)
            together = {v for v in found if joined[v] == joined[made]}
            costs |= _weights_beside(op, ops, block, values, {v: order[v] for v in together if v in order}, wanted)
    columns = {
        op.id
        for op in ops
        if "axes" in op.eqn.params
        and isinstance(op.inputs[0], int)
        and op.inputs[0] in order
        and op.inputs[0] in found
        and not _runs_over_last(op, order[op.inputs[0]], values)
    }
    return Orders(costs=costs, columns=frozenset(columns))


def _wide(shape: Sequence[int]) -> list[int]:
    return [d for d, n in enumerate(shape) if n > 1]


def _width(number: int, first: int, values: Sequence[Value]) -> int:
    """The size of the dimension that a number stands for: the scores' own are numbered as they lie."""
    shape = values[first].shape
    return shape[_wide(shape)[number]]


def _runs_over_last(op: Op, order: _Order, values: Sequence[Value]) -> bool:
    shape = values[op.inputs[0]].shape if isinstance(op.inputs[0], int) else ()
    axes = [order[_wide(shape).index(d)] for d in op.eqn.params["axes"] if shape[d] > 1]
    return len(order) - 1 in axes or not axes


def _is_readable(op: Op, operand: int, order: _Order, wanted: _Order, values: Sequence[Value]) -> bool:
    """Whether a product can read an operand, whose dimensions have an order, as it lies: with what is summed before the
    rest, or behind it.
    """
    summed, batch = (sides[operand] for sides in op.eqn.params["dimension_numbers"])
    shape = op.eqn.invars[operand].aval.shape
    by_dimension = dict(zip(_wide(shape), order, strict=True))
    rest = [d for d in range(len(shape)) if d not in (*summed, *batch)]
    head, inner, outer = (tuple(by_dimension[d] for d in dims if d in by_dimension) for dims in (batch, summed, rest))
    return wanted in (head + inner + outer, head + outer + inner)


def _spread(order: dict[int, _Order], ops: Sequence[Op], values: Sequence[Value]) -> None:
    """Gives an order to what elementwise operations, from either end, join to values that have one."""
    known = 0
    while known != len(order):
        known = len(order)
        for sequence in (ops, ops[::-1]):
            for op in sequence:
                _along(op, order, values)


def _along(op: Op, order: dict[int, _Order], values: Sequence[Value]) -> None:
    (out,) = op.outputs
    same = [a for a in op.inputs if isinstance(a, int) and values[a].size == values[out].size]
    permutation: Sequence[int] = range(len(_wide(values[out].shape)))
    if op.primitive == "transpose":
        wide = _wide(values[same[0]].shape) if same else []
        permutation = [wide.index(d) for d in op.eqn.params["permutation"] if d in wide]
    for a in same:
        sizes = [n for n in values[a].shape if n > 1]
        if len(sizes) != len(permutation) or _moved(sizes, permutation) != [n for n in values[out].shape if n > 1]:
            continue  # dimensions are joined or split
        if a in order and out not in order:
            order[out] = tuple(_moved(order[a], permutation))
        elif out in order and a not in order:
            places = sorted(range(len(permutation)), key=permutation.__getitem__)
            order[a] = tuple(order[out][i] for i in places)


def _moved(sizes: Sequence[int], permutation: Sequence[int]) -> list[int]:
    return [sizes[i] for i in permutation]


def _weights_beside(
    gradients: Op,
    ops: Sequence[Op],
    block: Block,
    values: Sequence[Value],
    order: Mapping[int, _Order],
    wanted: _Order,
) -> dict[int, OrderCost]:
    """The operation that ends the gradients of scores, whose kernel writes weights too, and the products that read
    those: such as cannot read them as they lie. `order` has the scores of one attention.
    """
    of_gradients = set(gradients.outputs)
    ending: dict[int, Op] = {}
    for op in ops:
        if op.outputs[0] in order and not of_gradients.isdisjoint(read_by(op)):
            of_gradients.update(op.outputs)
            ending[op.outputs[0]] = op
    behind = block.ops[block.ops.index(gradients) + 1 :]
    reading = [(op, v) for op in behind if op.primitive == "dot_general" for v in read_by(op) if v in order]
    weights = [
        (op, v)
        for op, v in reading
        if v not in of_gradients and not _is_readable(op, op.inputs.index(v), order[v], wanted, values)
    ]
    ends = [ending[v].id for _, v in reading if v in ending]
    if not weights or not ends:
        return {}
    costs = {op.id: OrderCost(rewritten_operand=op.inputs.index(v)) for op, v in weights}
    return costs | {ends[0]: OrderCost(beside_itemsize=values[weights[0][1]].itemsize)}


def _where_it_meets(made: int, ops: Sequence[Op], block: Block) -> int:
    """The value, computed of this one alone, that other values or several readers meet."""
    readers = Counter(a for op in block.ops for a in {a for a in op.inputs if isinstance(a, int)})
    reading = {a: op for op in ops for a in op.inputs if isinstance(a, int)}
    handed_on = {a for a in block.outputs if isinstance(a, int)}
    value = made
    while readers[value] == 1 and value not in handed_on and value in reading:
        op = reading[value]
        if "axes" in op.eqn.params or sum(isinstance(a, int) for a in op.inputs) > 1:
            break
        (value,) = op.outputs
    return value
