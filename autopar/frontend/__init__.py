"""From a Python function to a graph of operations.

In: A function, its arguments or their shapes, and which arguments are donated or hold the batch.
Out: `TracedStep`, then `OpGraph`.
May import: common to ops, in the order of tests/test_imports.py.
"""
