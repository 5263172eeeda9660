"""Precision policies and the dynamic loss scale."""

from autopar.train.mixed_precision.policy import Policy, all_finite, precision, stop_if_not_finite
from autopar.train.mixed_precision.scaling import LossScale

__all__ = ["LossScale", "Policy", "all_finite", "precision", "stop_if_not_finite"]
