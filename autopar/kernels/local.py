"""The equations that run on each device's part by themselves, and what they do there."""

from __future__ import annotations

from typing import Any

from autopar.kernels.opaque import is_opaque
from autopar.kernels.operation import is_kernel
from autopar.kernels.work import KernelWork, call_work


def runs_locally(eqn: Any) -> bool:
    """Whether an equation is a program for one device, which the partitioner cannot split."""
    return is_kernel(eqn) or is_opaque(eqn)


def local_work(eqn: Any) -> KernelWork:
    """What it does on whole arrays."""
    if is_kernel(eqn):
        work: KernelWork = eqn.params["function"].work([v.aval for v in eqn.invars])
        return work
    return call_work(eqn)
