"""A model of the order in which XLA runs kernels.

On TPU and GPU XLA schedules so as to need little memory: here kernels keep their program order, except that one which
frees at least as much as it takes runs as soon as it can, as the update of a parameter does once its gradient is there.
On CPU it runs breadth first, whatever is ready in the order in which it became ready, to keep many threads busy.
"""

from __future__ import annotations

import collections
import heapq
from collections.abc import Mapping

from autopar.cost.xla_fusion import Kernel


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


def freeing_first(kernels: tuple[Kernel, ...], nbytes: Mapping[int, int], kept: frozenset[int]) -> tuple[Kernel, ...]:
    """The kernels of one block in program order, those that free memory as soon as they can.

    Args:
        nbytes: Bytes of every value.
        kept: Values that outlive the block, or were there before it.
    """
    users, missing = _dependencies(kernels)
    uses = {v: sum(1 for i in u if v in kernels[i].inputs) for v, u in users.items()}
    taken = [sum(nbytes[v] for v in k.outputs if v not in kept) for k in kernels]
    freed = [0] * len(kernels)
    done = [False] * len(kernels)
    eager: list[int] = []

    def credit_last_reader(v: int) -> None:
        """Credits the only kernel left that reads a value with freeing it."""
        if v in kept:
            return
        for i in users[v]:
            if not done[i] and v in kernels[i].inputs:
                freed[i] += nbytes[v]
                if missing[i] == 0 and freed[i] >= taken[i]:
                    eager.append(i)
                return

    for v, n in uses.items():
        if n == 1:
            credit_last_reader(v)
    eager.clear()  # these wait for what they read
    order: list[Kernel] = []
    ready = [i for i, n in enumerate(missing) if n == 0]
    while ready or eager:
        i = eager.pop() if eager else heapq.heappop(ready)
        if done[i]:
            continue
        done[i] = True
        kernel = kernels[i]
        order.append(kernel)
        for v in kernel.inputs:
            if v in uses:
                uses[v] -= 1
                if uses[v] == 1:
                    credit_last_reader(v)
        for v in kernel.outputs:
            for j in users.get(v, ()):
                missing[j] -= 1
                if missing[j] == 0:
                    heapq.heappush(ready, j)
                    if freed[j] >= taken[j]:
                        eager.append(j)
    assert len(order) == len(kernels), "the kernels depend on each other in a circle"
    return tuple(order)


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
