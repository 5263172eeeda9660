"""The node problem, and its exact solution by an integer program.

In: `Problem`: node costs, edge costs, memory uses.
Out: `Solution` with a proven bound, or the reason why nothing fits.
May import: numpy and OR-tools; no other package of the solver.
"""
