"""From decisions to instructions, and from instructions to a JAX function on global arrays.

In: An `OpGraph` and a `ShardingPlan`.
Out: `LoweredBlock`: computations, resharding steps and collectives in program order; a JAX function.
May import: common to passes, in the order of tests/test_imports.py.
"""
