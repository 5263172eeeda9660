"""Edges of the integer program from reads of values, through copies where several nodes read one value.

A gather that several readers share is paid once: they read a copy, one for the readers of each role, and one for all
roles. What is the same in each micro-batch has the copy for all roles for one reader too: it may be gathered once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence, Set

from autopar.intra_op.choice_graph import LayoutSite, Reshard, any_partial
from autopar.ir.graph import Role
from autopar.ir.value_state import ALL


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """`target` reads a value that lies at `source`; counted `count` times a step, for so many readers (`weight`)."""

    value: int
    source: LayoutSite
    target: LayoutSite
    role: Role
    count: float
    weight: float = 1.0


def shared_reads(
    reads: Sequence[Read],
    new_copy: Callable[[int, str, LayoutSite, float], Reshard],
    copies: Mapping[int, float] | None = None,
    once: Set[int] = frozenset(),
) -> list[Reshard]:
    """The edges of the reads. `new_copy(value, readers, source, count)` makes a copy and the edge that fills it.

    A value that stands for several (`copies`) is copied for each of them, however many readers stand for more. `once`:
    the values that are the same for every micro-batch, known before the first one.
    """
    reshards: list[Reshard] = []
    groups: dict[tuple[int, LayoutSite], dict[Role, dict[LayoutSite, float]]] = {}
    weight_at: dict[tuple[int, LayoutSite], float] = {}
    for read in reads:
        targets = groups.setdefault((read.value, read.source), {}).setdefault(read.role, {})
        targets[read.target] = max(targets.get(read.target, 0.0), read.count)
        if read.weight != 1.0:
            weight_at[read.value, read.target] = read.weight

    def copied(
        value: int, readers: str, source: LayoutSite, counts: dict[LayoutSite, float], fewest: int = 2
    ) -> LayoutSite:
        """Where readers read a value: a copy if there are several, else its source."""
        if len(counts) < fewest or len(source.layouts) == 1 or any_partial(source.layouts):
            return source
        each = max(count / weight_at.get((value, target), 1.0) for target, count in counts.items())
        reshards.append(new_copy(value, readers, source, each * (copies or {}).get(value, 1.0)))
        return reshards[-1].target

    for (value, source), by_role in groups.items():
        outside = {
            role: {t: n for t, n in targets.items() if t.node != source.node} for role, targets in by_role.items()
        }
        num_roles = sum(bool(targets) for targets in outside.values())
        common = source
        repeats = value in once and any(outside[role] for role in by_role if role is not Role.UPDATE)
        if num_roles > 1 or repeats:
            counts = {t: n for targets in outside.values() for t, n in targets.items()}
            common = copied(value, ALL, source, counts, fewest=1 if repeats else 2)
        for role, targets in by_role.items():
            shared = copied(value, role.value, common, outside[role])
            for target, count in targets.items():
                at = shared if target in outside[role] else source
                reshards.append(Reshard(value=value, source=at, target=target, count=count))
    return reshards
