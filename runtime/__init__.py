"""Pipelines at run time: schedules, instruction lists, verification, simulation, execution, failure detection.

In: The tasks, buffers and transfers of a `Pipeline`; compiled tasks; arrays.
Out: `Program`, `Simulation`, the arrays of the results.
May import: autopar.common and autopar.ir; never the solver.
"""
