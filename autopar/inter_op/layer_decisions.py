"""Decisions for a graph of layers on one mesh: the fastest, and smaller ones where state or saved values are large."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from autopar.cost.cost_model import LEAST_EXPOSED_FRACTION, CostModel
from autopar.intra_op.ilp import ROUNDS, IntraOp, ObjectiveWeights
from autopar.intra_op.memory_prices import MemoryPrices, held_values, saved_values, search_price, state_values
from autopar.intra_op.slack import Exposure
from autopar.lowering.decisions import ShardingPlan
from autopar.passes.fold_layers import FoldedGraph
from autopar.solver import Status

# A byte always costs a little (a part of reading it once), so that the smallest of equally fast decisions is taken.
TIE_BREAKING_READS = 0.1
# Where state, or saved values, are too large, decisions are made with a higher price on their bytes: the number of
# prices on state, the first price (as a part of the step's time divided by the bytes), the ratio of neighbouring ones.
LEANER, FIRST_PRICE, PRICE_RISE = 3, 0.1, 3.0
# The shares of the memory up to which state, and saved values, get no higher price.
STATE_SHARE, SAVED_SHARE = 0.5, 0.25


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
    """The fastest decisions on the model's mesh, and smaller ones too where state or saved values take much memory.

    `room_bytes` is the memory of all layers on this mesh if each stage holds its share of them: their state, with
    hoisted copies, and the values saved for `in_flight` micro-batches, as many as the first stage has (0: saved values
    are not priced). Where all stages are `equal`, decisions whose state alone exceeds the room are dropped, but the
    smallest.
    """
    # The layers that stay of a run stand for equal ones: what is best for one of them is so for the other.
    intra_op = IntraOp(folded.graph, model, paired_ops=folded.paired_ops)
    state, copies = state_values(folded.graph), folded.copies()
    saved = saved_values(folded.graph, intra_op.saved_in_host)
    state_prices = MemoryPrices(s_per_byte=lowest_price(model), values=state, copies=copies)
    saved_prices = dataclasses.replace(state_prices, values=saved)
    several = copies | {v: copies.get(v, 1.0) * in_flight for v, _ in saved}
    home_prices = dataclasses.replace(state_prices, values=held_values(folded.graph))
    decided_by_choice: dict[tuple[int, ...], Decided] = {}

    def decide(terms: ObjectiveWeights) -> Sequence[int] | None:
        """The choice under these terms, which is added to those found."""
        prices = dataclasses.replace(state_prices, s_per_byte=terms.s_per_byte)
        if terms.in_flight:
            prices = dataclasses.replace(prices, values=state | saved, copies=several)
        solution = intra_op.solve(
            time_limit_s=time_limit_s, prices=prices, exposure=Exposure(terms.exposed_fraction), rounds=ROUNDS
        )
        if solution.status not in (Status.OPTIMAL, Status.FEASIBLE):
            return None
        decided_by_choice.setdefault(tuple(solution.choice), Decided(terms=terms, sharding=intra_op.decode(solution)))
        return solution.choice

    terms = ObjectiveWeights(s_per_byte=lowest_price(model), exposed_fraction=model.exposed_fraction)
    choice = decide(terms)
    if choice is not None and (state_bytes := intra_op.priced_bytes(choice, state_prices)) > STATE_SHARE * room_bytes:
        raised_s_per_byte = FIRST_PRICE * intra_op.cost(choice) / state_bytes
        if model.overlap.kinds:
            decide(ObjectiveWeights(s_per_byte=raised_s_per_byte, exposed_fraction=LEAST_EXPOSED_FRACTION))

        def is_lean(s_per_byte: float) -> bool | None:
            nonlocal terms, choice
            terms = dataclasses.replace(terms, s_per_byte=s_per_byte)
            choice = decide(terms)
            if choice is None:
                return None
            return intra_op.priced_bytes(choice, state_prices) <= STATE_SHARE * room_bytes

        search_price(is_lean, [raised_s_per_byte * PRICE_RISE**raised for raised in range(LEANER)])
    saved_bytes = in_flight * intra_op.priced_bytes(choice, saved_prices) if choice is not None else 0.0
    if choice is not None and saved_bytes > SAVED_SHARE * room_bytes:
        raised_s_per_byte = FIRST_PRICE * intra_op.cost(choice) / saved_bytes
        decide(dataclasses.replace(terms, s_per_byte=max(terms.s_per_byte, raised_s_per_byte), in_flight=in_flight))
    if not equal:
        return tuple(decided_by_choice.values())
    home_bytes = {choice: intra_op.priced_bytes(choice, home_prices) for choice in decided_by_choice}
    most_bytes = max(room_bytes, min(home_bytes.values(), default=0.0))
    over_limit = any(nbytes > room_bytes for nbytes in home_bytes.values())
    fitting = (decided for choice, decided in decided_by_choice.items() if home_bytes[choice] <= most_bytes)
    return tuple(dataclasses.replace(decided, over_limit=over_limit) for decided in fitting)
