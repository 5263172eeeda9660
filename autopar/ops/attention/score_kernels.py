"""What XLA does with attention as it is written: which of its operations are kernels of their own, and what those move.

Read from programs that XLA compiles for H100 and TPU v5e. No compiler of XLA's keeps scores out of memory, but they are
not written for every operation on them. Forward, the product of queries and keys writes scores; one kernel reads them
for each row's largest and sum; another, for all of mask and softmax, reads them and writes weights. Backward, one
kernel reads scores and gradients of weights and writes gradients of scores. (On a TPU the weights are computed in the
products that read them, which then read scores, in 32 bits: as many bytes.)

Attention is found by its softmax between products: a product of many matrices, of whose result each row's largest is
taken and an exponential, element by element. So dropout, biases and weights that are handed out change nothing.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec.structs import replace
from scipy.cluster.hierarchy import DisjointSet

from autopar.ir.graph import Atom, Block, Op, OpGraph, OpKind, OrderCost, Value, read_by
from autopar.ir.rewrite import makers
from autopar.ops.attention.form import ELEMENTWISE

# In which order of dimensions scores of attention lie in memory, and which products make theirs in another.
#
# In programs of XLA's GPU compiler a product writes (batch, rows, columns), and what is computed element by element of
# its result lies as the result does. Of grouped heads one product makes (keys, queries, group), and another, of the
# gradients of the weights, (group, queries, keys). The latter is written anew in the order of the former and in the
# type in which the two meet, which is float32 in a softmax (seen as well where one makes (keys, queries) and the other
# (queries, keys)). Weights are read rows first or columns first, but not with their rows in another order: such weights
# the kernel of the gradients of scores writes anew beside these. Where both orders end with the same dimension no copy
# is needed: kernels of rows read them as they lie.


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
    readers = _Readers.of(ops, block)
    together: dict[object, list[int]] = {}  # values of one attention that have an order
    for v in found:
        if v in order:
            together.setdefault(joined[v], []).append(v)
    for op in products:
        (made,) = op.outputs
        first = scores[joined[made]]
        if made not in order or made == first:
            continue
        wanted = order[first]
        if wanted[-1:] != order[made][-1:]:
            last = min(_width(lying[-1], first, values) for lying in (wanted, order[made]))
            meeting = _where_it_meets(made, readers)
            costs[op.id] = OrderCost(copied_itemsize=values[meeting].itemsize, in_tiles=last >= _LEAST_OF_TILES)
            of_attention = {v: order[v] for v in together[joined[made]]}
            costs |= _weights_beside(op, ops, block, values, of_attention, wanted)
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
        if len(sizes) != len(permutation) or _moved_dims(sizes, permutation) != [n for n in values[out].shape if n > 1]:
            continue  # dimensions are joined or split
        if a in order and out not in order:
            order[out] = tuple(_moved_dims(order[a], permutation))
        elif out in order and a not in order:
            places = sorted(range(len(permutation)), key=permutation.__getitem__)
            order[a] = tuple(order[out][i] for i in places)


def _moved_dims(sizes: Sequence[int], permutation: Sequence[int]) -> list[int]:
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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Readers:
    """Of each value of a block how many operations read it, and the last elementwise one; and what leaves the block."""

    count: Mapping[int, int]
    elementwise: Mapping[int, Op]
    handed_on: frozenset[int]

    @staticmethod
    def of(ops: Sequence[Op], block: Block) -> _Readers:
        return _Readers(
            count=Counter(a for op in block.ops for a in {a for a in op.inputs if isinstance(a, int)}),
            elementwise={a: op for op in ops for a in op.inputs if isinstance(a, int)},
            handed_on=frozenset(a for a in block.outputs if isinstance(a, int)),
        )


def _where_it_meets(made: int, readers: _Readers) -> int:
    """The value, computed of this one alone, that other values or several readers meet."""
    value = made
    while readers.count[value] == 1 and value not in readers.handed_on and value in readers.elementwise:
        op = readers.elementwise[value]
        if "axes" in op.eqn.params or sum(isinstance(a, int) for a in op.inputs) > 1:
            break
        (value,) = op.outputs
    return value


_MOVES = frozenset({"transpose", "reshape", "broadcast_in_dim", "squeeze", "expand_dims", "copy"})
_REDUCTIONS = frozenset({"reduce_max", "reduce_sum", "reduce_min", "argmax"})
# Operations that XLA fuses into the kernel of what reads them.
_FUSED = (
    _MOVES
    | _REDUCTIONS
    | frozenset(ELEMENTWISE)
    | frozenset({
        "exp", "exp2", "log", "tanh", "logistic", "integer_pow", "pow", "sqrt", "rsqrt", "square", "is_finite",
        "convert_element_type", "reduce_precision", "stop_gradient", "iota", "xor", "shift_right_logical", "shift_left",
        "bitcast_convert_type", "clamp", "sign", "rem",
    })
)  # fmt: skip


# Operations behind which what a scan stacks up of scores is still that.
_SLICES = frozenset({"slice", "dynamic_slice", "concatenate", "squeeze", "reshape", "copy"})


def mark_score_kernels(graph: OpGraph) -> OpGraph:
    """The graph with `Op.kernel_bytes` and `Op.order_cost` of the operations of each attention."""
    block, _ = _marked(graph.block, graph.values, frozenset(), frozenset())
    return dataclasses.replace(graph, block=block)


def _marked(
    block: Block, values: Sequence[Value], scores: frozenset[int], constants: frozenset[int]
) -> tuple[Block, tuple[int, ...]]:
    """The block, and the positions of its outputs that are scores, or made of them element by element.

    Args:
        block: The step, or the body of a loop.
        values: Of the whole graph.
        scores: Inputs of the block that are scores.
        constants: Inputs of a loop's body that stay as they are: masks among them are computed where they are read.
    """
    ops: list[Op] = []
    stacks: set[int] = set()  # what scans stack up of scores
    for op in block.ops:
        bodies = []
        for body in op.blocks:
            fixed = op.num_consts + op.num_carry if op.kind is OpKind.SCAN else len(op.inputs)
            slices = zip(op.inputs[fixed:], body.inputs[fixed:], strict=False)
            given = frozenset(inner for outer, inner in slices if isinstance(outer, int) and outer in stacks)
            unchanged = frozenset(body.inputs[: op.num_consts]) if op.kind is OpKind.SCAN else frozenset()
            inner, made = _marked(body, values, given, unchanged)
            bodies.append(inner)
            stacks.update(op.outputs[i] for i in made if op.kind is OpKind.SCAN and i >= op.num_carry)
        if op.primitive in _SLICES and any(isinstance(a, int) and a in stacks for a in op.inputs):
            stacks.update(op.outputs)
        ops.append(replace(op, blocks=tuple(bodies)) if bodies else op)
    block = replace(block, ops=tuple(ops))
    found, joined = _found(block, values, scores)
    if not found:
        return block, ()
    between = [op for op in block.ops if _is_fused(op) and not found.isdisjoint((*op.outputs, *_read(op)))]
    orders = orders_of(between, block, values, found, joined)
    moved = _moved(block, values, found, constants, NO_ORDERS)
    in_order = _moved(block, values, found, constants, orders) if orders != NO_ORDERS else moved
    costs = dict(orders.costs)
    for op in between:
        cost = costs.get(op.id, OrderCost())
        more_bytes = in_order[op.id] - moved[op.id] + cost.beside_itemsize * values[op.outputs[0]].size
        if more_bytes:
            costs[op.id] = dataclasses.replace(cost, more_bytes=more_bytes)
    marked = (replace(op, kernel_bytes=moved.get(op.id, op.kernel_bytes), order_cost=costs.get(op.id)) for op in ops)
    block = replace(block, ops=tuple(marked))
    return block, tuple(i for i, atom in enumerate(block.outputs) if isinstance(atom, int) and atom in found)


def _read(op: Op) -> list[int]:
    return [a for a in op.inputs if isinstance(a, int)]


def _is_fused(op: Op) -> bool:
    return op.kind is OpKind.EQUATION and op.primitive in _FUSED


def _is_batched_product(op: Op) -> bool:
    return op.primitive == "dot_general" and bool(op.eqn.params["dimension_numbers"][1][0])


def _found(block: Block, values: Sequence[Value], scores: frozenset[int]) -> tuple[set[int], DisjointSet]:
    """The values that are computed element by element of scores, or meet them so; and which of them belong together."""
    joined: DisjointSet = DisjointSet(scores)
    for op in filter(_is_fused, block.ops):
        for v in op.outputs:
            size = values[v].size
            for a in op.inputs if size > 1 else ():
                if isinstance(a, int) and values[a].size == size:
                    joined.add(a)
                    joined.add(v)
                    joined.merge(a, v)

    def roots(atoms: Iterable[Atom]) -> set[int]:
        return {joined[a] for a in atoms if isinstance(a, int) and a in joined}

    products = roots(v for op in block.ops if _is_batched_product(op) for v in op.outputs)
    exponentials = roots(v for op in block.ops if op.primitive in ("exp", "exp2") for v in op.outputs)
    largest = roots(a for op in block.ops if op.primitive == "reduce_max" for a in op.inputs)
    of_scores = roots(scores) | (products & exponentials & largest)
    return {v for v in joined if joined[v] in of_scores}, joined


def _moved(
    block: Block, values: Sequence[Value], found: set[int], constants: frozenset[int], orders: Orders
) -> dict[int, float]:
    """Of each operation between products the bytes that its kernel moves: zero but for those that kernels end with.

    One kernel reads scores for each row's largest and sum; another makes what a product reads; what a loop hands on is
    written as well. Where rows do not lie one after the other, each reduction over them is a kernel.
    """
    made_by = makers(block.ops)
    left: set[int] = set()
    for op in block.ops:
        if not _is_fused(op):
            rewritten = orders.costs.get(op.id, OrderCost()).rewritten_operand
            elsewhere = None if rewritten is None else op.inputs[rewritten]
            left.update(_before_moves(v, made_by) for v in read_by(op) if v in found and v != elsewhere)
    handed_on = {a for a in block.outputs if isinstance(a, int) and a in found}

    def read_bytes(value: int) -> int:
        """Bytes that the kernel of a value reads: of what is no part of the kernel, as large as the value."""
        seen, stack, nbytes = {value}, [value], 0
        while stack:
            at = stack.pop()
            maker = made_by.get(at)
            if maker is None or not _is_fused(maker):
                copied = orders.costs.get(maker.id, OrderCost()).copied_itemsize if maker is not None else 0
                nbytes += 0 if at in constants else values[at].size * (copied or values[at].itemsize)
                continue
            for a in maker.inputs:
                if isinstance(a, int) and a not in seen and values[a].size == values[value].size:
                    seen.add(a)
                    stack.append(a)
        return nbytes

    moved: dict[int, float] = {}
    for op in block.ops:
        read = _read(op)
        if not _is_fused(op) or found.isdisjoint((*op.outputs, *read)):
            continue
        (out,) = op.outputs
        moved[op.id] = float(values[out].nbytes if out in left or out in handed_on else 0)
        if out in left:
            moved[op.id] += read_bytes(out)
        elif op.primitive == "reduce_max" or op.id in orders.columns:
            moved[op.id] += read_bytes(read[0])
    return moved


def _before_moves(value: int, made_by: Mapping[int, Op]) -> int:
    """The value that a value is with its dimensions elsewhere: products read it as it lies."""
    while (maker := made_by.get(value)) is not None and maker.primitive in _MOVES:
        (source,) = maker.inputs[:1]
        if not isinstance(source, int):
            break
        value = source
    return value
