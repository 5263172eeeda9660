"""The planner: searches compared, the best plan recorded; and from a plan back to a program.

In: A `TracedStep`, a `Cluster`, `PlanOptions`.
Out: A `Plan`; the function or the pipeline that it stands for.
May import: everything above but xla.
"""
