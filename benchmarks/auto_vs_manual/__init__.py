"""The search's plans beside those that experts write: models, clusters, recipes, and what each came to.

`python -m benchmarks.auto_vs_manual --help`
"""
