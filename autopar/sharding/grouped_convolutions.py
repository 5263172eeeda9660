"""Convolutions in groups of channels or of examples, run on each device's own groups.

XLA's SPMD partitioner is not used for them: on a mesh of two axes it doubles the gradient of a depthwise kernel, and
where groups are split further it ends the process. Shardy's rule of such a convolution has a factor for the groups and,
minor to it, one for what lies in a group, so that each device holds whole groups, or a part of one group: it runs the
same convolution on its part, with as many groups as it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar.common import jax_compat


def is_grouped(eqn: Any) -> bool:
    """Whether an equation is a convolution in more than one group."""
    if eqn is None or eqn.primitive.name != "conv_general_dilated":
        return False
    return bool(eqn.params["feature_group_count"] > 1 or eqn.params["batch_group_count"] > 1)


def convolved_part(eqn: Any, parts: Sequence[Any], result_examples: int) -> Any:
    """The convolution of one device's parts of images and kernel, of which the result has so many examples."""
    images, kernel = parts
    numbers = eqn.params["dimension_numbers"]
    lhs_examples, lhs_channels = (images.shape[d] for d in numbers.lhs_spec[:2])
    params = {
        **eqn.params,
        "feature_group_count": lhs_channels // kernel.shape[numbers.rhs_spec[1]],
        "batch_group_count": lhs_examples // result_examples,
    }
    (result,) = jax_compat.bind(eqn.replace(params=params), parts)
    return result
