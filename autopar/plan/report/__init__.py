"""A plan as one page for a browser: `ReportData`, the values of a record in the order of the page, and the page itself.

In: `PlanRecord`, `WhyNot`.
Out: `ReportData`; HTML that needs no network.
May import: common to lowering, and the modules of `autopar.plan` below `plan.py`.
"""
