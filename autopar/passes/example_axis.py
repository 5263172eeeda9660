"""The dimension of a batch that counts examples, where a loop of the step goes over the first one.

A step that accumulates gradients itself loops over the first dimension of a batch (A, B, ...), and a recurrent one over
time. Such a dimension cannot be split among devices. Another one counts examples if the analysis of micro-batches
proves that the step works on each of its slices alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence, Set
from typing import Any

from autopar.common import jax_compat
from autopar.errors import AutoparError
from autopar.ir.rules import RuleBook
from autopar.ir.traced_step import TracedStep
from autopar.passes.microbatch import micro_batched
from autopar.passes.smaller_step import num_examples


def with_example_dims(traced: TracedStep, rules: RuleBook) -> TracedStep:
    """The step with the first dimension of its batch that is proven to count examples in the place of one that a loop
    goes over; as it is where there is none.
    """
    shapes = {i: traced.in_avals[i].shape for i in sorted(traced.batch)}
    if not loops_over_first(traced):
        return traced
    for dim in range(1, max(map(len, shapes.values()))):
        dims = {i: dim if dim < len(shape) else None for i, shape in shapes.items()}
        other = dataclasses.replace(traced, example_dims=dims)
        if _keeps_examples_apart(other, rules):
            return other
    return traced


def _keeps_examples_apart(traced: TracedStep, rules: RuleBook) -> bool:
    examples = num_examples(traced)
    parts = next((n for n in range(2, examples + 1) if examples % n == 0), None)
    if parts is None:
        return False
    cut_alone = traced if traced.per_microbatch else dataclasses.replace(traced, retrace=_not_traced)
    try:
        micro_batched(cut_alone, parts, rules)
    except AutoparError:
        return False
    return True


def _not_traced(in_avals: Sequence[Any]) -> Any:
    raise NotImplementedError("the micro-batch is cut out of the whole batch, or the dimension counts no examples")


def loops_over_first(traced: TracedStep) -> bool:
    """Whether a scan goes over the first dimension of a leaf of the batch."""
    first = [i in traced.batch and bool(a.shape) for i, a in enumerate(traced.in_avals)]
    jaxpr = jax_compat.open_jaxpr(traced.jaxpr)
    return _found_scan(jaxpr, {v for v, has in zip(jaxpr.invars, first, strict=True) if has})


def _found_scan(jaxpr: Any, first: Set[Any]) -> bool:
    """Whether a scan goes over the first dimension of variables of a jaxpr, which operations that keep its size hand
    on.
    """
    found = set(first)
    for eqn in jaxpr.eqns:
        read = [not isinstance(v, jax_compat.Literal) and v in found for v in eqn.invars]
        if not any(read):
            continue
        if eqn.primitive.name == "scan":
            if any(read[sum(jax_compat.scan_counts(eqn.params)) :]):
                return True
            continue
        if any(_found_scan(inner, _inside(inner, read)) for inner in _called(eqn)):
            return True
        sizes = {v.aval.shape[0] for v, is_read in zip(eqn.invars, read, strict=True) if is_read}
        found |= {v for v in eqn.outvars if v.aval.shape[:1] and v.aval.shape[0] in sizes}
    return False


def _called(eqn: Any) -> list[Any]:
    """The jaxprs that an equation calls with its own operands."""
    values = [eqn.params[name] for name in ("jaxpr", "call_jaxpr", "fun_jaxpr") if name in eqn.params]
    return [jax_compat.open_jaxpr(v) for v in values if jax_compat.is_jaxpr(v)]


def _inside(jaxpr: Any, read: Sequence[bool]) -> set[Any]:
    if len(jaxpr.invars) != len(read):
        return set()
    return {v for v, is_read in zip(jaxpr.invars, read, strict=True) if is_read}
