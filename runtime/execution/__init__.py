"""A pipeline's program on devices: dispatch of tasks, transfers between meshes and processes.

In: A `Program`, compiled tasks, the layouts at both ends of each transfer, arrays.
Out: The arrays of the results.
May import: pipeline, simulation, autopar.common, autopar.ir, autopar.lowering.
"""
