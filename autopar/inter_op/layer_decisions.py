"""Decisions for a graph of layers on one mesh: the fastest, and leaner ones where state or what is saved is large."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from autopar.cost.cost_model import LEAST_EXPOSED_FRACTION, CostModel
from autopar.intra_op.ilp import ROUNDS, IntraOp, ObjectiveWeights
from autopar.intra_op.memory_prices import MemoryPrices, held_values, saved_values, state_values
from autopar.lowering.decisions import ShardingPlan
from autopar.passes.fold_layers import FoldedGraph
from autopar.solver import Status

# A byte always costs a little (a part of reading it once), so that of equally fast decisions the leanest is taken.
TIE_BREAKING_READS = 0.1
# Where state, or what is saved, is too large, decisions are made with a higher price on its bytes: how often that of
# state is raised, the first price (as a part of the step's time divided by the bytes) and by how much it rises.
LEANER, FIRST_PRICE, PRICE_RISE = 3, 0.1, 3.0
# Of the memory: where state takes less, no leaner decisions are looked for, and likewise for what is saved.
STATE_SHARE, SAVED_SHARE = 0.5, 0.25


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """Decisions for a graph on one mesh, and the terms under which they were made.

    `over_limit`: there were others whose state alone does not fit.
    """

    terms: ObjectiveWeights
    sharding: ShardingPlan
    over_limit: bool = False


Decisions = tuple[Decided, ...]


def lowest_price(model: CostModel) -> float:
    """Seconds that a byte of state costs where there is memory enough."""
    return TIE_BREAKING_READS / model.device.memory_bytes_per_s


def layer_decisions(
    contracted: FoldedGraph, model: CostModel, room_bytes: float, in_flight: int, equal: bool, time_limit_s: float
) -> Decisions:
    """The fastest decisions on the model's mesh, and leaner ones too where state takes much memory, or what is saved.

    `room_bytes` is what all layers could take on this mesh if each stage holds its share of them: their state, with
    copies of it that are kept, and what is saved of as many micro-batches as the first stage has `in_flight` (none:
    that is not asked). Where all stages are `equal`, decisions are left out whose state alone takes more, but for the
    leanest.
    """
    # The layers that stay of a run stand for equal ones: what is best for one of them is so for the other.
    intra_op = IntraOp(contracted.graph, model, alike=contracted.alike)
    state, saved, copies = state_values(contracted.graph), saved_values(contracted.graph), contracted.copies()
    state_prices = MemoryPrices(s_per_byte=lowest_price(model), values=state, copies=copies)
    saved_prices = dataclasses.replace(state_prices, values=saved)
    several = copies | {v: copies.get(v, 1.0) * in_flight for v, _ in saved}
    home_prices = dataclasses.replace(state_prices, values=held_values(contracted.graph))
    found: dict[tuple[int, ...], Decided] = {}

    def decide(terms: ObjectiveWeights) -> Sequence[int] | None:
        """The choice under these terms, which is added to those found."""
        prices = dataclasses.replace(state_prices, s_per_byte=terms.s_per_byte)
        if terms.in_flight:
            prices = dataclasses.replace(prices, values=state | saved, copies=several)
        solution = intra_op.solve(
            time_limit_s=time_limit_s, prices=prices, exposed_fraction=terms.exposed_fraction, rounds=ROUNDS
        )
        if solution.status not in (Status.OPTIMAL, Status.FEASIBLE):
            return None
        found.setdefault(tuple(solution.choice), Decided(terms=terms, sharding=intra_op.decode(solution)))
        return solution.choice

    terms = ObjectiveWeights(s_per_byte=lowest_price(model), exposed_fraction=model.exposed_fraction)
    choice = decide(terms)
    if choice is not None and (state_bytes := intra_op.priced_bytes(choice, state_prices)) > STATE_SHARE * room_bytes:
        dear = FIRST_PRICE * intra_op.cost(choice) / state_bytes
        if model.overlap.kinds:
            decide(ObjectiveWeights(s_per_byte=dear, exposed_fraction=LEAST_EXPOSED_FRACTION))
        for leaner in range(LEANER):
            terms = dataclasses.replace(terms, s_per_byte=dear * PRICE_RISE**leaner)
            choice = decide(terms)
            if choice is None or intra_op.priced_bytes(choice, state_prices) <= STATE_SHARE * room_bytes:
                break
    saved_bytes = in_flight * intra_op.priced_bytes(choice, saved_prices) if choice is not None else 0.0
    if choice is not None and saved_bytes > SAVED_SHARE * room_bytes:
        dear = FIRST_PRICE * intra_op.cost(choice) / saved_bytes
        decide(dataclasses.replace(terms, s_per_byte=max(terms.s_per_byte, dear), in_flight=in_flight))
    if not equal:
        return tuple(found.values())
    home_bytes = {choice: intra_op.priced_bytes(choice, home_prices) for choice in found}
    most_bytes = max(room_bytes, min(home_bytes.values(), default=0.0))
    over_limit = any(nbytes > room_bytes for nbytes in home_bytes.values())
    kept = (decided for choice, decided in found.items() if home_bytes[choice] <= most_bytes)
    return tuple(dataclasses.replace(decided, over_limit=over_limit) for decided in kept)
