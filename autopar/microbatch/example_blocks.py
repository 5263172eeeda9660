"""Equations whose parameters count rows or groups of examples, which are fewer in a micro-batch.

Examples in blocks are arrays of all examples that stand one behind the other in one dimension: joined and cut apart.
`model(jnp.concatenate([chosen, rejected]))` has two blocks, and its micro-batches have the examples of one in each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from autopar.common.records import replaced
from autopar.microbatch.example_places import shape_of
from autopar.microbatch.forms import Form, State


def counted_examples(eqn: Any, part: Any, states: Sequence[State], parts: int) -> list[State] | None:
    """The states of the results of an equation that joins or cuts arrays along the examples, between blocks, or that
    convolves each example with a kernel of its own; None for any other equation.

    Args:
        part: The equation of a micro-batch.
        states: Of the operands, at least one a SPLIT.
        parts: The number of micro-batches.
    """
    rule = _RULES.get(eqn.primitive.name)
    return None if rule is None else rule(eqn, part, states, parts)


def blocks_of_slices(eqn: Any, states: Sequence[State]) -> set[int]:
    """In how many blocks examples would have to lie for an equation to cut an array between them; none of another one,
    or where they lie in blocks already.
    """
    state = states[0]
    if state.form is not Form.SPLIT or state.outer != 1 or state.uniform:
        return set()
    size = shape_of(eqn.invars[0])[state.dim]
    if eqn.primitive.name == "slice":
        bounds = [eqn.params[name][state.dim] for name in ("start_indices", "limit_indices")]
    elif eqn.primitive.name == "split" and int(eqn.params["axis"]) == state.dim:
        bounds = list(eqn.params["sizes"])
    else:
        return set()
    blocks = size // math.gcd(size, *bounds)
    return {blocks} if blocks > 1 else set()


def _block(eqn: Any, operand: int, state: State) -> int:
    """The length of a block of an operand."""
    return shape_of(eqn.invars[operand])[state.dim] // state.outer


def _are_blocks(whole: Sequence[int], part: Sequence[int], length: int, parts: int) -> bool:
    """Whether numbers of rows are whole blocks, in the whole batch and in a micro-batch."""
    pairs = zip(whole, part, strict=True)
    return all(n % length == 0 and n == k * parts and n >= 0 for n, k in pairs)


def _concatenated(eqn: Any, part: Any, states: Sequence[State], parts: int) -> list[State] | None:
    dim = int(eqn.params["dimension"])
    if any(s.form is not Form.SPLIT or s.dim != dim for s in states):
        return None
    sizes, of_part = ([shape_of(v)[dim] for v in e.invars] for e in (eqn, part))
    lengths = {_block(eqn, i, s) for i, s in enumerate(states) if not s.uniform} or {math.gcd(*sizes)}
    length = lengths.pop() if len(lengths) == 1 else 0
    if not length or not _are_blocks(sizes, of_part, length, parts):
        return None
    return [State(form=Form.SPLIT, dim=dim, outer=sum(sizes) // length)]


def _sliced(eqn: Any, part: Any, states: Sequence[State], parts: int) -> list[State] | None:
    (state,), (whole, of_part) = states, (eqn.params, part.params)
    dim, begin, end = state.dim, "start_indices", "limit_indices"
    strides = whole["strides"] or (1,) * len(whole[begin])
    if (whole["strides"] or strides) != (of_part["strides"] or strides) or strides[dim] != 1:
        return None
    others = [d for d in range(len(strides)) if d != dim]
    if any(whole[name][d] != of_part[name][d] for name in (begin, end) for d in others):
        return None
    bounds, of_part = ([p[name][dim] for name in (begin, end)] for p in (whole, of_part))
    if state.uniform:
        return [state]
    length = _block(eqn, 0, state)
    if not _are_blocks(bounds, of_part, length, parts):
        return None
    return [State(form=Form.SPLIT, dim=dim, outer=(bounds[1] - bounds[0]) // length)]


def _split(eqn: Any, part: Any, states: Sequence[State], parts: int) -> list[State] | None:
    (state,), sizes = states, eqn.params["sizes"]
    if int(eqn.params["axis"]) != state.dim:
        return None
    if state.uniform:
        return [state for _ in sizes]
    length = _block(eqn, 0, state)
    if not _are_blocks(sizes, part.params["sizes"], length, parts):
        return None
    return [State(form=Form.SPLIT, dim=state.dim, outer=size // length) for size in sizes]


def _padded(eqn: Any, part: Any, states: Sequence[State], parts: int) -> list[State] | None:
    """Each row of what is added is the same: blocks whose examples are alike."""
    (state, filled), (whole, of_part) = states, (e.params["padding_config"] for e in (eqn, part))
    if state.form is not Form.SPLIT or filled.form is not Form.INVARIANT:
        return None
    if any(a != b for d, (a, b) in enumerate(zip(whole, of_part, strict=True)) if d != state.dim):
        return None
    (low, high, inside), (low_of_part, high_of_part, _) = whole[state.dim], of_part[state.dim]
    if inside or not (low or high):
        return None
    size = shape_of(eqn.invars[0])[state.dim]
    length = math.gcd(size, low, high) if state.uniform else _block(eqn, 0, state)
    if not _are_blocks((low, high), (low_of_part, high_of_part), length, parts):
        return None
    return [State(form=Form.SPLIT, dim=state.dim, outer=(size + low + high) // length)]


def _tiled(eqn: Any, part: Any, states: Sequence[State], parts: int) -> list[State] | None:
    (state,), reps = states, eqn.params["reps"]
    if len(reps) != len(shape_of(eqn.invars[0])) or reps != part.params["reps"] or state.uniform:
        return None
    return [State(form=Form.SPLIT, dim=state.dim, outer=state.outer * reps[state.dim])]


def _convolved(eqn: Any, part: Any, states: Sequence[State], parts: int) -> list[State] | None:
    """Under `vmap` over images and kernels, and in gradients of each example, examples are groups of a convolution."""
    images, kernels, numbers = *states, eqn.params["dimension_numbers"]
    if any(s.form is not Form.SPLIT or s.outer != 1 for s in states) or kernels.dim != numbers.rhs_spec[0]:
        return None
    groups = {"batch_group_count": numbers.lhs_spec[0], "feature_group_count": numbers.lhs_spec[1]}
    differing = [name for name, value in eqn.params.items() if repr(value) != repr(part.params[name])]
    if len(differing) != 1 or images.dim != groups.get(differing[0]):
        return None
    if eqn.params[differing[0]] != parts * part.params[differing[0]]:
        return None
    return [State(form=Form.SPLIT, dim=int(numbers.out_spec[1]))]


_RULES = {
    "conv_general_dilated": _convolved,
    "concatenate": _concatenated,
    "slice": _sliced,
    "split": _split,
    "pad": _padded,
    "tile": _tiled,
}


def reshaped(
    source: Sequence[int], target: Sequence[int], state: State, parts: int, is_part: Callable[[int], bool]
) -> tuple[int, int, bool] | None:
    """(dimension, blocks, whether its slices are alike) of the examples after a reshape; None where no dimension holds
    them.

    Args:
        state: Of the operand, a SPLIT.
        parts: The number of micro-batches, into which each block is cut.
        is_part: Whether the shapes of the result are those of a batch and a micro-batch along a dimension.
    """
    before = math.prod(source[: state.dim])
    blocks, preceding = before * state.outer, 1  # in the order of the elements
    for d, size in enumerate(target):
        is_inside = preceding % before == 0 and preceding * size <= before * source[state.dim]
        if state.uniform and is_inside and is_part(d):
            return d, 1, True
        if not state.uniform and blocks % preceding == 0 and blocks < preceding * size:
            inner = blocks // preceding
            return (d, inner, False) if size % (inner * parts) == 0 else None
        preceding *= size
    if not state.uniform:
        return None
    return reshaped(source, target, replaced(state, uniform=False), parts, is_part)
