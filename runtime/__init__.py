"""Where pipelines over several stages will be run: schedules, programs, simulation. Empty so far.

Imported as `autopar.runtime`; knows nothing of the solver.
"""
