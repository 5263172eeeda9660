"""Code that is written for one device's part: kernels with a rule, unknown kernels, `shard_map` islands.

In: Functions with rules of the user, equations of a jaxpr.
Out: One operation for each call: its sharding rule, its work, and the function that runs it on one device's part.
May import: common, hardware, ir.
"""
