"""What XLA's TPU compiler makes of a program's operations before it fuses them, as far as memory shows it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from autopar.cost.xla_program import ALIASES, BARRIER, BROADCAST_RATIO, REDUCTIONS, MemoryStep
from autopar.ir.primitives import MATRIX_PRODUCTS


def with_sunk_broadcasts(
    steps: Sequence[MemoryStep], results: Sequence[int], nbytes: Mapping[int, int], like: dict[int, int]
) -> tuple[MemoryStep, ...]:
    """Constants of loops that are made of broadcasts stand in the loops' bodies; outside is left what is read there.

    New values get ids below zero; `like` gains for each the value whose size it has.
    """
    cheap: dict[int, MemoryStep] = {}
    done: list[MemoryStep] = []
    for step in steps:
        if _is_cheap(step, cheap, nbytes, like):
            cheap[step.outputs[0]] = step
        if step.kind == "cond":
            bodies = (with_sunk_broadcasts(b.body, b.body_outputs, nbytes, like) for b in step.body)
            branches = zip(step.body, bodies, strict=True)
            step = dataclasses.replace(step, body=tuple(dataclasses.replace(b, body=body) for b, body in branches))
        elif step.body:
            step = _with_constants_inside(step, cheap, nbytes, like)
        done.append(step)
    read = set(results)
    kept: list[MemoryStep] = []
    for step in reversed(done):
        if step.outputs and step.outputs[0] in cheap and step.outputs[0] not in read:
            continue
        read.update(step.inputs)
        kept.append(step)
    return tuple(reversed(kept))


def _is_cheap(
    step: MemoryStep, cheap: Mapping[int, MemoryStep], nbytes: Mapping[int, int], like: Mapping[int, int]
) -> bool:
    """Whether a value is made of what is much smaller, and of such values."""
    if len(step.outputs) != 1 or step.kind == BARRIER or not (step.fusible or step.kind in ALIASES):
        return False
    made = step.outputs[0]
    most = nbytes[like.get(made, made)] // BROADCAST_RATIO
    return all(v in cheap or nbytes[like.get(v, v)] <= most for v in step.inputs)


def _with_constants_inside(
    loop: MemoryStep, cheap: Mapping[int, MemoryStep], nbytes: Mapping[int, int], like: dict[int, int]
) -> MemoryStep:
    known: dict[int, int] = {}  # by the names outside, the names inside
    constants: dict[int, int] = {}
    sunk: list[MemoryStep] = []

    def new(value: int) -> int:
        name = -1 - len(like)
        like[name] = like.get(value, value)
        return name

    def inside(value: int) -> int:
        if value in known:
            return known[value]
        inputs = tuple(map(inside, cheap[value].inputs)) if value in cheap else ()
        known[value] = new(value)
        if value in cheap:
            sunk.append(dataclasses.replace(cheap[value], inputs=inputs, outputs=(known[value],), key=None))
        else:
            constants[value] = known[value]
        return known[value]

    names = list(zip(loop.inputs, loop.body_inputs, strict=True))
    for outer, inner in names[: loop.num_constants]:
        if outer in cheap:
            sunk.append(MemoryStep(inputs=(inside(outer),), outputs=(inner,), kind="reshape", fusible=True))
    names = [pair for i, pair in enumerate(names) if i >= loop.num_constants or pair[0] not in cheap]
    return dataclasses.replace(
        loop,
        inputs=(*constants, *(outer for outer, _ in names)),
        body_inputs=(*constants.values(), *(inner for _, inner in names)),
        num_constants=loop.num_constants + len(names) + len(constants) - len(loop.inputs),
        body=with_sunk_broadcasts((*sunk, *loop.body), loop.body_outputs, nbytes, like),
    )


def shifted_scores(steps: Sequence[MemoryStep], results: Sequence[int], nbytes: Mapping[int, int]) -> dict[int, int]:
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
            found |= shifted_scores(step.body, step.body_outputs, nbytes)
    for step in steps:
        if step.kind in MATRIX_PRODUCTS:
            shifted = _shifted(step.outputs[0], readers, frozenset(results), nbytes)
            if shifted is not None:
                found[step.outputs[0]] = shifted
    return found


def _shifted(
    made: int, readers: Mapping[int, list[MemoryStep]], results: frozenset[int], nbytes: Mapping[int, int]
) -> int | None:
    value, widened = made, False
    reading = readers.get(value, [])
    while len(reading) == 1 and value not in results and (reading[0].fusible or reading[0].kind in ALIASES):
        step = reading[0]
        widened = widened or (nbytes[value] > nbytes[made] and step.kind not in ALIASES)
        value = step.outputs[0]
        if nbytes[value] < nbytes[made]:
            return None
        reading = readers.get(value, [])
    if not widened or len(reading) != 2 or value in results:
        return None
    reduces = any(step.kind in REDUCTIONS and step.reduces_last for step in reading)
    return next((step.outputs[0] for step in reading if reduces and step.kind == "sub"), None)
