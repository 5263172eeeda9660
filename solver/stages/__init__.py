"""Pipeline stages at least step time, by dynamic programming.

In: `StageProblem`: layers, submesh sizes, and the seconds and bytes of each option.
Out: `StagePlan`, or `NoStages` with a reason.
May import: numpy and numba; no other package of the solver.
"""
