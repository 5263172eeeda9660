"""A step over micro-batches: its graph, and the analysis that proves the split correct.

In: A `TracedStep` and the number of micro-batches.
Out: An `OpGraph` with sections, or an error that names the operation that mixes examples.
May import: common to frontend, in the order of tests/test_imports.py.
"""
