"""Runs an operation that is a program for one device on each device's part: kernels, with a rule and without."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from autopar.common import jax_compat
from autopar.ir.jax_sharding import partition_spec
from autopar.ir.layout import Layout, replicated
from autopar.kernels.operation import is_kernel


def run_on_parts(eqn: Any, reads: Sequence[Layout | None], results: Sequence[Layout], mesh: Mesh, operands: Any) -> Any:
    """The results of an equation whose operands lie as `reads` says (None: whole), as `results` says."""
    layouts = [at or replicated(len(v.aval.shape)) for at, v in zip(reads, eqn.invars, strict=True)]

    def local(*parts: Any) -> tuple[Any, ...]:
        made = eqn.params["function"](*parts) if is_kernel(eqn) else jax_compat.bind(eqn, parts)
        return tuple(a[None] if at.partial else a for a, at in zip(made, results, strict=True))

    run = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=tuple(partition_spec(layout, mesh.axis_names) for layout in layouts),
        out_specs=tuple(partition_spec(layout, mesh.axis_names) for layout in results),
        check_vma=False,
    )
    return run(*operands)
