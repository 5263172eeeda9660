"""Peak memory of one device, predicted from the operations of a program without compiling it.

A `MemoryProgram` is what a compiler pass knows of a step after sharding: operations in order, and bytes per device of
every value. The prediction follows what XLA does with it, in three passes, whose vocabulary is in `xla_program`:

1. `xla_fusion`: which values are ever written to memory, and which live only inside a fused kernel;
2. `xla_schedule`: the order in which XLA runs the kernels so as to need little memory;
3. here: from where to where each value is alive, and the most that is alive at once.

`benchmarks/memory_study.py` holds it against XLA's CPU compiler: within 10 % for all of its 37 models, jax 0.10 and
0.12. `benchmarks/compiled_elsewhere.py` holds sharded steps against XLA's GPU and TPU compilers.

On TPU what a kernel makes or reads lies in vector memory as far as there is room, and the space that is lost between
the buffers counts (`buffer_places`).

Not modelled: TPU's padding of arrays to tiles (give padded bytes in `nbytes`), and what its copies of state in another
layout take. On GPU, what XLA chooses without being asked: it copies reductions into one buffer of up to 30 MiB and
sends that, may cut a matrix product's contraction into parts, whose results are there at once before they are added up,
may put the gradients of a layer's weights off until the layer before it is computed again, and of attention as written
the gradients of values behind those of scores, until which the weights are held.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

from autopar.common.records import made_often
from autopar.cost import buffer_places, rewritten_steps, xla_fusion, xla_program, xla_schedule
from autopar.cost.xla_fusion import Kernel
from autopar.cost.xla_program import COLLECTIVES, CPU, GPU, TPU, Compiler, MemoryStep, compiler_for
from autopar.ir.primitives import MATRIX_PRODUCTS

__all__ = [
    "CPU",
    "GPU",
    "TPU",
    "Compiler",
    "LiveRange",
    "MemoryEstimate",
    "MemoryProgram",
    "MemoryStep",
    "compiler_for",
    "estimate",
    "live_ranges",
]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProgram:
    """A step as one device runs it.

    Attributes:
        steps: Operations in program order.
        nbytes: Bytes per device of every value, by its id.
        arguments: Values that are there before the first step. All of them take memory until the end: XLA never
            reuses an argument's memory unless it is donated.
        results: Values that are there after the last step.
        donated: For an argument whose memory is given away, the result that takes it over.
    """

    steps: tuple[MemoryStep, ...]
    nbytes: Mapping[int, int]
    arguments: tuple[int, ...]
    results: tuple[int, ...]
    donated: Mapping[int, int]


@made_often
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LiveRange:
    """A value that takes `share` (1/2, 1 or 2) of its bytes from position `start` up to, not including, `stop`."""

    value: int
    start: int
    stop: int
    share: float = 1.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes per device.

    Attributes:
        peak_bytes: The most at any moment, arguments and results included.
        argument_bytes: All arguments, donated ones too.
        result_bytes: Results that do not take over an argument's memory.
        temporary_bytes: The rest of the peak.
        lost_bytes: Of temporaries the space between them.
        at_peak: (value id, bytes) of everything that is alive at the peak, largest first.
        course: (position, bytes alive from there on), in the order of XLA's kernels.
    """

    peak_bytes: int
    argument_bytes: int
    result_bytes: int
    temporary_bytes: int
    lost_bytes: int
    at_peak: tuple[tuple[int, int], ...]
    course: tuple[tuple[int, int], ...] = ()


def estimate(program: MemoryProgram, compiler: Compiler = GPU) -> MemoryEstimate:
    """The most memory that the program needs at once on one device."""
    ranges = live_ranges(program, compiler)
    size = program.nbytes
    change: dict[int, int] = {}
    for r in ranges:
        change[r.start] = change.get(r.start, 0) + _bytes(r, size)
        change[r.stop] = change.get(r.stop, 0) - _bytes(r, size)
    elsewhere = _in_vector_memory(program, ranges, compiler)
    peak_bytes, live, peak_at = 0, 0, 0
    course = []
    for position in sorted(change.keys() | elsewhere.keys() | {p + 1 for p in elsewhere}):
        live += change.get(position, 0)
        held = live - sum(_bytes(r, size) for r in elsewhere.get(position, ()))
        course.append((position, held))
        if held > peak_bytes:
            peak_bytes, peak_at = held, position
    away = elsewhere.get(peak_at, ())
    at_peak = sorted(
        ((r.value, _bytes(r, size)) for r in ranges if r.start <= peak_at < r.stop and r not in away),
        key=lambda item: -item[1],
    )
    argument_bytes = sum(size[v] for v in program.arguments)
    taken_over = set(program.donated.values())
    result_bytes = sum(size[v] for v in set(program.results) - taken_over)
    alive_bytes = peak_bytes
    if compiler.loses_between:
        peak_bytes = max(peak_bytes, argument_bytes + result_bytes + _heap_bytes(program, ranges, elsewhere))
    # XLA sets the memory of results aside from the start, whatever is alive.
    peak_bytes = max(peak_bytes, argument_bytes + result_bytes)
    return MemoryEstimate(
        peak_bytes=peak_bytes,
        argument_bytes=argument_bytes,
        result_bytes=result_bytes,
        temporary_bytes=peak_bytes - argument_bytes - result_bytes,
        lost_bytes=peak_bytes - max(alive_bytes, argument_bytes + result_bytes),
        at_peak=tuple(at_peak),
        course=tuple(course),
    )


def _bytes(live: LiveRange, size: Mapping[int, int]) -> int:
    return int(live.share * size[live.value])


def _heap_bytes(program: MemoryProgram, ranges: tuple[LiveRange, ...], elsewhere: Mapping[int, list[LiveRange]]) -> int:
    """The heap of what is neither an argument nor a result nor always in vector memory.

    Copies of state are left out: with them small steps with ZeRO on v5p are predicted to need 16 % more than they do.
    """
    size, lasting = program.nbytes, {*program.arguments, *program.results}
    away = collections.Counter((r.value, r.start) for there in elsewhere.values() for r in there)
    return buffer_places.heap_bytes(
        (_bytes(r, size), r.start, r.stop)
        for r in ranges
        if r.value not in lasting and away[r.value, r.start] < r.stop - r.start
    )


def _in_vector_memory(
    program: MemoryProgram, ranges: tuple[LiveRange, ...], compiler: Compiler
) -> dict[int, list[LiveRange]]:
    """By position, the values that lie in vector memory: what the kernel there makes or reads, and what the next few
    will read again, the largest first as far as there is room. What waits longer lies in the memory of the device.
    """
    if not compiler.vector_memory_bytes:
        return {}
    accesses: dict[int, list[int]] = {}
    kernels, nbytes, like = _kernels(program, compiler)
    for position, (kernel, _) in enumerate(_in_order(program, kernels, nbytes, compiler)):
        for v in (*kernel.inputs, *kernel.outputs):
            accesses.setdefault(like.get(v, v), []).append(position)
    lasting = {*program.arguments, *program.results}
    near: dict[int, list[LiveRange]] = {}
    for r in ranges:
        if r.value in lasting:
            continue
        at = [r.start, *(p for p in accesses.get(r.value, ()) if r.start < p < r.stop)]
        kept = {p for a, b in itertools.pairwise(at) if b - a <= compiler.vector_memory_kernels for p in range(a, b)}
        for position in kept.union(at):
            near.setdefault(position, []).append(r)
    chosen: dict[int, list[LiveRange]] = {}
    for position, there in near.items():
        room = compiler.vector_memory_bytes
        for r in sorted(there, key=lambda r: -_bytes(r, program.nbytes)):
            if _bytes(r, program.nbytes) <= room:
                room -= _bytes(r, program.nbytes)
                chosen.setdefault(position, []).append(r)
    return chosen


def allocated_bytes(stats: Any) -> int:
    """What running a compiled program allocates on a device, from its `memory_analysis()`: what `estimate` predicts.

    Arguments, results that take no argument's memory, and temporaries (one block, allocated for the whole run). It is
    what jax 0.12 also calls `total_allocation_bytes`. `peak_memory_in_bytes` is something else: on CPU it leaves the
    temporaries out, on TPU it leaves out the space lost between them.
    """
    return (
        stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes + stats.temp_size_in_bytes
    )


def live_ranges(program: MemoryProgram, compiler: Compiler = GPU) -> tuple[LiveRange, ...]:
    """Every value that is written to memory, and where it is alive.

    Positions count kernels in the order in which XLA runs them, bodies of loops inside their loop. The bytes of the
    values alive at a position add up to the memory needed then, so that memory stays linear in the values' bytes. A
    result that takes over the memory of a donated argument is listed only for as long as both are needed. A value can
    be listed more than once: a broadcast that is written has the size of a value that is computed from it.
    """
    kernels, nbytes, like = _kernels(program, compiler)
    flat = _in_order(program, kernels, nbytes, compiler)
    end = len(flat) + 1
    start, stop = _first_and_last(flat)
    last_read = {a: stop.get(a, 0) for a in program.arguments}
    stop.update(dict.fromkeys(program.results, end))
    taken = _take_over(flat, start, stop, nbytes)
    twice = {v for kernel, _ in flat for v in kernel.twice}
    halves = _halves(flat, frozenset(program.results)) if compiler.products_round else frozenset()
    ranges = [LiveRange(value=a, start=0, stop=end) for a in program.arguments]
    handed_through = set(program.arguments).intersection(program.results) - set(program.donated)
    ranges += [LiveRange(value=v, start=end - 1, stop=end) for v in sorted(handed_through)]  # copied at the end
    donor = {r: a for a, r in program.donated.items()}
    for v, first in start.items():
        last = stop[v]
        if v in donor and compiler.copies_gathered_state and flat[first][0].kind in COLLECTIVES:
            ranges.append(LiveRange(value=donor[v], start=0, stop=last_read[donor[v]]))
        elif v in donor:
            last = min(last, last_read[donor[v]])
            if last == first + 1 and flat[first][0].in_place:
                continue  # an elementwise update of the argument's own memory
        if first < last and nbytes[v] and v not in taken:
            share = 2.0 if v in twice else 0.5 if v in halves else 1.0
            ranges.append(LiveRange(value=like.get(v, v), start=first, stop=last, share=share))
    return tuple(ranges)


def accessed_bytes(program: MemoryProgram, compiler: Compiler = GPU) -> int:
    """Bytes that the kernels of a program read and write, the body of a loop run once."""
    kernels, nbytes, _ = _kernels(program, compiler)
    total, blocks = 0, [kernels]
    while blocks:
        for kernel in blocks.pop():
            blocks += kernel.blocks
            if not kernel.blocks:
                total += sum(nbytes[v] for v in (*kernel.inputs, *kernel.outputs))
    return total


def _kernels(
    program: MemoryProgram, compiler: Compiler
) -> tuple[tuple[Kernel, ...], Mapping[int, int], Mapping[int, int]]:
    """The kernels, the bytes of their values, and for each value that is no value of the program one of its size."""
    steps = xla_program.without_recomputation(program.steps, program.results, compiler)
    like: dict[int, int] = {}
    if compiler.sinks_broadcasts:
        steps = rewritten_steps.with_sunk_broadcasts(steps, program.results, program.nbytes, like)
    steps = xla_program.with_broadcasts(steps, {**program.nbytes, **_sizes(like, program)}, like)
    if compiler.products_shift:
        like |= rewritten_steps.shifted_scores(steps, program.results, {**program.nbytes, **_sizes(like, program)})
    nbytes = {**program.nbytes, **_sizes(like, program)}
    return xla_fusion.kernels(steps, program.arguments, program.results, nbytes, compiler), nbytes, like


def _sizes(like: Mapping[int, int], program: MemoryProgram) -> dict[int, int]:
    return {v: program.nbytes[other] for v, other in like.items()}


_Flat = list[tuple[Kernel, bool]]  # kernels in order, and whether the kernel begins there: a loop ends elsewhere


def _first_and_last(flat: _Flat) -> tuple[dict[int, int], dict[int, int]]:
    """Where each value is made, and the position after the last one that needs it."""
    start: dict[int, int] = {}
    stop: dict[int, int] = {}
    for position, (kernel, begins) in enumerate(flat):
        for v in kernel.inputs:
            stop[v] = position + 1
        if begins:
            for v in kernel.outputs:
                start[v] = position
                stop.setdefault(v, position + 1)
        else:
            for v in kernel.block_results:
                if v in start:
                    stop[v] = max(stop[v], position)
    return start, stop


def _take_over(flat: _Flat, start: Mapping[int, int], stop: dict[int, int], size: Mapping[int, int]) -> frozenset[int]:
    """Lets outputs of elementwise kernels take the memory of inputs of their size that are read there for the last
    time.

    Such an input stops one position earlier. Returns the values that take the memory of a value carried by the loop
    around them, which belongs to the loop.
    """
    carried = frozenset(v for kernel, _ in flat for v in kernel.block_carried)
    taken: set[int] = set()
    for position, (kernel, begins) in enumerate(flat):
        if not (begins and kernel.in_place):
            continue
        free = [v for v in kernel.inputs if stop.get(v) == position + 1 and (v in carried or v in start)]
        free = [v for v in free if v not in kernel.read_by_rows]
        for out in kernel.outputs:
            for v in free:
                if size[v] == size[out] and start.get(v, -1) < position:
                    free.remove(v)
                    stop[v] = position
                    if v in carried or v in taken:
                        taken.add(out)
                    break
    return frozenset(taken)


def _halves(flat: _Flat, results: frozenset[int]) -> frozenset[int]:
    """What matrix products make and only matrix products read."""
    made = {v for kernel, _ in flat if kernel.kind in MATRIX_PRODUCTS for v in kernel.outputs}
    elsewhere = {v for kernel, _ in flat for v in kernel.inputs if v not in kernel.halves}
    handed_back = {v for kernel, _ in flat for v in kernel.block_results}
    return frozenset(made - elsewhere - handed_back - results)


def _in_order(
    program: MemoryProgram, kernels: tuple[Kernel, ...], nbytes: Mapping[int, int], compiler: Compiler
) -> _Flat:
    return _flatten(kernels, nbytes, compiler, frozenset(program.arguments) | frozenset(program.results))


def _flatten(kernels: tuple[Kernel, ...], nbytes: Mapping[int, int], compiler: Compiler, kept: frozenset[int]) -> _Flat:
    """Kernels in XLA's order; a loop stands before its body, where its results are set aside, and after it."""
    flat: _Flat = []
    if compiler.breadth_first:
        order = xla_schedule.breadth_first(kernels)
    else:
        order = xla_schedule.freeing_first(kernels, nbytes, kept, compiler.reduces_late)
    for kernel in order:
        flat.append((kernel, True))
        for block in kernel.blocks:
            inside = frozenset(v for k in block for v in k.outputs)
            ending = frozenset(kernel.block_results)
            flat += _flatten(block, nbytes, compiler, ending | _read(block) - inside)
        if kernel.blocks:
            flat.append((kernel, False))
    return flat


def _read(kernels: tuple[Kernel, ...]) -> frozenset[int]:
    return frozenset(v for k in kernels for v in k.inputs)
