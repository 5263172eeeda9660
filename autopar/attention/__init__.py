"""Attention as one operation: found in a graph by what its equations compute, and run as a ring over devices.

In: The blocks of an `OpGraph`.
Out: The same graph with one operation for each pass of an attention.
May import: common to sharding.
"""
