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
from collections.abc import Iterable, Mapping, Sequence

from scipy.cluster.hierarchy import DisjointSet

from autopar.attention.form import ELEMENTWISE
from autopar.attention.score_orders import NO_ORDERS, Orders, orders_of
from autopar.common.records import replaced
from autopar.ir.graph import Atom, Block, Op, OpGraph, OpKind, OrderCost, Value, read_by
from autopar.ir.rewrite import makers

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
        ops.append(replaced(op, blocks=tuple(bodies)) if bodies else op)
    block = dataclasses.replace(block, ops=tuple(ops))
    found, joined = _found(block, values, scores)
    if not found:
        return block, ()
    between = [op for op in block.ops if _is_fused(op) and not found.isdisjoint((*op.outputs, *_read(op)))]
    orders = orders_of(between, block, values, found, joined)
    moved = _moved(block, values, found, constants, NO_ORDERS)
    in_order = _moved(block, values, found, constants, orders)
    costs = dict(orders.costs)
    for op in between:
        cost = costs.get(op.id, OrderCost())
        more_bytes = in_order[op.id] - moved[op.id] + cost.beside_itemsize * values[op.outputs[0]].size
        if more_bytes:
            costs[op.id] = dataclasses.replace(cost, more_bytes=more_bytes)
    marked = (replaced(op, kernel_bytes=moved.get(op.id, op.kernel_bytes), order_cost=costs.get(op.id)) for op in ops)
    block = dataclasses.replace(block, ops=tuple(marked))
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
    for op in block.ops:
        for v in op.outputs:
            joined.add(v)
        if _is_fused(op):
            for v in op.outputs:
                for a in op.inputs:
                    if isinstance(a, int) and values[a].size == values[v].size > 1:
                        joined.add(a)
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
