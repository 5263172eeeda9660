"""Decisions for a graph of layers on one mesh: the fastest, and smaller ones where state or saved values are large."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from autopar.cost.cost_model import CostModel
from autopar.intra_op.build_choice_graph import SharedTables
from autopar.intra_op.ilp import ROUNDS, IntraOp, ObjectiveWeights
from autopar.intra_op.memory_prices import (
    FIRST_PRICE,
    MemoryPrices,
    held_values,
    priced_values,
    saved_values,
    search_price,
    state_values,
)
from autopar.intra_op.slack import Exposure
from autopar.lowering.lower import ShardingPlan
from autopar.passes.fold_layers import FoldedGraph
from autopar.solver import Status

# A byte always costs a little (a part of reading it once), so that the smallest of equally fast decisions is taken.
TIE_BREAKING_READS = 0.1
# The share of the memory up to which state, and saved values, get no higher price on their bytes (`search_price`).
LARGE_SHARE = 0.5
# The parts of their seconds and of their bytes by which decisions differ from others that stand for them.
ALIKE_SECONDS, ALIKE_BYTES = 0.001, 0.01


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """Decisions for a graph on one mesh, and the weights of the objective under which they were made.

    `over_limit`: other decisions existed whose state alone exceeds the memory.
    """

    terms: ObjectiveWeights
    sharding: ShardingPlan
    over_limit: bool = False


Decisions = tuple[Decided, ...]


def lowest_price(model: CostModel) -> float:
    """Seconds that a byte of state costs where memory is plentiful."""
    return TIE_BREAKING_READS / model.device.memory_bytes_per_s


def layer_decisions(
    folded: FoldedGraph, model: CostModel, room_bytes: float, in_flight: int, equal: bool, time_limit_s: float
) -> Decisions:
    """The fastest decisions on the model's mesh, and smaller ones too where state or saved values take much memory."""
    return LayerDecider(folded, model, room_bytes, in_flight, equal, time_limit_s).decisions()


class LayerDecider:
    """Decisions for a graph of layers on one mesh: the fastest at first, then all that are wanted.

    `room_bytes` is the memory of all layers on this mesh if each stage holds its share of them: their state, with
    hoisted copies, and the values saved for `in_flight` micro-batches, as many as the first stage has (0: saved values
    are not priced). Where all stages are `equal`, decisions whose state alone exceeds the room are dropped, but the
    smallest.
    """

    def __init__(
        self,
        folded: FoldedGraph,
        model: CostModel,
        room_bytes: float,
        in_flight: int,
        equal: bool,
        time_limit_s: float,
    ) -> None:
        self.model, self.room_bytes, self.in_flight, self.equal = model, room_bytes, in_flight, equal
        self.time_limit_s = time_limit_s
        # The layers that stay of a run stand for equal ones: what is best for one of them is so for the other.
        tables = SharedTables(folded.graph, model, folded.partials)
        self.intra_op = IntraOp(folded.graph, model, paired_ops=folded.paired_ops, tables=tables)
        state, copies = priced_values(folded.graph), folded.copies()
        saved = saved_values(folded.graph, self.intra_op.saved_in_host)
        self.state_prices = MemoryPrices(s_per_byte=lowest_price(model), values=state, copies=copies)
        self.saved_prices = dataclasses.replace(self.state_prices, values=saved)
        several = copies | {v: copies.get(v, 1.0) * in_flight for v, _ in saved}
        self.both_prices = dataclasses.replace(self.state_prices, values=state | saved, copies=several)
        self.tie_prices = dataclasses.replace(self.state_prices, values=state_values(folded.graph))
        self.home_prices = dataclasses.replace(self.state_prices, values=held_values(folded.graph))
        self.decided_by_choice: dict[tuple[int, ...], Decided] = {}
        self.terms = ObjectiveWeights(s_per_byte=lowest_price(model), exposed_fraction=model.exposed_fraction)
        self.choice = self.decide(self.terms)

    @property
    def fastest(self) -> Decided | None:
        """None where there is no solution in time."""
        return self.decided_by_choice[tuple(self.choice)] if self.choice is not None else None

    def decide(self, terms: ObjectiveWeights) -> Sequence[int] | None:
        """The choice under these terms, which is added to those found."""
        prices = self.both_prices if terms.in_flight else self.state_prices
        if terms == self.terms:  # memory is not short
            prices = self.tie_prices
        solution = self.intra_op.solve(
            time_limit_s=self.time_limit_s,
            prices=dataclasses.replace(prices, s_per_byte=terms.s_per_byte),
            exposure=Exposure(terms.exposed_fraction),
            rounds=ROUNDS,
        )
        if solution.status not in (Status.OPTIMAL, Status.FEASIBLE):
            return None
        decided = Decided(terms=terms, sharding=self.intra_op.decode(solution))
        self.decided_by_choice.setdefault(tuple(solution.choice), decided)
        return solution.choice

    def decisions(self) -> Decisions:
        """The fastest, and smaller ones where state or saved values take much memory."""
        terms, choice, intra_op, room_bytes = self.terms, self.choice, self.intra_op, self.room_bytes
        if choice is not None and (state_bytes := self.state_bytes(choice)) > LARGE_SHARE * room_bytes:
            seconds_per_byte = intra_op.cost(choice) / state_bytes

            def is_lean(s_per_byte: float) -> bool | None:
                nonlocal terms, choice
                terms = dataclasses.replace(terms, s_per_byte=s_per_byte)
                choice = self.decide(terms)
                return None if choice is None else self.state_bytes(choice) <= LARGE_SHARE * room_bytes

            search_price(is_lean, seconds_per_byte)
        saved_bytes = self.in_flight * intra_op.priced_bytes(choice, self.saved_prices) if choice is not None else 0.0
        if choice is not None and saved_bytes > LARGE_SHARE * room_bytes:
            raised_s_per_byte = FIRST_PRICE * intra_op.cost(choice) / saved_bytes
            s_per_byte = max(terms.s_per_byte, raised_s_per_byte)
            self.decide(dataclasses.replace(terms, s_per_byte=s_per_byte, in_flight=self.in_flight))
        if self.equal:
            return self.that_fit()
        return tuple(self.decided_by_choice[choice] for choice in self.distinct(list(self.decided_by_choice)))

    def distinct(self, choices: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """The choices without those that cost and need nearly what an earlier one does: each is priced."""
        kept: dict[tuple[int, ...], np.ndarray] = {}
        alike = np.array([ALIKE_SECONDS, ALIKE_BYTES, ALIKE_BYTES])
        for choice in choices:
            saved_bytes = self.intra_op.priced_bytes(choice, self.saved_prices)
            needs = np.array([self.intra_op.cost(choice), self.state_bytes(choice), saved_bytes])
            if not any((np.abs(needs - other) <= alike * other).all() for other in kept.values()):
                kept[choice] = needs
        return list(kept)

    def state_bytes(self, choice: Sequence[int]) -> float:
        return self.intra_op.priced_bytes(choice, self.state_prices)

    def that_fit(self) -> Decisions:
        """Without those whose state alone exceeds the room, but the smallest."""
        decided, room_bytes = self.decided_by_choice, self.room_bytes
        home_bytes = {choice: self.intra_op.priced_bytes(choice, self.home_prices) for choice in decided}
        most_bytes = max(room_bytes, min(home_bytes.values(), default=0.0))
        over_limit = any(nbytes > room_bytes for nbytes in home_bytes.values())
        fitting = self.distinct([choice for choice in decided if home_bytes[choice] <= most_bytes])
        return tuple(dataclasses.replace(decided[choice], over_limit=over_limit) for choice in fitting)
