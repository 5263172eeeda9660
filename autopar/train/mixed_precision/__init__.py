"""Precision policies: the types of parameters, computation, outputs and reductions, and the dynamic loss scale.

In: A policy by name or by types, and the function or module that it is applied to.
Out: The function in these types; loss scale states that are pytrees.
May import: common to execute, in the order of tests/test_imports.py.
"""
