"""How one operation can be split, and how a value goes from one layout to another.

In: Operations of an `OpGraph`, a `LogicalMesh`, what a recipe or a user asks for.
Out: Sharding rules (from Shardy), strategies, resharding paths, constraints, pins.
May import: common, ir, hardware.
"""
