"""Operations that a graph over micro-batches has beside those of the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from autopar.common import jax_compat
from autopar.ir.graph import Atom, Constant, Op, OpKind, Section, Value
from autopar.sharding.rules import equation_key


def one_equation(
    function: Callable[[Any], Any], value: Value, source: Atom, target: int, like: Op, section: Section
) -> Op:
    """An operation of one equation on a value; its rule is not known yet."""
    aval = jax.ShapeDtypeStruct(value.shape, value.dtype, weak_type=value.weak_type)
    (eqn,) = jax_compat.open_jaxpr(jax.make_jaxpr(function)(aval)).eqns
    inputs = tuple(Constant(v) if isinstance(v, jax_compat.Literal) else source for v in eqn.invars)
    return Op(
        id=0, kind=OpKind.EQUATION, primitive=eqn.primitive.name, eqn=eqn, inputs=inputs, outputs=(target,), rule=None,
        role=like.role, module=like.module, count=1.0, key=equation_key(eqn), section=section,
    )  # fmt: skip


def scaling(source: Atom, target: int, value: Value, weight: float, like: Op, section: Section = Section.AFTER) -> Op:
    """The operation that multiplies a value; by default a sum of all micro-batches, behind the loop."""
    return one_equation(lambda x: x * weight, value, source, target, like, section)
