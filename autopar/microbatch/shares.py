"""Shares: what counts once for the whole batch, and is added to sums over examples inside of a loop of the step.

The gradient of a layer in a scan is the sum over examples of its loss, and that of a penalty on its weights, which
every micro-batch computes alike. Each adds the m-th part of it, so that it counts once in the sum over m micro-batches.
Only floating point numbers have such parts.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.graph import Op, OpKind
from autopar.ir.primitives import is_inexact, linear_operands
from autopar.microbatch.forms import Form, State


def shared_operands(op: Op, states: Sequence[State]) -> list[int]:
    """The operands that an equation adds to sums over examples; none where it is not linear in both together."""
    if op.kind is not OpKind.EQUATION or any(s.form not in (Form.INVARIANT, Form.PARTIAL_SUM) for s in states):
        return []
    sums = {i for i, s in enumerate(states) if s.form is Form.PARTIAL_SUM}
    members = next((m for m in linear_operands(op.primitive, op.eqn) if sums and sums <= m), frozenset())
    shared = [i for i in sorted(members - sums) if not states[i].zero]
    return shared if all(is_inexact(op.eqn.invars[i].aval.dtype) for i in shared) else []


def starts_sum(op: Op, carried: int, before: State, after: State) -> bool:
    """Whether a carried value of a loop is the same in every micro-batch at first, and then adds sums over examples.

    `before` and `after` are its states around a trip.
    """
    adds = before.form is Form.INVARIANT and not before.zero and after.form is Form.PARTIAL_SUM
    return adds and is_inexact(op.eqn.outvars[carried].aval.dtype)
