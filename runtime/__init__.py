"""What runs a plan: schedules as lists of tasks, the program of each process, its execution and its simulation.

Imported as `autopar.runtime`. It knows nothing of the solver.
"""
