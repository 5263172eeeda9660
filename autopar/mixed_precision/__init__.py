"""Precision policies: the types of parameters, computation, outputs and reductions, and the dynamic loss scale.

In: A policy by name or by types, and the function or module that it is applied to.
Out: The function in these types; loss scale states that are pytrees.
May import: common to calls, in the order of tests/test_imports.py.
"""

from autopar.mixed_precision.policy import Policy, all_finite, precision, stop_if_not_finite
from autopar.mixed_precision.scaling import LossScale

__all__ = ["LossScale", "Policy", "all_finite", "precision", "stop_if_not_finite"]
