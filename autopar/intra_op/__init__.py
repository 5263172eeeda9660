"""The intra-operator pass: how each operation is sharded on one mesh, by an ILP.

In: An `OpGraph`, a `LogicalMesh`, constraints, a memory limit.
Out: The best `ShardingPlan`, with the solver's bound.
May import: common to cost, solver.
"""
