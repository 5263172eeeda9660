"""What XLA's TPU compiler makes of a program's operations before it fuses them, as far as memory shows it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from autopar.cost.xla_program import ALIASES, REDUCTIONS, MemoryStep
from autopar.ir.primitives import MATRIX_PRODUCTS

_BROADCAST = "broadcast_in_dim"


def with_sunk_broadcasts(
    steps: Sequence[MemoryStep], results: Sequence[int], like: dict[int, int]
) -> tuple[MemoryStep, ...]:
    """Broadcasts that are constants of a loop stand in its body; none is left outside that nothing there reads.

    New values get ids below zero; `like` gains for each the value whose size it has.
    """
    broadcasts: dict[int, MemoryStep] = {}
    done: list[MemoryStep] = []
    for step in steps:
        if step.kind == _BROADCAST:
            broadcasts[step.outputs[0]] = step
        if step.body:
            step = _with_broadcasts_inside(step, broadcasts, like)
        done.append(step)
    read = {v for step in done for v in step.inputs}.union(results)
    return tuple(s for s in done if s.kind != _BROADCAST or s.outputs[0] in read or s.outputs[0] not in broadcasts)


def _with_broadcasts_inside(loop: MemoryStep, broadcasts: Mapping[int, MemoryStep], like: dict[int, int]) -> MemoryStep:
    inputs, inner, sunk, left_out = list(loop.inputs), list(loop.body_inputs), [], []
    for i in range(loop.num_constants):
        if loop.inputs[i] not in broadcasts:
            continue
        source = broadcasts[loop.inputs[i]].inputs
        made = inner[i]
        if source:
            inputs[i], inner[i] = source[0], -1 - len(like)
            like[inner[i]] = like.get(source[0], source[0])
        else:
            left_out.append(i)
        read = (inner[i],) if source else ()
        sunk.append(MemoryStep(inputs=read, outputs=(made,), kind=_BROADCAST, fusible=True))
    return dataclasses.replace(
        loop,
        inputs=tuple(v for i, v in enumerate(inputs) if i not in left_out),
        body_inputs=tuple(v for i, v in enumerate(inner) if i not in left_out),
        num_constants=loop.num_constants - len(left_out),
        body=with_sunk_broadcasts((*sunk, *loop.body), loop.body_outputs, like),
    )


def shifted_scores(steps: Sequence[MemoryStep], nbytes: Mapping[int, int]) -> dict[int, int]:
    """For each product whose kernel takes in the shift of a softmax, the scores less their maximum, which it writes.

    So it is where arithmetic in a wider type than the product's stands between them. A maximum of scores that are only
    converted is that of the scores as they are, and those are what is written.
    """
    readers: dict[int, list[MemoryStep]] = {}
    found: dict[int, int] = {}
    for step in steps:
        for v in step.inputs:
            readers.setdefault(v, []).append(step)
        if step.body:
            found |= shifted_scores(step.body, nbytes)
    for step in steps:
        if step.kind in MATRIX_PRODUCTS:
            shifted = _shifted(step.outputs[0], readers, nbytes)
            if shifted is not None:
                found[step.outputs[0]] = shifted
    return found


def _shifted(made: int, readers: Mapping[int, list[MemoryStep]], nbytes: Mapping[int, int]) -> int | None:
    value, widened = made, False
    while len(reading := readers.get(value, ())) == 1 and reading[0].fusible | (reading[0].kind in ALIASES):
        (step,) = reading
        widened = widened or (nbytes[value] > nbytes[made] and step.kind not in ALIASES)
        value = step.outputs[0]
        if nbytes[value] < nbytes[made]:
            return None
    if not widened or len(reading) != 2:
        return None
    reduces = any(step.kind in REDUCTIONS and step.reduces_last for step in reading)
    return next((step.outputs[0] for step in reading if reduces and step.kind == "sub"), None)
