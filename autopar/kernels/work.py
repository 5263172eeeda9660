"""What a program for one device does: arithmetic operations, and bytes it moves, from its jaxpr.

A Pallas call says so itself (`cost_estimate`), or its body is counted, once for each point of its grid.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from autopar.common import jax_compat
from autopar.errors import InvalidArgumentError
from autopar.ir.primitives import multiplications


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KernelWork:
    """`flops`: arithmetic operations; `nbytes`: of memory traffic, None: operands and results, once each."""

    flops: float
    nbytes: float | None = None

    def times(self, count: float) -> KernelWork:
        """The work of so many."""
        return KernelWork(flops=self.flops * count, nbytes=None if self.nbytes is None else self.nbytes * count)


def amount_of(function: Callable[..., Any], arguments: Sequence[Any], where: str) -> float:
    """What a user's function says of operands of these shapes. Raises: InvalidArgumentError where it is no amount."""
    problem: Exception | None = None
    try:
        said = function(*arguments)
        amount = math.nan if isinstance(said, str) else float(said)
        got = repr(said)
    except Exception as error:  # of the user's own code, or of the conversion of what it returned
        problem, amount, got = error, math.nan, f"{type(error).__name__}: {error}"
    if not 0 <= amount < math.inf:
        raise InvalidArgumentError(
            where=where,
            expected="a function of the operands' shapes that returns a finite number, zero or more",
            got=got,
            hint="it takes as many arguments as the kernel, each a jax.ShapeDtypeStruct: "
            "lambda q, k, v: 4.0 * q.size * k.shape[1]",
        ) from problem
    return amount


def counted_work(closed: Any) -> KernelWork:
    """The work of a program."""
    jaxpr = jax_compat.open_jaxpr(closed)
    alone = jaxpr.eqns[0] if len(jaxpr.eqns) == 1 else None
    if alone is not None and alone.primitive.name == "pallas_call":
        return call_work(alone)
    return KernelWork(flops=flops_in(jaxpr))


def call_work(eqn: Any) -> KernelWork:
    """The work of the call of an unknown kernel."""
    estimate = _estimate(eqn)
    return KernelWork(flops=_flops(eqn), nbytes=float(estimate.bytes_accessed) if estimate is not None else None)


def flops_in(jaxpr: Any) -> float:
    """Arithmetic operations of a jaxpr: 2 m n k of a matrix product, one for each element of other results."""
    return math.fsum(map(_flops, jax_compat.open_jaxpr(jaxpr).eqns))


def _flops(eqn: Any) -> float:
    name = eqn.primitive.name
    if name == "pallas_call":
        estimate = _estimate(eqn)
        if estimate is not None:
            return float(estimate.flops + estimate.transcendentals)
        grid: Sequence[Any] = eqn.params["grid_mapping"].grid
        return math.prod(n for n in grid if isinstance(n, int)) * flops_in(eqn.params["jaxpr"])
    inner = [flops_in(jaxpr) for jaxpr in jax_compat.jaxprs_in(eqn)]
    if name == "scan":
        return float(eqn.params["length"]) * sum(inner)
    if inner:
        return max(inner) if name == "cond" else sum(inner)
    multiplied = multiplications(eqn)
    if multiplied is not None:
        return 2.0 * multiplied
    return float(max((math.prod(getattr(v.aval, "shape", ())) for v in eqn.outvars), default=0))


def _estimate(eqn: Any) -> Any | None:
    return eqn.params.get("cost_estimate")
