"""Programs of several processes: agreement on a plan, rows of the batch, failure detection.

In: The rank of this process, and the key-value store of `jax.distributed`.
Out: Agreed values, global arrays, or an error that names the lost or differing process.
May import: execution, autopar.common, autopar.ir, autopar.lowering.
"""
