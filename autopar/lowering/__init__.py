"""From decisions to instructions, and from instructions to a jax function on global arrays.

In: An `OpGraph` and the `ShardingPlan` that a search decided.
Out: `LoweredBlock`: operations, resharding steps and collectives in order; a jax function.
May import: common to passes.
"""
