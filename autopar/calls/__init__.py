"""The parts of a step: arguments and their key, traces, plans by shape, initial state, batches, the fast path, NaNs.

In: The options and the arguments of a step's calls as the user passed them.
Out: Traced steps with their plans; arrays where the plan wants them; results as plain jax gives them.
May import: everything above.
"""
