"""Names for profilers: the operations of a compiled program, and its collectives, bear the user's modules."""

from __future__ import annotations

import contextlib

import jax

from autopar.frontend.build_graph import stack_of_module
from autopar.lowering.instructions import HostCopy, Instruction, Loop, Move


def named(instruction: Instruction) -> contextlib.AbstractContextManager[None]:
    """The name scope of an instruction's module, as `jax.grad` names it; none around a loop, whose body has its own."""
    if isinstance(instruction, Move):
        stack = stack_of_module(instruction.module, instruction.role)
    elif isinstance(instruction, HostCopy):
        stack = instruction.module
    elif isinstance(instruction, Loop):
        return contextlib.nullcontext()
    else:
        stack = stack_of_module(instruction.op.place, instruction.op.role)
    return jax.named_scope(stack) if stack else contextlib.nullcontext()
