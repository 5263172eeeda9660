"""Manual ways to run a step, as experts choose them: of each the best of all settings that it leaves open.

In: A traced step, a cluster, the request of a search, and recipes.
Out: `Made`: the best plan of a way, or why it has none.
May import: common to recipes, in the order of tests/test_imports.py.
"""
