"""The kernel of TPUs on devices that are none."""

import pytest

from autopar.common import jax_local


@pytest.fixture
def interpreted(monkeypatch):
    """The TPU's kernel where there is none. Pallas' own mode for that takes no batch of kernels."""
    made = jax_local._splash_kernel

    def interpreted(*args):
        kernel = made(*args)
        return type(kernel)(
            kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info, **{**kernel.kwargs, "interpret": True}
        )

    monkeypatch.setattr(jax_local, "_splash_kernel", interpreted)
