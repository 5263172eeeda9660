"""What XLA compiled: its text, collectives and loops; compiling for hardware that is not there.

In: The text of a compiled program; the name of a TPU slice or of GPU hosts.
Out: Collectives with bytes and counts; devices to compile for.
May import: common to hardware.
"""
