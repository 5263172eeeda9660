"""What XLA's GPU compiler writes so that cuDNN, which pads both sides of a dimension alike, can run a convolution.

A convolution whose sides differ reads a copy of its images with the padding in it, as strides of two over an even size
need; so does one over dilated images. The gradient of a kernel reads a copy with as much more on one side, which is the
same one where the other side has none, and is kept for it. The gradient of the images is made with their padding, and
what reads it cuts that off.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WrittenPadding:
    """What is added to the images, at each end of each of their dimensions, in a copy; and how many times its own size
    the result is. `dilation`: the distance of pixels in the copy.
    """

    added: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    copy_share: float
    result_share: float

    @property
    def is_copied(self) -> bool:
        return self.copy_share > 1.0


def written_padding(eqn: Any) -> WrittenPadding:
    """Of a `conv_general_dilated`.

    As XLA tells them apart (its `ConvRewriter`), the gradient of a kernel is a convolution by what is dilated or larger
    than what comes out, and that of images is one over dilated images.
    """
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    images, kernel, result = (v.aval.shape for v in (*eqn.invars[:2], *eqn.outvars))
    in_spatial, by_spatial, out_spatial = numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:]
    is_of_kernel = set(params["window_strides"]) | set(params["lhs_dilation"]) == {1} and (
        max(params["rhs_dilation"]) > 1
        or all(kernel[k] > result[o] for k, o in zip(by_spatial, out_spatial, strict=True))
    )
    added, dilation = [(0, 0)] * len(images), [1] * len(images)
    result_share = 1.0
    spatial = zip(in_spatial, by_spatial, out_spatial, strict=True)
    for i, (at, k, o) in enumerate(spatial):
        low, high = params["padding"][i]
        into, apart, stride = params["lhs_dilation"][i], params["rhs_dilation"][i], params["window_strides"][i]
        if is_of_kernel:
            reach = (kernel[k] - 1) * apart + (result[o] - 1) * stride + 1
            high = _nearest_high(low, reach - images[at] - low, apart)
            added[at] = max(low, 0) - max(min(low, high), 0), max(high, 0) - max(min(low, high), 0)
        elif into > 1 and stride == 1:
            width = (kernel[k] - 1) * apart + 1
            low = width - 1 - low
            high = _nearest_high(low, width + (images[at] - 1) * into - result[o] - low, into)
            result_share *= (result[o] + abs(high - low)) / result[o]
        elif low != high or into > 1:
            added[at], dilation[at] = (max(low, 0), max(high, 0)), into
    copied = math.prod(
        (n - 1) * step + 1 + sum(ends) for n, step, ends in zip(images, dilation, added, strict=True) if n
    )
    return WrittenPadding(
        added=tuple(added),
        dilation=tuple(dilation),
        copy_share=copied / max(1, math.prod(images)),
        result_share=result_share,
    )


def _nearest_high(low: int, least: int, stride: int) -> int:
    """The padding of the other side that is nearest to this one's, where a stride leaves a choice."""
    return min(max(low, least), least + stride - 1)
