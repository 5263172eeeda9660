"""Calls of a step: arguments, traces, sources of plans, compilation, placement; the text of compiled programs.

In: The arguments of a call, a `TracedStep`, a `Plan`, the devices of this program.
Out: `Compiled` (one program over all devices) or `CompiledPipeline` (one program for each task), and their results.
May import: common to search, in the order of tests/test_imports.py.
"""
