"""The anytime core: message passing for bounds, local search for choices.

In: `Problem`.
Out: A choice and a lower bound, better with every round.
May import: ilp, presolve.
"""
