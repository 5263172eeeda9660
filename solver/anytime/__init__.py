"""The anytime solver: message passing for bounds, local search for choices, column generation for prices.

In: `Problem`.
Out: A choice and a lower bound, both improved with every round.
May import: ilp, presolve.
"""
