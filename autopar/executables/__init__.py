"""Steps compiled under their plans.

In: A `TracedStep`, a `Plan`, the devices of this program.
Out: `Compiled` (one program over all devices) or `CompiledPipeline` (one program for each task).
May import: common to compiler, in the order of tests/test_imports.py.
"""
