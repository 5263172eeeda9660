"""The verbs of the command line, which `autopar/__main__.py` parses: plans, reports, measurements, the cache.

In: Parsed arguments; names of steps, plans, recipes and folders.
Out: The result of a verb, as text and as values.
May import: all but `autopar/__main__.py`, in the order of tests/test_imports.py.
"""
