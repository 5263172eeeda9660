"""Runs Fourier transforms on each device's part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from autopar.common import jax_compat
from autopar.ir.jax_sharding import partition_spec
from autopar.lowering.instructions import Compute


def fourier_transform(instruction: Compute, operands: Sequence[Any], mesh: Mesh) -> list[Any]:
    """Runs an fft on each device's part, row by row; it takes any number of dimensions before those it transforms.

    XLA's partitioner gathers what it transforms, and its CPU compiler gives it layouts that its fft refuses.
    """
    (place,), (result,), names = instruction.reads, instruction.results, mesh.axis_names
    assert place is not None, "an array is transformed, no number"

    def local(part: Any) -> Any:
        (out,) = jax_compat.bind(instruction.op.eqn, [jax_compat.in_rows(part)])
        return jax_compat.in_rows(out)

    specs = partition_spec(place[0], names), partition_spec(result, names)
    return [jax.shard_map(local, mesh=mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False)(*operands)]
