"""The parts of a call of a step: arguments, traces, sources of plans, initial state, batches, fast path, NaN checks.

In: The options of a step, and the arguments of its calls as the user passed them.
Out: Traced steps with their plans; arrays in the layouts of the plan; results as plain JAX returns them.
May import: common to executables, in the order of tests/test_imports.py.
"""
