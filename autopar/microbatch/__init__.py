"""The graph of a training step over micro-batches: proof that a step may be cut, and the graph that does it.

In: A `TracedStep` and the number of micro-batches.
Out: An `OpGraph` with sections, or an error that names the operation that mixes examples.
May import: common to frontend.
"""
