"""Graph-to-graph passes: layers, folding of equal layers, rematerialisation, pipeline stages.

In: An `OpGraph` over micro-batches; a `TracedStep` with a scan over layers.
Out: `Layers`, `FoldedGraph`, the rematerialised graph, one `StageGraph` for each stage; `SplitStep`.
May import: common to microbatch, in the order of tests/test_imports.py.
"""
