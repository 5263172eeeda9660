"""What has nothing to do with sharding: units as text, progress, caches on disk, JSON files, jax's unstable parts.

In: Plain values, paths and text.
Out: The same.
May import: nothing of autopar but `errors`.
"""
