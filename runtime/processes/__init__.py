"""Several processes: that they agree, and that each is still there.

In: This process's place in `jax.distributed`.
Out: An error that names the process that is lost or differs.
May import: autopar.common, autopar.ir.
"""
