"""The plan: its request, the context of its search, its record, its text, its file.

In: `PlanRequest`; a `PlanRecord` from the compiler.
Out: `PlanningContext` for the searches; `Plan`, its text, its file, and the cache of plans on disk.
May import: common to lowering, in the order of tests/test_imports.py.
"""
