"""The data structures of the compiler: graphs of operations, meshes, layouts, traced steps.

In: Jaxprs, as opaque values.
Out: `OpGraph`, `LogicalMesh`, `Layout`, `TracedStep`; layouts as JAX shardings; algebraic facts about primitives.
May import: common.
"""
