"""The data structures of the compiler and the rules of sharding: graphs, meshes, layouts, strategies, reshardings.

In: Jaxprs, as opaque values; Shardy's rules.
Out: `OpGraph`, `LogicalMesh`, `Layout`, `TracedStep`; strategies of an operation, paths between layouts, pins.
May import: common, hardware.
"""
