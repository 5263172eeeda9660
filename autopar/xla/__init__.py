"""Compiled XLA programs: text, collectives, loops; ahead-of-time compilation for hardware that is absent.

In: The text of a compiled program; the name of a TPU slice or of GPU hosts.
Out: Collectives with bytes and counts; a topology of devices to compile for.
May import: common, ir, hardware.
"""
