"""`python -m autopar.launch`: starts, watches and restarts the processes of a program.

In: A command line, and the number of processes.
Out: The processes, their output by rank, one exit code.
May import: common to monitoring, in the order of tests/test_imports.py.
"""
