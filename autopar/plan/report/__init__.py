"""Plans, comparisons, rows of `autopar.bench` and of `autopar.fit` as pages for a browser.

In: `PlanRecord`, `Comparison`, `BenchRow`, `FitRow`.
Out: HTML that needs no network.
May import: common to lowering, and the modules of `autopar.plan` below `plan.py`.
"""
