"""The examples of each process, by the plan at hand: order, prefetching, and a position that can be saved.

In: A source of examples, a plan, a seed.
Out: Batches as the step takes them, and the position of the next one.
May import: common to execute, in the order of tests/test_imports.py.
"""
