"""Reductions that keep the best cost.

In: `Problem`.
Out: `Reduction`: a smaller problem and the way back.
May import: ilp.
"""
