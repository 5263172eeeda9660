"""Which named values `jax.checkpoint` saves: the choice among the names of a step (`Search(remat="auto")`).

What is not saved is computed again in the backward pass. The seconds that a set of names spares, and the bytes that it
keeps, follow from one graph, that of the step which saves none: the operations that its backward pass still needs when
the named values are there. Sets for which no other needs fewer seconds and fewer bytes are planned, and the fastest
plan that fits is taken.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

from autopar.common import jax_compat
from autopar.common.progress import Deadline
from autopar.common.text import text_of_s
from autopar.cost.cost_model import NodeCosts, cost_model
from autopar.errors import AutoparError, MemoryLimitError
from autopar.frontend.build_graph import build_graph
from autopar.frontend.saved_names import names_of, saving
from autopar.hardware.cluster import Cluster
from autopar.ir.graph import Block, OpGraph, OpKind, Role, free_values, has_effects
from autopar.ir.layout import LogicalMesh
from autopar.ir.rules import RuleBook
from autopar.ir.traced_step import TracedStep
from autopar.plan.options import NEARLY_EQUAL
from autopar.plan.plan import Plan
from autopar.plan.schema import CandidateRecord
from autopar.search.comparison import why_lost

SOURCE = "saved names"
Names = frozenset[str]


def fastest_saving(
    traced: TracedStep,
    cluster: Cluster,
    rules: RuleBook,
    plans_of: Callable[[TracedStep, float | None], tuple[Plan, ...]],
    deadline: Deadline,
) -> tuple[Plan, ...]:
    """The plans (`make_plans`) of the step that saves the names with which it is predicted to be the fastest.

    `plans_of` searches for a step within so many seconds. The names as written are kept where no others are faster by
    more than costs are known. Raises: as `plans_of`, where the step fits with no set of names.
    """
    trials = _Trials(traced, plans_of, deadline)
    trials.plan(None)
    names = names_of(traced)
    sets = candidate_sets(build_graph(saving(traced, ()), rules), cluster, names) if names else []
    # The more is saved, the less is computed, and the more memory is needed: the largest set that fits is looked for,
    # and smaller ones after it as long as they are faster, as a plan that just fits may pay for it elsewhere.
    fits, over = -1, len(sets)
    at = over - 1
    while over - fits > 1:
        if trials.plan(sets[at]) is None:
            over = at
        else:
            fits = at
        at = (fits + over) // 2
    while fits > 0 and trials.time_s(sets[fits - 1]) < trials.time_s(sets[fits]):
        fits -= 1
    return trials.best()


class _Trials:
    """The plans of a step by the names that it saves (None: those of its code), each searched for once."""

    def __init__(
        self,
        traced: TracedStep,
        plans_of: Callable[[TracedStep, float | None], tuple[Plan, ...]],
        deadline: Deadline,
    ) -> None:
        self._traced, self._plans_of, self._deadline = traced, plans_of, deadline
        self._plans: dict[Names | None, tuple[Plan, ...] | None] = {}
        self._like: dict[str, Names | None] = {}  # by fingerprint: names that nothing depends on give the same step
        self._refused: AutoparError | None = None
        self._untried = 0

    def plan(self, names: Names | None) -> Plan | None:
        """The best plan; None where none fits, or where no time is left to search for one."""
        if names not in self._plans:
            self._plans[names] = self._searched(names)
        plans = self._plans[names]
        return plans[0] if plans else None

    def time_s(self, names: Names) -> float:
        plan = self.plan(names)
        return math.inf if plan is None else plan.predicted.step_time_s

    def _searched(self, names: Names | None) -> tuple[Plan, ...] | None:
        if self._plans and self._deadline.passed:
            self._untried += 1
            return None
        step = self._traced if names is None else saving(self._traced, names)
        like = self._like.setdefault(step.fingerprint, names)
        if like != names:
            return self._plans[like]
        try:
            return self._plans_of(step, None if math.isinf(self._deadline.left_s) else max(self._deadline.left_s, 0.0))
        except MemoryLimitError as error:
            self._refused = self._refused or error
            return None

    def best(self) -> tuple[Plan, ...]:
        """The fastest, with a note, and with the others among its rejections."""
        own = set(self._like.values())
        planned = {names: plans for names, plans in self._plans.items() if plans and names in own}
        if not planned:
            assert self._refused is not None, "a step has a plan, or an error that says why it has none"
            raise self._refused
        times_s = {names: plans[0].predicted.step_time_s for names, plans in planned.items()}
        chosen = min(planned, key=lambda names: (times_s[names], names is not None))
        if None in planned and times_s[None] <= times_s[chosen] * (1 + NEARLY_EQUAL):
            chosen = None
        best, *others = planned[chosen]
        rejected = [
            CandidateRecord(
                source=SOURCE,
                text=_text(names),
                why=why_lost(s, 0, times_s[chosen], 0),
                step_time_s=s,
                peak_bytes=max(planned[names][0].predicted.peak_bytes),
            )
            for names, s in times_s.items()
            if names != chosen
        ]
        over = [
            CandidateRecord(source=SOURCE, text=_text(names), why="fits in no plan")
            for names, plans in self._plans.items()
            if plans is None and names in own and not self._deadline.passed
        ]
        record = dataclasses.replace(best.record, candidates=(*best.record.candidates, *rejected, *over))
        return (dataclasses.replace(best, record=record).with_note(self._note(chosen, times_s)), *others)

    def _note(self, chosen: Names | None, times_s: dict[Names | None, float]) -> str:
        written = f"as written: {text_of_s(times_s[None])}" if None in times_s else "as written, nothing fits"
        why = written if chosen is not None else f"of {len(self._plans)} sets of names, none is predicted to be faster"
        left = f"; {self._deadline.text}, {self._untried} not tried" if self._untried else ""
        return f"jax.checkpoint {_text(chosen)}, {text_of_s(times_s[chosen])} a step ({why}{left})"


def _text(names: Names | None) -> str:
    if names is None:
        return "saves the names that its policies say"
    return f"saves {', '.join(sorted(names))}" if names else "saves no named value"


def candidate_sets(graph: OpGraph, cluster: Cluster, names: Sequence[str]) -> list[Names]:
    """Sets of names, from fewest bytes kept to most, each of which spares more seconds than those before it.

    `graph` is that of the step that saves no name. Sets are built up from none, by the name that spares the most
    seconds for a byte, and taken down from all by the one that spares the fewest: where two names are worth something
    only together, the second way finds them. Beside each of these sets are those that differ from it in one name: of
    three names that is all sets, and of k about 2 k**2 in place of 2**k.
    """
    usage = _Recomputation(graph, cluster)
    none: Names = frozenset()
    names = [name for name in names if usage.of(none | {name})[1]]

    def price(fewer: Names, more: Names) -> float:
        """Seconds that are spared for each byte that is kept."""
        (fewer_s, fewer_bytes), (more_s, more_bytes) = usage.of(fewer), usage.of(more)
        return (fewer_s - more_s) / max(more_bytes - fewer_bytes, 1.0)

    up, down = [none], [frozenset(names)]
    for _ in names:
        up.append(max((up[-1] | {n} for n in sorted(frozenset(names) - up[-1])), key=lambda s: price(up[-1], s)))
        down.append(min((down[-1] - {n} for n in sorted(down[-1])), key=lambda s: price(s, down[-1])))
    beside = (s ^ {name} for s in (*up, *down) for name in names)
    return _undominated({s: usage.of(s) for s in (*up, *down, *beside)})


def _undominated(usage: dict[Names, tuple[float, float]]) -> list[Names]:
    rows: list[Names] = []
    for names, (seconds, _) in sorted(usage.items(), key=lambda row: (row[1][1], row[1][0], sorted(row[0]))):
        if not rows or seconds < usage[rows[-1]][0]:
            rows.append(names)
    return rows


class _Recomputation:
    """Seconds of a step on one device, and bytes that it keeps, by the names that it saves."""

    def __init__(self, graph: OpGraph, cluster: Cluster) -> None:
        self.graph = graph
        self.costs = NodeCosts(graph, cost_model(cluster, LogicalMesh(axis_sizes=(cluster.num_devices,))))
        self._known: dict[Names, tuple[float, float]] = {}

    def of(self, names: Names) -> tuple[float, float]:
        if names not in self._known:
            self._known[names] = self._of_block(self.graph.block, names)
        return self._known[names]

    def _of_block(self, block: Block, names: Names) -> tuple[float, float]:
        needed = _values(block.outputs)
        total_s = kept_bytes = 0.0
        for op in reversed(block.ops):
            if needed.isdisjoint(op.outputs) and not has_effects(op):
                continue
            if op.role is Role.BACKWARD and op.primitive == jax_compat.NAME and op.eqn.params["name"] in names:
                kept_bytes += op.count * sum(self.graph.values[v].nbytes for v in op.outputs)
                continue  # it is there: what computes it again is not needed for it
            for inner in op.blocks:
                inner_s, inner_bytes = self._of_block(inner, names)
                total_s, kept_bytes = total_s + inner_s, kept_bytes + inner_bytes
                needed |= free_values(inner)
            if op.kind is OpKind.EQUATION and not op.blocks:
                total_s += self.costs.compute_s(op, None)
            needed |= _values(op.inputs)
        return total_s, kept_bytes


def _values(atoms: Iterable[object]) -> set[int]:
    return {atom for atom in atoms if isinstance(atom, int)}
