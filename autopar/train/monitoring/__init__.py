"""Step time, throughput, MFU, memory and goodput of a training run, beside the plan's prediction.

In: A plan, and the times and metrics of its steps.
Out: Rows for the terminal, TensorBoard and callbacks; warnings.
May import: common to recipes, and train.checkpoint, in the order of tests/test_imports.py.
"""
