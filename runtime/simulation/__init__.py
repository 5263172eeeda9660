"""Programs on a virtual clock.

In: `Program` and seconds of its tasks.
Out: Step time, idle time, memory, a timeline.
May import: pipeline.
"""
