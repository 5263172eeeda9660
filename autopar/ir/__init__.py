"""The words that everything else is written in: graphs of operations, meshes, layouts, traced steps.

In: Jaxprs, as values of jax.
Out: `OpGraph`, `LogicalMesh`, `Layout`, `TracedStep`, and small functions on them.
May import: common.
"""
