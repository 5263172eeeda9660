"""The ASPLOS / EuroSys 2025 contest: the solver's problem in limited memory, on top of `autopar.solver`.

`memory`: the problem, its reductions, its rows; `integer_program`: on what is small; `loops` and `priced_core`: prices
on rows for the anytime solver; `solving`: the way from a problem to an answer.
"""
