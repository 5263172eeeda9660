"""Pipelines over several stages: schedules, the programs made on them, their proof, their simulation and execution.

Imported as `autopar.runtime`; knows nothing of the solver.
"""
