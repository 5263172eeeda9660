"""One call of a step: signatures, arguments, NNX objects, NaN checks, the batch of several processes.

In: The arguments of a call as the user passed them.
Out: Their leaves in the layouts of the plan; the results as plain JAX returns them.
May import: common to executables, in the order of tests/test_imports.py.
"""
