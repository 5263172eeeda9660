"""Checkpoints of the state, the plan and the data position, restored onto any other plan.

In: A state, its plan and a data position; a folder.
Out: The same state, bit for bit, laid out by another plan or by none.
May import: common to recipes, and train.data, in the order of tests/test_imports.py.
"""
