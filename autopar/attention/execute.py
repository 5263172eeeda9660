"""Runs a pass of attention on one device's part: by a library's kernel or in blocks, alone or in a ring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar.attention import kernels, ring, ring_steps
from autopar.attention.form import AttentionForm, Gradients
from autopar.attention.kernels import Kernel
from autopar.attention.ring import Places


def run(
    form: AttentionForm, gradients: Gradients | None, places: Places, args: Sequence[Any], library: Kernel
) -> tuple[Any, ...]:
    """Forward, or with gradients backward."""
    shapes, dtypes = [a.shape for a in args[:3]], [a.dtype for a in args[:3]]
    count, positions = places.size(form.position), shapes[0][form.query.index(form.position)]
    kernel = kernels.kernel_of(form, shapes, dtypes, library, count)
    steps = kernels.runs_in_steps(form, kernel, positions, count)
    if kernel is Kernel.BLOCKS and not steps:
        return ring.run(form, gradients, places, args)
    if gradients is None:
        return ring_steps.forward(form, kernel, places, *args) if steps else kernels.forward(form, kernel, *args)
    query, key, value, out, largest, total, *rest = args
    passed = (query, key, value), (out, largest, total)
    if steps:
        return ring_steps.backward(form, gradients, kernel, places, *passed, tuple(rest))
    return kernels.backward(form, gradients, kernel, *passed, rest[0])
