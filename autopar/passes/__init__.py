"""Graph to graph: layers, equal layers, rematerialisation, pipeline stages.

In: An `OpGraph` over micro-batches.
Out: `Layers`, graphs that compute again what they do not keep, one `StageGraph` a stage.
May import: common to microbatch.
"""
