"""The inter-operator pass: stages, submeshes, micro-batches and schedule, by dynamic programming.

In: A `PlanningContext`: a `TracedStep`, a `Cluster`, a `PlanRequest`, a memory limit.
Out: `PipelineCandidate` with its `StagedStep`: a `ShardingPlan` for each stage and the program of all stages.
May import: common to runtime, in the order of tests/test_imports.py.
"""
