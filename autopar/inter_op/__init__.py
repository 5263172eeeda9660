"""The inter-operator pass: stages, their submeshes, micro-batches and schedule, by dynamic programming.

In: A `TracedStep`, a `Cluster`, what was asked of a pipeline.
Out: `Staged`: one graph and one `ShardingPlan` a stage, and the program that runs them.
May import: common to intra_op, solver, runtime.
"""
