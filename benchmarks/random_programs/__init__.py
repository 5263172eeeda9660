"""Random training steps and plain steps, run under every way of planning, against plain `jax.jit`."""
