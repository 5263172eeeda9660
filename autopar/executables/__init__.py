"""Steps compiled under their plans.

In: A `TracedStep`, a `Plan`, devices.
Out: `Compiled`: one program over all devices, or the programs of a pipeline.
May import: everything above.
"""
