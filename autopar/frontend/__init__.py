"""From a Python function to a graph of operations.

In: A function, avals of its arguments, which of them are donated or a batch.
Out: `TracedStep`, then `OpGraph`.
May import: common to attention.
"""
