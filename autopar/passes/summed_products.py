"""Gradients of 16 bits that micro-batches add up in 32 bits come out of their products in 32 bits.

A product whose result is rounded to 16 bits, laid out anew and then added to a sum takes several passes over memory in
each micro-batch. XLA's compilers for GPU and TPU add the sum within the product where nothing stands between the two:
programs compiled for an H100 (jaxlib 0.10.2) and a v5e slice (libtpu 0.0.42.1) have one kernel. So the product keeps
its sum of 32 bits, and its operands change places where its result was transposed.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autopar.common import jax_compat
from autopar.common.jax_compat import run_wide_products_on_cpus
from autopar.common.records import replaced
from autopar.ir.graph import SUMMED_PRODUCT, Op, OpGraph, OpKind, free_values
from autopar.ir.rewrite import Fresh, makers, remove_dead, renumbered
from autopar.sharding.rules import RuleBook, equation_key

_NARROW, _WIDE = ("bfloat16", "float16"), "float32"


def with_summed_products(graph: OpGraph, rules: RuleBook) -> OpGraph:
    """The graph of a step in micro-batches with such sums. Sums of other values stay as they are."""
    if graph.num_microbatches == 1:
        return graph
    made = makers(graph.block.ops)
    readers = collections.Counter(a for op in graph.block.ops for a in (*op.inputs, *_inside(op)) if isinstance(a, int))
    readers.update(a for a in graph.block.outputs if isinstance(a, int))
    fresh = Fresh(graph)
    products: dict[int, Op] = {}  # by the operation that they stand for
    sums: dict[int, Op] = {}
    for op in graph.block.ops:
        found = _Chain.of(op, graph, made, readers) if op.kind is OpKind.ACCUMULATE else None
        if found is None:
            continue
        product = found.wide_product(fresh)
        products[found.product.id] = product
        sums[op.id] = replaced(op, inputs=product.outputs, primitive=SUMMED_PRODUCT)
    if not sums:
        return graph
    run_wide_products_on_cpus()
    rules.learn((op.key, op.eqn) for op in products.values())
    ops = []
    for op in graph.block.ops:
        if op.id in products:
            op = replaced(products[op.id], rule=rules.rule(products[op.id].key))
        ops.append(sums.get(op.id, op))
    block = remove_dead(dataclasses.replace(graph.block, ops=tuple(ops)))
    return renumbered(dataclasses.replace(graph, values=tuple(fresh.values), block=block))


def _inside(op: Op) -> set[int]:
    return {v for block in op.blocks for v in free_values(block)}


def _shape(variable: Any) -> tuple[int, ...]:
    return tuple(variable.aval.shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Chain:
    """What a sum adds up: a product, rounded, perhaps transposed; nobody else reads what is in between. `swaps`: the
    transposition is that of the product's operands.
    """

    product: Op
    swaps: bool

    @classmethod
    def of(cls, op: Op, graph: OpGraph, made: Mapping[int, Op], readers: Mapping[int, int]) -> _Chain | None:
        order: tuple[int, ...] | None = None
        (at,) = op.inputs
        widened = False
        while isinstance(at, int) and readers[at] == 1 and at in made and made[at].section.repeats:
            maker = made[at]
            if maker.kind is not OpKind.EQUATION:
                return None
            if maker.primitive == "dot_general":
                is_narrow = all(str(v.aval.dtype) == graph.values[at].dtype for v in maker.eqn.invars)
                swaps = _swaps(maker.eqn, order)
                good = widened and is_narrow and swaps is not None
                return cls(product=maker, swaps=bool(swaps)) if good else None
            at = maker.inputs[0]
            if maker.primitive == "transpose":
                after = tuple(maker.eqn.params["permutation"])
                order = after if order is None else tuple(after[i] for i in order)
            elif maker.primitive == "convert_element_type" and not widened and _widens(maker):
                widened = True
            else:
                return None
        return None

    def wide_product(self, fresh: Fresh) -> Op:
        """The product with a result of 32 bits, in the place where the sum takes it; its rule is not known yet."""
        op, params = self.product, self.product.eqn.params
        (contracted, batch), precision = params["dimension_numbers"], params["precision"]
        inputs, variables = op.inputs, op.eqn.invars
        if self.swaps:
            inputs, variables = inputs[::-1], variables[::-1]
            contracted, batch = contracted[::-1], batch[::-1]
            precision = precision[::-1] if isinstance(precision, tuple) else precision
        eqn = _equation(
            lambda x, y: jax.lax.dot_general(x, y, (contracted, batch), precision, jnp.dtype(_WIDE)),
            [jax_compat.struct(_shape(v), str(v.aval.dtype)) for v in variables],
        )
        output = fresh.value(_shape(eqn.outvars[0]), _WIDE, 4)
        return replaced(op, eqn=eqn, inputs=inputs, outputs=(output,), key=equation_key(eqn), rule=None)


def _equation(function: Callable[..., Any], avals: Sequence[Any]) -> Any:
    (eqn,) = jax_compat.open_jaxpr(jax.make_jaxpr(function)(*avals)).eqns
    return eqn


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
