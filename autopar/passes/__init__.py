"""Passes over graphs: micro-batches, layers, folding of equal layers, rematerialisation, pipeline stages.

In: An `OpGraph` of a `TracedStep`.
Out: The graph over micro-batches, with the proof that they are exact; `Layers`, `FoldedGraph`, one `StageGraph` for
each stage; `SplitStep`.
May import: common to frontend, in the order of tests/test_imports.py.
"""
