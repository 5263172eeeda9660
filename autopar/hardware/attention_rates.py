"""Rates that kernels of attention reach, as published: shares of the peak of matrix units, for large attention.

Arithmetic counts two products forward and five backward, and no blocks that a mask hides, as the sources count it.
"""

from __future__ import annotations

from autopar.hardware.kinds import DeviceKind

# Name of a device kind -> (width of a head, share forward, share backward), ascending.
# H100 and H200: cuDNN on an H100 SXM, sequences of 8,192 without a mask: 412 and 600 TFLOP/s forward, 432 and 518
# backward, of 989 (Shah et al., "FlashAttention-3", 2024, figures 5 and 6). A100: up to 73 % forward and 63 % backward
# (Dao, "FlashAttention-2", 2023, section 4.1).
_HOPPER = ((64, 0.417, 0.437), (128, 0.607, 0.524))
_AMPERE = ((128, 0.73, 0.63),)
_SHARES = {"H100": _HOPPER, "H200": _HOPPER, "A100": _AMPERE}


def attention_flops_per_s(device: DeviceKind, dtype: str, width: int, backward: bool) -> float:
    """Rate of a kernel of attention with heads of this width: that of products where none is published, nor is any
    faster than products are.
    """
    rate = device.flops_per_s(dtype)
    shares = next((rows for name, rows in _SHARES.items() if device.name.startswith(name)), ())
    for at, forward_share, backward_share in shares:
        if width <= at or at == shares[-1][0]:
            return min(rate, device.peak_flops_per_s(dtype) * (backward_share if backward else forward_share))
    return rate
