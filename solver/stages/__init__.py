"""Pipeline stages at the least step time, by dynamic programming.

In: `StageProblem`: layers, submeshes, options and what each costs.
Out: `StagePlan`.
May import: numpy and numba.
"""
