"""Programs on devices: tasks dispatched, arrays moved between meshes.

In: `Program`, compiled tasks, arrays.
Out: Arrays.
May import: pipeline, autopar.ir, autopar.lowering.
"""
