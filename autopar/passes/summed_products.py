"""Gradients that micro-batches add up come out of their products in the type of the sum.

A product whose result is rounded to 16 bits, multiplied with a number (the scales of operands of 8 bits), laid out anew
and then added to a sum takes several passes over memory in each micro-batch. XLA's compilers for GPU and TPU add the
sum within the product where nothing stands between the two but one number and another shape: programs compiled for an
H100 (jaxlib 0.10.2) and a v5e slice (libtpu 0.0.42.1) have one kernel. So the product, and what is multiplied with one
number, keep the 32 bits of their sum, and the product's operands change places where its result was transposed.
"""

from __future__ import annotations

import collections
import dataclasses
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from msgspec.structs import replace

from autopar.common import jax_compat
from autopar.common.jax_compat import run_wide_products_on_cpus
from autopar.ir.graph import SUMMED_PRODUCT, Atom, Constant, Op, OpGraph, OpKind, free_values, scaled_by_one_number
from autopar.ir.rewrite import Fresh, makers, remove_dead, renumbered
from autopar.ir.rules import RuleBook, equation_key

_NARROW, _WIDE = ("bfloat16", "float16"), "float32"


def with_summed_products(graph: OpGraph, rules: RuleBook) -> OpGraph:
    """The graph of a step in micro-batches with such sums. Sums of other values stay as they are."""
    if graph.num_microbatches == 1:
        return graph
    made = makers(graph.block.ops)
    readers = collections.Counter(a for op in graph.block.ops for a in (*op.inputs, *_inside(op)) if isinstance(a, int))
    readers.update(a for a in graph.block.outputs if isinstance(a, int))
    fresh, equations = Fresh(graph), _Equations()
    instead: dict[int, list[Op]] = {}  # by the operation that they stand for
    sums: dict[int, Op] = {}
    for op in graph.block.ops:
        found = _Chain.of(op, graph, made, readers) if op.kind is OpKind.ACCUMULATE else None
        if found is None:
            continue
        new = found.in_type_of_sum(fresh, equations)
        for old, ops in new.items():
            instead.setdefault(old, []).extend(ops)
        *_, last = (made_now for ops in new.values() for made_now in ops)
        sums[op.id] = replace(op, inputs=last.outputs, primitive=SUMMED_PRODUCT)
    if not sums:
        return graph
    run_wide_products_on_cpus()
    rules.learn((op.key, op.eqn) for ops in instead.values() for op in ops)
    ops = []
    for op in graph.block.ops:
        ops += [replace(new, rule=rules.rule(new.key)) for new in instead.get(op.id, ())]
        ops.append(sums.get(op.id, op))
    block = remove_dead(replace(graph.block, ops=tuple(ops)))
    return renumbered(dataclasses.replace(graph, values=tuple(fresh.values), block=block))


def _inside(op: Op) -> set[int]:
    return {v for block in op.blocks for v in free_values(block)}


def _shape(variable: Any) -> tuple[int, ...]:
    return tuple(variable.aval.shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Chain:
    """What a sum adds up: a product, multiplied with numbers, and then rounded, transposed or of another shape; nobody
    else reads what is in between.

    `dtype`: that of the sum. `swaps`: the transposition is that of the product's operands. `behind`: the operations
    behind the product that multiply with a number or change the shape, in program order.
    """

    product: Op
    dtype: str
    swaps: bool
    behind: tuple[Op, ...]

    @classmethod
    def of(cls, op: Op, graph: OpGraph, made: Mapping[int, Op], readers: Mapping[int, int]) -> _Chain | None:
        order: tuple[int, ...] | None = None
        (at,) = op.inputs
        dtype = graph.values[op.outputs[0]].dtype
        behind: list[Op] = []
        while isinstance(at, int) and readers[at] == 1 and at in made and made[at].section.repeats:
            maker = made[at]
            if maker.kind is not OpKind.EQUATION:
                return None
            if maker.primitive == "dot_general":
                swaps = _swaps(maker.eqn, order)
                good = swaps is not None and _sums_as_wide(maker, graph.values[at].dtype, dtype)
                ordered = tuple(reversed(behind))
                return cls(product=maker, dtype=dtype, swaps=bool(swaps), behind=ordered) if good else None
            at = maker.inputs[0]
            if maker.primitive == "transpose" and not _changes_shape(behind):
                after = tuple(maker.eqn.params["permutation"])
                order = after if order is None else tuple(after[i] for i in order)
            elif maker.primitive == "reshape" and order is None and maker.eqn.params.get("dimensions") is None:
                behind.append(maker)
            elif (scaled := scaled_by_one_number(maker, graph.values)) is not None:
                at = scaled
                behind.append(maker)
            elif maker.primitive != "convert_element_type" or not _widens(maker):
                return None
        return None

    def in_type_of_sum(self, fresh: Fresh, equations: _Equations) -> dict[int, list[Op]]:
        """The product and what stands behind it with results of the sum's type, by the operations in whose places they
        run; their rules are not known yet.
        """
        op, params = self.product, self.product.eqn.params
        (contracted, batch), precision = params["dimension_numbers"], params["precision"]
        inputs, variables = op.inputs, op.eqn.invars
        if self.swaps:
            inputs, variables = inputs[::-1], variables[::-1]
            contracted, batch = contracted[::-1], batch[::-1]
            precision = precision[::-1] if isinstance(precision, tuple) else precision
        avals = [jax_compat.struct(_shape(v), str(v.aval.dtype)) for v in variables]
        eqn = equations.of(jax.lax.dot_general, avals, (contracted, batch), precision, jnp.dtype(self.dtype))
        found = {op.id: [_made_anew(op, eqn, inputs, fresh)]}
        at = found[op.id][0].outputs[0]
        for old in self.behind:
            found[old.id] = self._behind(old, at, fresh, equations)
            at = found[old.id][-1].outputs[0]
        return found

    def _behind(self, op: Op, at: int, fresh: Fresh, equations: _Equations) -> list[Op]:
        """An operation behind the product, of a value of the sum's type."""
        before = jax_compat.struct(fresh.values[at].shape, self.dtype)
        if op.primitive == "reshape":
            sizes = _shape(op.eqn.outvars[0])
            return [_made_anew(op, equations.of(jnp.reshape, [before], sizes), (at,), fresh)]
        (number,) = (a for a in op.inputs if not isinstance(a, int) or not fresh.values[a].shape)
        if isinstance(number, Constant):
            factor = float(number.literal.val)
            eqn = equations.of(operator.mul, [before], factor)
            return [_made_anew(op, eqn, (at, Constant(eqn.invars[1])), fresh)]
        ops = []
        if fresh.values[number].dtype != self.dtype:
            narrow = jax_compat.struct((), fresh.values[number].dtype)
            eqn = equations.of(jax.lax.convert_element_type, [narrow], self.dtype)
            ops.append(_made_anew(op, eqn, (number,), fresh))
            number = ops[0].outputs[0]
        eqn = equations.of(operator.mul, [before, jax_compat.struct((), self.dtype)])
        return [*ops, _made_anew(op, eqn, (at, number), fresh)]


def _made_anew(op: Op, eqn: Any, inputs: tuple[Atom, ...], fresh: Fresh) -> Op:
    """An operation of an equation, in the place of another one."""
    (result,) = (v.aval for v in eqn.outvars)
    output = fresh.value(result.shape, str(result.dtype), result.dtype.itemsize)
    return replace(
        op, eqn=eqn, primitive=eqn.primitive.name, inputs=inputs, outputs=(output,), key=equation_key(eqn), rule=None
    )


def _changes_shape(ops: Sequence[Op]) -> bool:
    return any(op.primitive == "reshape" for op in ops)


def _sums_as_wide(product: Op, of_result: str, of_sum: str) -> bool:
    """Whether a sum has the 32 bits in which products of narrow operands add up, or the 16 of all."""
    operands = {str(v.aval.dtype) for v in product.eqn.invars}
    narrow = all(of in _NARROW or of.startswith("float8") for of in operands)
    return narrow and of_result in _NARROW and of_sum in (_WIDE, of_result)


class _Equations:
    """The equations of functions on arrays of some shapes, each traced once: those of equal layers are the same."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Any] = {}

    def of(self, function: Callable[..., Any], avals: Sequence[Any], *how: Hashable) -> Any:
        """The one equation of a function of arrays, and of further arguments `how`."""
        key = function, tuple((a.shape, str(a.dtype)) for a in avals), how
        if key not in self._known:
            closed = jax.make_jaxpr(lambda *arrays: function(*arrays, *how))(*avals)
            (self._known[key],) = jax_compat.open_jaxpr(closed).eqns
        return self._known[key]


def _swaps(eqn: Any, order: tuple[int, ...] | None) -> bool | None:
    """Whether such an order of the result's dimensions is that of the product with its operands changed; None where it
    is neither that nor the same.
    """
    rank = len(eqn.outvars[0].aval.shape)
    if order is None or order == tuple(range(rank)):
        return False
    (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
    left = len(eqn.invars[0].aval.shape) - len(contracted) - len(batch)
    return True if not batch and order == (*range(left, rank), *range(left)) else None


def _widens(op: Op) -> bool:
    source, result = op.eqn.invars[0], op.eqn.outvars[0]
    return str(source.aval.dtype) in _NARROW and str(result.aval.dtype) == _WIDE
