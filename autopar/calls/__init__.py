"""What a call of a step has to look at: arguments, signatures, NNX objects, NaNs, rows of several processes.

In: The arguments of a call as the user passed them.
Out: Arrays where the plan wants them; results as plain jax gives them.
May import: everything above.
"""
