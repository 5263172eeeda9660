"""Peak memory of one device, predicted from the operations of a program without compiling it.

A `MemoryProgram` is what a compiler pass knows of a step after sharding: operations in order, and bytes per device of
every value. The prediction follows what XLA does with it, in three passes, whose vocabulary is in `xla_program`:

1. `xla_fusion`: which values are ever written to memory, and which live only inside a fused kernel;
2. The order in which XLA runs the kernels so as to need little memory;
3. here: from where to where each value is alive, and the most that is alive at once.

Beside XLA's CPU compiler it was within 10 % for 37 models, with jax 0.10 and 0.12. `benchmarks/compiled_elsewhere.py`
holds sharded steps against XLA's GPU and TPU compilers.

On TPU what is read again soon lies in vector memory as far as there is room.

Not modelled: TPU's padding of arrays to tiles (give padded bytes in `nbytes`), what its copies of state in another
layout take, and the space that is lost between its buffers. On GPU, what XLA chooses without being asked: it copies
reductions into one buffer of up to 30 MiB and sends that, may cut a matrix product's contraction into parts, whose
results are there at once before they are added up, may put the gradients of a layer's weights off until the layer
before it is computed again, and of attention as written the gradients of values behind those of scores, until which the
weights are held.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import msgspec
from msgspec.structs import replace

from autopar.cost import xla_fusion, xla_program
from autopar.cost.xla_fusion import Kernel
from autopar.cost.xla_program import (
    ALIASES,
    BARRIER,
    BROADCAST_RATIO,
    COLLECTIVES,
    CPU,
    GPU,
    HOST_COPY,
    HOST_SLICE,
    REDUCTIONS,
    SCALAR_BYTES,
    TPU,
    Compiler,
    MemoryStep,
    compiler_for,
)
from autopar.hardware.kinds import Platform
from autopar.ir.primitives import MATRIX_PRODUCTS

# What XLA's TPU compiler makes of a program's operations before it fuses them, as far as memory shows it.


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
            step = replace(step, body=tuple(replace(b, body=body) for b, body in branches))
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
            sunk.append(replace(cheap[value], inputs=inputs, outputs=(known[value],), key=None))
        else:
            constants[value] = known[value]
        return known[value]

    names = list(zip(loop.inputs, loop.body_inputs, strict=True))
    for outer, inner in names[: loop.num_constants]:
        if outer in cheap:
            sunk.append(MemoryStep(inputs=(inside(outer),), outputs=(inner,), kind="reshape", fusible=True))
    names = [pair for i, pair in enumerate(names) if i >= loop.num_constants or pair[0] not in cheap]
    return replace(
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


# A model of the order in which XLA runs kernels.
#
# On TPU and GPU XLA schedules so as to need little memory: here kernels keep their program order, except that one which
# frees at least as much as it takes runs as soon as it can, as the update of a parameter does once its gradient is
# there. An elementwise kernel that only a collective reads runs with it: a gradient is converted when it is sent. On
# TPU, which runs reductions by themselves, those of the gradients of a layer that is computed again stand at the end of
# its backward pass. On CPU it runs breadth first, whatever is ready in the order in which it became ready, to keep many
# threads busy.

REDUCING = frozenset({"all_reduce", "reduce_scatter"})


def breadth_first(kernels: tuple[Kernel, ...]) -> tuple[Kernel, ...]:
    """The kernels of one block in the order in which what they read is there."""
    users, missing = _dependencies(kernels)
    order: list[Kernel] = []
    ready = collections.deque(i for i, n in enumerate(missing) if n == 0)
    while ready:
        kernel = kernels[ready.popleft()]
        order.append(kernel)
        late: list[int] = []
        for v in kernel.outputs:
            for j in users.get(v, ()):
                missing[j] -= 1
                if missing[j] == 0:
                    (late if kernels[j].behind_others else ready).append(j)
        ready.extend(late)
    assert len(order) == len(kernels), "the kernels depend on each other in a circle"
    return tuple(order)


def freeing_first(
    kernels: tuple[Kernel, ...], nbytes: Mapping[int, int], kept: frozenset[int], reduces_late: bool = False
) -> tuple[Kernel, ...]:
    """The kernels of one block in program order, those that free memory as soon as they can.

    Args:
        nbytes: Bytes of every value.
        kept: Values that outlive the block, or were there before it.
        reduces_late: As of `xla_program.Compiler`.
    """
    return _FreeingFirst(kernels, nbytes, kept, reduces_late).order()


class _FreeingFirst:
    """What has run, what could run next, and by kernel the bytes that it frees and takes.

    `ready` by number; of `eager`, which free what they take, the one that was found last runs first. `late` wait until
    what is computed again next begins, or until all else has run.
    """

    def __init__(
        self, kernels: tuple[Kernel, ...], nbytes: Mapping[int, int], kept: frozenset[int], reduces_late: bool
    ) -> None:
        self.kernels, self.nbytes, self.kept, self.reduces_late = kernels, nbytes, kept, reduces_late
        self.users, self.missing = _dependencies(kernels)
        self.uses = dict.fromkeys(self.users, 0)
        for kernel in kernels:
            for v in set(kernel.inputs):
                if v in self.uses:
                    self.uses[v] += 1
        self.sent_by = _sent_by(kernels, self.users, self.missing, kept)
        made = [sum(nbytes[v] for v in k.outputs if v not in kept) for k in kernels]
        self.taken = [n if i not in self.sent_by else min(n, made[self.sent_by[i]]) for i, n in enumerate(made)]
        self.freed = [0] * len(kernels)
        self.done = [False] * len(kernels)
        self.eager: list[int] = []
        self.late: list[int] = []
        self.in_layer = False  # that is computed again

    def order(self) -> tuple[Kernel, ...]:
        for v, n in self.uses.items():
            if n == 1:
                self.credit_last_reader(v)
        self.eager.clear()  # these wait for what they read
        order: list[Kernel] = []
        ready = [i for i, n in enumerate(self.missing) if n == 0]
        # Numbers that are made of arguments, as those of an optimizer of its count: updates wait for nothing else then.
        self.eager += [i for i in reversed(ready) if 0 < self.made_bytes(i) <= SCALAR_BYTES]
        while ready or self.eager or self.late:
            if self.eager:
                i = self.eager.pop()
                if self.in_layer and self.is_late(i):
                    self.late.append(i)
                    continue
            elif self.late and (not ready or self.kernels[ready[0]].begins_again):
                self.in_layer, self.eager, self.late = False, self.late[::-1], []
                continue
            else:
                i = heapq.heappop(ready)
            if not self.done[i]:
                order.append(self.kernels[i])
                self.run(i, ready)
        assert len(order) == len(self.kernels), "the kernels depend on each other in a circle"
        return tuple(order)

    def made_bytes(self, i: int) -> int:
        return sum(self.nbytes[v] for v in self.kernels[i].outputs)

    def is_late(self, i: int) -> bool:
        return self.reduces_late and self.kernels[self.sent_by.get(i, i)].kind in REDUCING

    def run(self, i: int, ready: list[int]) -> None:
        self.done[i] = True
        kernel = self.kernels[i]
        self.in_layer = self.in_layer or kernel.begins_again
        for v in kernel.inputs:
            if v in self.uses:
                self.uses[v] -= 1
                if self.uses[v] == 1:
                    self.credit_last_reader(v)
        for v in kernel.outputs:
            for j in self.users.get(v, ()):
                self.missing[j] -= 1
                if self.missing[j] == 0:
                    heapq.heappush(ready, j)
                    if self.freed[j] >= self.taken[j]:
                        self.eager.append(j)

    def credit_last_reader(self, v: int) -> None:
        """Credits the only kernel left that reads a value with freeing it."""
        if v in self.kept:
            return
        for i in self.users[v]:
            if not self.done[i] and v in self.kernels[i].inputs:
                self.freed[i] += self.nbytes[v]
                if self.missing[i] == 0 and self.freed[i] >= self.taken[i]:
                    self.eager.append(i)
                return


def _sent_by(
    kernels: tuple[Kernel, ...], users: Mapping[int, list[int]], missing: Sequence[int], kept: frozenset[int]
) -> dict[int, int]:
    """For each elementwise kernel that a collective alone reads, and which reads nothing else, this collective."""
    found: dict[int, int] = {}
    for i, kernel in enumerate(kernels):
        readers = [j for v in kernel.outputs for j in users.get(v, ())]
        if kernel.in_place and len(readers) == 1 and kept.isdisjoint(kernel.outputs):
            (j,) = readers
            if kernels[j].kind in COLLECTIVES and missing[j] == 1:
                found[i] = j
    return found


def _dependencies(kernels: tuple[Kernel, ...]) -> tuple[dict[int, list[int]], list[int]]:
    """For each value the kernels that wait for it, and for each kernel how many values it waits for."""
    made = {v for k in kernels for v in k.outputs}
    users: dict[int, list[int]] = {}
    missing = [0] * len(kernels)
    for i, k in enumerate(kernels):
        for v in dict.fromkeys(k.inputs + k.after):
            if v in made:
                users.setdefault(v, []).append(i)
                missing[i] += 1
    return users, missing


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


class LiveRange(msgspec.Struct, frozen=True, gc=False, kw_only=True):
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
        at_peak: (value id, bytes) of everything that is alive at the peak, largest first.
        course: (position, bytes alive from there on), in the order of XLA's kernels.
    """

    peak_bytes: int
    argument_bytes: int
    result_bytes: int
    temporary_bytes: int
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
    # XLA sets the memory of results aside from the start, whatever is alive.
    peak_bytes = max(peak_bytes, argument_bytes + result_bytes)
    return MemoryEstimate(
        peak_bytes=peak_bytes,
        argument_bytes=argument_bytes,
        result_bytes=result_bytes,
        temporary_bytes=peak_bytes - argument_bytes - result_bytes,
        at_peak=tuple(at_peak),
        course=tuple(course),
    )


def _bytes(live: LiveRange, size: Mapping[int, int]) -> int:
    return int(live.share * size[live.value])


def _in_vector_memory(
    program: MemoryProgram, ranges: tuple[LiveRange, ...], compiler: Compiler
) -> dict[int, list[LiveRange]]:
    """By position, the values that lie in vector memory.

    A value lies there at one place for as long as it is alive, unless between two kernels that make or read it others
    move more than `vector_memory_turns` times the bytes of that memory. Values that take the least of it, their bytes
    times the kernels that run meanwhile, are placed first, each at the lowest address that is free all the time; those
    for which none is free lie in the memory of the device, as does what is copied from or to that of the host.
    """
    room = compiler.vector_memory_bytes
    if not room:
        return {}
    accesses: dict[int, list[int]] = {}
    never = {*program.arguments, *program.results}
    moved = [0]  # bytes, by the kernels before each position
    kernels, nbytes, like = _kernels(program, compiler)
    for position, (kernel, _) in enumerate(_in_order(program, kernels, nbytes, compiler)):
        values = (*kernel.inputs, *kernel.outputs)
        for v in values:
            accesses.setdefault(like.get(v, v), []).append(position)
        moved.append(moved[-1] + sum(nbytes[v] for v in values))
        if kernel.kind in (HOST_COPY, HOST_SLICE):
            never.update(like.get(v, v) for v in (kernel.inputs[0], *kernel.outputs))
    waiting: list[tuple[int, LiveRange]] = []
    for r in ranges:
        if r.value in never or not 0 < _bytes(r, program.nbytes) <= room:
            continue
        at = [r.start, *(p for p in accesses.get(r.value, ()) if r.start < p < r.stop)]
        if all(moved[b] - moved[a + 1] <= compiler.vector_memory_turns * room for a, b in itertools.pairwise(at)):
            waiting.append((_bytes(r, program.nbytes) * (r.stop - r.start), r))
    chosen: dict[int, list[LiveRange]] = {}
    taken: dict[int, list[tuple[int, int]]] = {}  # (address, bytes) by position
    begun: dict[int, list[tuple[int, int]]] = {}  # of these those that begin there
    for _, r in sorted(waiting, key=lambda found: found[0]):
        size = _bytes(r, program.nbytes)
        others = (place for position in range(r.start + 1, r.stop) for place in begun.get(position, ()))
        if (address := _free_address([*taken.get(r.start, ()), *others], size, room)) is not None:
            begun.setdefault(r.start, []).append((address, size))
            for position in range(r.start, r.stop):
                taken.setdefault(position, []).append((address, size))
                chosen.setdefault(position, []).append(r)
    return chosen


def _free_address(taken: Iterable[tuple[int, int]], nbytes: int, room: int) -> int | None:
    """The lowest address of so many bytes beside what is taken, (address, bytes)."""
    address = 0
    for start, taken_bytes in sorted(taken):
        if start - address >= nbytes:
            break
        address = max(address, start + taken_bytes)
    return address if address + nbytes <= room else None


def allocated_bytes(executable: jax.stages.Compiled) -> int:
    """What running a compiled program allocates on a device: what `estimate` predicts.

    Arguments, results that take no argument's memory, and temporaries (one block, allocated for the whole run).
    """
    stats: Any = executable.memory_analysis()
    held_bytes = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    return held_bytes + allocated_for_temporaries(executable)


def allocated_for_temporaries(executable: jax.stages.Compiled) -> int:
    """The block of a compiled program's temporaries on a device.

    On TPU `temp_size_in_bytes` counts what XLA takes for space between buffers a second time, up to a half of the
    block (libtpu 0.0.42 and 0.0.50, beside the bytes that they name where a program exceeds the memory). The block
    itself is in jax 0.12's `total_allocation_bytes`. Before jax 0.12 the nearest is `peak_memory_in_bytes`: it leaves
    out the space between buffers (0 to 3 % of blocks of gigabytes, 14 % of one of 142 MB), and counts a program's
    vector memory where that is more.
    """
    stats: Any = executable.memory_analysis()
    devices = jax.tree.leaves(executable.output_shardings)[0].device_set
    if next(iter(devices)).platform != Platform.TPU.value:
        return stats.temp_size_in_bytes
    most_bytes = getattr(stats, "total_allocation_bytes", stats.peak_memory_in_bytes)
    held_bytes = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    return min(stats.temp_size_in_bytes, most_bytes - held_bytes)


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
        steps = with_sunk_broadcasts(steps, program.results, program.nbytes, like)
    steps = xla_program.with_broadcasts(steps, {**program.nbytes, **_sizes(like, program)}, like)
    if compiler.products_shift:
        like |= shifted_scores(steps, program.results, {**program.nbytes, **_sizes(like, program)})
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
        order = breadth_first(kernels)
    else:
        order = freeing_first(kernels, nbytes, kept, compiler.reduces_late)
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
