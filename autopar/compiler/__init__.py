"""The planner: compares the candidates of the searches, records the best, and restores a plan to a program.

In: A `TracedStep`, a `Cluster`, `PlanRequest`; or a `TracedStep` and a `Plan`.
Out: `Plan`; `ShardedFunction` or `StagedStep`.
May import: common to inter_op, in the order of tests/test_imports.py.
"""
