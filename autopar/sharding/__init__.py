"""The ways to split one operation over a mesh, and to reshard a value.

In: Operations of an `OpGraph`, a `LogicalMesh` and its links, the constraints of a recipe, pins.
Out: Sharding rules (from Shardy), `Strategy`s, resharding `Paths`, `Constraints`, `Pins`.
May import: common, ir, hardware.
"""
