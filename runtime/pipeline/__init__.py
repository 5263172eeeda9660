"""Schedules, and the totally ordered instruction list of a pipeline.

In: A `Pipeline` (tasks, buffers, transfers) and the name of a schedule.
Out: `PipelineSchedule`; `Program` of RUN, SEND and FREE; the verification of both.
May import: autopar.errors.
"""
