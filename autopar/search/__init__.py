"""The search: asks its sources for candidates, records the best as a plan, and restores a plan to a program.

`intra_op` has the programs without stages, `inter_op` the pipelines; the planner compares them.

In: A `TracedStep`, a `Cluster`, a `PlanRequest`; or a `TracedStep` and a `Plan`.
Out: `Plan`; `ShardedFunction` or `StagedStep`.
May import: common to runtime, in the order of tests/test_imports.py.
"""
