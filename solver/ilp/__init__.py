"""The problem that the planner hands over, and its exact solution by an integer program.

In: `Problem`: nodes, edges, memory.
Out: `Solution` with its bound; why nothing fits.
May import: numpy and OR-tools.
"""
