"""`python -m autopar.launch`: starts, watches and restarts the processes of a program.

In: A command line, and the number of processes.
Out: The processes, their output by rank, one exit code.
May import: `common.launched` and the standard library: the launcher starts without JAX.
"""
