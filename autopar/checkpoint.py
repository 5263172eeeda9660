"""Checkpoints of the state, the plan and the data position."""

from autopar.train.checkpoint.checkpointer import Checkpointer
from autopar.train.checkpoint.preemption import Preempted

__all__ = ["Checkpointer", "Preempted"]
