"""Attention as one operation: recognised in a graph, executed as ring attention.

In: An `OpGraph`.
Out: The graph with one operation for each pass of each attention, and the JAX function of that operation.
May import: common, ir, hardware, sharding.
"""
