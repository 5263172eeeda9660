"""Attention as one operation: recognised in a graph, executed by a kernel of the device, in blocks, or round a ring.

In: An `OpGraph`.
Out: The graph with one operation for each pass of each attention, and the JAX function of that operation; or the graph
of attention as it is written, with what its kernels move.
May import: common, hardware, ir, ops.kernels.
"""
