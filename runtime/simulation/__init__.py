"""A pipeline's program on a virtual clock.

In: A `Program`, and the seconds of its tasks and transfers.
Out: `Simulation`: step time, idle time, memory; a timeline.
May import: pipeline, autopar.common.
"""
