"""Runs a pass of attention on one device's part: by a kernel of the device's library, or in blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar.attention import kernels, ring
from autopar.attention.form import AttentionForm, Gradients
from autopar.attention.kernels import Kernel
from autopar.attention.ring import Places


def run(
    form: AttentionForm, gradients: Gradients | None, places: Places, args: Sequence[Any], library: Kernel
) -> tuple[Any, ...]:
    """Forward, or with gradients backward."""
    shapes, dtypes = [a.shape for a in args[:3]], [a.dtype for a in args[:3]]
    kernel = kernels.kernel_of(form, shapes, dtypes, library, places.size(form.position) > 1)
    if kernel is Kernel.BLOCKS:
        return ring.run(form, gradients, places, args)
    if gradients is None:
        return kernels.forward(form, kernel, *args)
    query, key, value, out, largest, total, change = args
    return kernels.backward(form, gradients, kernel, (query, key, value), (out, largest, total), change)
