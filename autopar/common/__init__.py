"""Utilities without knowledge of sharding: units as text, progress, deadlines, cache files, unstable JAX API.

In: Plain values, paths and text.
Out: The same; `jax_compat` gives stable names to JAX API that is private or differs between versions.
May import: `errors` only.
"""
