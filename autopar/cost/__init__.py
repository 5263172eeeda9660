"""Predictions: seconds, bytes and collectives of instructions, without compiling them.

In: A `LoweredBlock` or an operation under a strategy, a `Cluster`.
Out: Seconds, peak bytes, collectives by mesh axis.
May import: common to plan.
"""
