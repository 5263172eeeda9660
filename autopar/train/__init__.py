"""The parts of a training run around its step: data, precision, checkpoints, monitoring, launching.

In: A step, its plan and its state; a source of examples; a command line.
Out: Batches, checkpoints, rows of metrics, processes.
May import: common to recipes, in the order of tests/test_imports.py; `train.launch` the standard library alone.
"""
