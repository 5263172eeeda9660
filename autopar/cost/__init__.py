"""Predictions from instructions, without compilation: seconds, bytes, collectives.

In: A `LoweredBlock`, or an operation under a strategy; a `Cluster` and a `LogicalMesh`.
Out: Seconds, peak bytes, collectives by mesh axis.
May import: common to plan, in the order of tests/test_imports.py.
"""
