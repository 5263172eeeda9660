"""A model of the order in which XLA runs kernels.

On TPU and GPU XLA schedules so as to need little memory: here kernels keep their program order, except that one which
frees at least as much as it takes runs as soon as it can, as the update of a parameter does once its gradient is there.
An elementwise kernel that only a collective reads runs with it: a gradient is converted when it is sent. On TPU, which
runs reductions by themselves, those of the gradients of a layer that is computed again stand at the end of its backward
pass.
On CPU it runs breadth first, whatever is ready in the order in which it became ready, to keep many threads busy.
"""

from __future__ import annotations

import collections
import heapq
from collections.abc import Mapping, Sequence

from autopar.cost.xla_fusion import Kernel
from autopar.cost.xla_program import COLLECTIVES

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
