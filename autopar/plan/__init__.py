"""The plan: the options of its search, its record, its text, its file.

In: `PlanOptions`; a `PlanRecord` from the compiler.
Out: `Plan`, its text, its file, and the cache of plans on disk.
May import: common to lowering, in the order of tests/test_imports.py.
"""
