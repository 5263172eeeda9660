"""The order in which XLA runs kernels so as to need little memory.

XLA schedules by how much memory a kernel frees. Here kernels keep their program order, except that one which frees at least as
much as it takes runs as soon as it can: the update of a parameter as soon as its gradient is there.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from autopar.memory_fusion import Kernel


def ordered(
    kernels: tuple[Kernel, ...], nbytes: Mapping[int, int], kept: frozenset[int]
) -> tuple[Kernel, ...]:
    """The kernels of one block in XLA's order. `kept` are values that outlive the block, or were there before."""
    made = {v: i for i, k in enumerate(kernels) for v in k.outputs}
    users: dict[int, list[int]] = {}
    missing = [0] * len(kernels)
    for i, k in enumerate(kernels):
        for v in dict.fromkeys(k.inputs + k.after):
            if v in made:
                users.setdefault(v, []).append(i)
                missing[i] += 1
    uses = {v: sum(1 for i in u if v in kernels[i].inputs) for v, u in users.items()}
    taken = [sum(nbytes[v] for v in k.outputs if v not in kept) for k in kernels]
    freed = [0] * len(kernels)
    done = [False] * len(kernels)

    def last_reader(v: int) -> None:
        """Credits the only kernel left that reads a value with freeing it."""
        if v in kept:
            return
        for i in users[v]:
            if not done[i] and v in kernels[i].inputs:
                freed[i] += nbytes[v]
                if missing[i] == 0 and freed[i] >= taken[i]:
                    eager.append(i)
                return

    order: list[Kernel] = []
    ready = [i for i, n in enumerate(missing) if n == 0]
    heapq.heapify(ready)
    eager: list[int] = []
    for v, n in uses.items():
        if n == 1:
            last_reader(v)
    eager.clear()
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
                    last_reader(v)
        for v in kernel.outputs:
            for j in users.get(v, ()):
                missing[j] -= 1
                if missing[j] == 0:
                    heapq.heappush(ready, j)
                    if freed[j] >= taken[j]:
                        eager.append(j)
    assert len(order) == len(kernels), "the kernels depend on each other in a circle"
    return tuple(order)
