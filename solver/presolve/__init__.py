"""Reductions that preserve the least cost.

In: `Problem`.
Out: `Reduction`: a smaller problem, and the map from its choice to one of the original.
May import: ilp.
"""
