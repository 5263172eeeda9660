"""The plan as its user has it: what was asked for, what was chosen, as text and as files.

In: `PlanOptions`; a `PlanRecord` of the compiler.
Out: `Plan`, its text, its file, and the cache of plans on disk.
May import: common to lowering.
"""
