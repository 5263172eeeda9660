"""Tests run on 8 virtual CPU devices, which jax makes only if it is told before it starts."""

import os

NUM_DEVICES = 8

os.environ.setdefault("JAX_PLATFORMS", "cpu")
_DEVICE_FLAG = "--xla_force_host_platform_device_count"
if _DEVICE_FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICE_FLAG}={NUM_DEVICES}".strip()
