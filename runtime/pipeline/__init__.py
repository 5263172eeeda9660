"""Schedules, and the one ordered list of instructions that runs them.

In: Tasks of stages, the name of a schedule.
Out: `Program`: RUN, SEND and FREE; proof that it keeps its promises.
May import: autopar.errors.
"""
