"""The intra-operator pass: an ILP shards one graph on one mesh; a search over meshes finds the best SPMD program.

In: An `OpGraph`, a `Cluster` or one of its meshes, constraints, a memory limit.
Out: `ShardingPlan` with the solver's bound; `SpmdCandidate` with exact time and memory.
May import: common to solver, in the order of tests/test_imports.py.
"""
