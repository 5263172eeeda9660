"""Operations that are more than one equation: kernels, `shard_map` regions, attention.

In: Equations of a jaxpr with the rules of their authors; an `OpGraph`.
Out: One operation for each call, with its sharding rule, its work, and the function that runs it on a device's part.
May import: common, hardware, ir.
"""
