"""The anytime core: prices on memory, message passing for the bound and a first choice, tree moves for a better one.

A round, at one set of prices: sweeps of messages (the bound), a choice decoded from them and last round's choice, both improved
by tree moves that ignore the limit but pay the prices (the Lagrangian's minimiser, nearly), the better one repaired to fit and
polished (the incumbent), and the master of `columns` for the next prices. Both cores work: the two searches, and the sweeps beside
the polishing. Rounds depend on the seed and on each other, never on time, so that a number of rounds gives the same answer again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from .columns import Columns
from .flat import Flat

TREE_NODES = 300  # the largest tree of a move
MIX = 0.6  # of the best prices in those tried, Wentges' weight
SAFETY = 1e-9  # of the bound: sums of floats in another order differ by less


@dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """The cheapest choice found that fits (None = none yet), the bound, and the prices and messages that prove it."""

    choice: np.ndarray | None
    cost: float
    bound: float
    price: np.ndarray
    messages: np.ndarray
    rounds: int


class Loops:
    """The compiled loops bound to one problem's arrays."""

    def __init__(self, flat: Flat):
        from . import messages, search

        self.flat = flat
        self._messages, self._search = messages, search
        sizes = np.diff(flat.first)
        lengths = sizes[flat.source] + sizes[flat.target]
        self.head = np.concatenate([[0], np.cumsum(lengths)])[:-1].astype(np.int64)
        self.tail = self.head + sizes[flat.source]
        self.length = int(lengths.sum())
        self.work = np.zeros(2 * int(sizes.max(initial=1)) + 2)
        self.part = np.zeros(int(flat.first[-1]))
        self.belief = np.zeros(int(flat.first[-1]))
        self.theta = flat.cost.copy()
        self.unlimited = np.full(len(flat.room), 2**61, dtype=np.int64)

    def _graph(self, messages: np.ndarray) -> tuple:
        f = self.flat
        return (
            f.first,
            self.theta,
            f.source,
            f.target,
            f.start,
            f.matrix,
            f.near_first,
            f.near,
            self.head,
            self.tail,
            messages,
        )

    def _spans(self) -> tuple:
        f = self.flat
        return f.span_first, f.low, f.high, f.span_bytes, f.bytes

    def set_price(self, price: np.ndarray) -> None:
        """Make the sweeps, the bound and the decoding charge these prices."""
        self._messages.priced(self.flat.first, self.flat.cost, *self._spans(), price, self.theta)

    def sweep(self, messages: np.ndarray, pairs: int) -> None:
        """Passes back and forth."""
        for _ in range(pairs):
            self._messages.sweep(*self._graph(messages), False, self.work)
            self._messages.sweep(*self._graph(messages), True, self.work)

    def bound(self, messages: np.ndarray, price: np.ndarray) -> float:
        """The bound that messages and prices prove."""
        value = self._messages.bound(*self._graph(messages), self.part, self.belief)
        value -= float(price @ self.flat.room)
        return value - SAFETY * abs(value)

    def decode(self, messages: np.ndarray) -> np.ndarray:
        """A choice read off the messages; a sweep is made first."""
        choice = np.zeros(self.flat.nodes, dtype=np.int64)
        self._messages.sweep(*self._graph(messages), False, self.work)
        self._messages.decode(*self._graph(messages), True, self.work, choice)
        return choice

    def extra(self, messages: np.ndarray) -> np.ndarray:
        """How much the bound rises at least with each strategy."""
        extra = np.zeros(int(self.flat.first[-1]))
        self._messages.marginals(*self._graph(messages), extra)
        return extra

    def used(self, choice: np.ndarray) -> np.ndarray:
        """Bytes beyond the least in every row."""
        share = np.zeros(int(self.flat.first[-1]))
        share[self.flat.first[:-1] + choice] = 1.0
        return self._messages.usage(self.flat.first, *self._spans(), share, len(self.flat.room))

    def left(self, choice: np.ndarray) -> np.ndarray:
        """Bytes still free in every row."""
        return self.flat.room - np.rint(self.used(choice)).astype(np.int64)

    def cost(self, choice: np.ndarray) -> float:
        """Cost of a choice."""
        f = self.flat
        width = np.diff(f.first)[f.target]
        edges = f.matrix[f.start + choice[f.source] * width + choice[f.target]]
        return float(f.cost[f.first[:-1] + choice].sum() + edges.sum())

    def search(
        self, choice: np.ndarray, left: np.ndarray, price: np.ndarray, *, seed: int, moves: int, pull: float
    ) -> None:
        """Tree moves; choice and left are updated."""
        f = self.flat
        self._search.search(
            f.first, f.cost, f.source, f.target, f.start, f.matrix, f.near_first, f.near, *self._spans(),
            price, choice, left, seed, moves, TREE_NODES, pull,
        )  # fmt: skip


def least_memory(flat: Flat) -> np.ndarray:
    """The choice of the least bytes times rows at every node, the cheapest of several: mostly fits where anything does."""
    choice = np.zeros(flat.nodes, dtype=np.int64)
    for node in range(flat.nodes):
        costs = flat.cost[flat.first[node] : flat.first[node + 1]]
        if len(costs) == 1:
            continue
        held = np.zeros(len(costs))
        for span in range(flat.span_first[node], flat.span_first[node + 1]):
            at = flat.span_bytes[span]
            held += flat.bytes[at : at + len(costs)] * float(flat.high[span] - flat.low[span])
        choice[node] = np.lexsort((costs, held))[0]
    return choice


def improve(
    flat: Flat,
    *,
    deadline: float,
    rounds: int | None,
    seed: int,
    relative_gap: float,
    report: Callable[[np.ndarray, float], None],
    settle: Callable[[Best], bool],
    log: Callable[[str], None],
) -> Best:
    """Improve choice and bound until the deadline, the number of rounds, or the gap.

    deadline: on the clock of time.perf_counter. report: called at each better choice. settle: called now and then when prices have
    settled, to end the search where the exact program can take over; it says whether it did. log: called each round.
    """
    loops = Loops(flat)
    columns = Columns(flat.room)
    multi = int((np.diff(flat.first) > 1).sum())
    moves = int(np.clip(multi // 8, 100, 1000))
    none = np.zeros(len(flat.room))
    best_choice: np.ndarray | None = None
    best_cost = np.inf

    def offer(choice: np.ndarray, left: np.ndarray) -> bool:
        nonlocal best_choice, best_cost
        if len(left) and left.min() < 0:
            return False
        cost = loops.cost(choice)
        if cost < best_cost:
            best_choice, best_cost = choice.copy(), cost
            report(best_choice, best_cost)
        return True

    def over() -> bool:
        return time.perf_counter() >= deadline

    messages = np.zeros(loops.length)
    current = least_memory(flat)
    left = loops.left(current)
    if np.isfinite(loops.cost(current)):
        offer(current, left)
        for step in range(3):
            loops.search(current, left, none, seed=seed * 7919 + step, moves=moves, pull=0.0)
            if offer(current, left):
                columns.add(loops.cost(current), loops.used(current))
            if over():
                break
    loops.set_price(none)
    bound = -np.inf
    for _ in range(20):  # messages that have settled without prices follow prices quickly
        loops.sweep(messages, 10)
        before, bound = bound, loops.bound(messages, none)
        if over() or bound - before <= 1e-4 * abs(bound):
            break
    best_bound, centre, price, best_price = bound, none, none, none
    best_messages = messages.copy()
    candidate = current.copy()
    done = 0
    next_proof = 8
    pairs, weight = 5, MIX
    rng = np.random.default_rng(seed)

    def held() -> Best:
        return Best(
            choice=best_choice, cost=best_cost, bound=best_bound, price=best_price, messages=best_messages, rounds=done
        )

    def polish(choice: np.ndarray, rates: np.ndarray, number: int) -> tuple[np.ndarray, np.ndarray]:
        choice = choice.copy()
        free = loops.left(choice)
        loops.search(choice, free, rates, seed=number, moves=moves, pull=1.0)
        loops.search(choice, free, rates, seed=number + 1, moves=moves, pull=0.0)
        return choice, free

    def relax(choice: np.ndarray, rates: np.ndarray, number: int) -> tuple[float, float, np.ndarray, np.ndarray]:
        loops.search(choice, loops.unlimited.copy(), rates, seed=number, moves=moves, pull=1.0)
        cost, used = loops.cost(choice), loops.used(choice)
        return cost + float(rates @ used), cost, used, choice

    with ThreadPoolExecutor(max_workers=2) as pool:
        while not over() and (rounds is None or done < rounds):
            if best_cost - max(best_bound, bound) <= relative_gap * abs(best_cost) + 2 * SAFETY * abs(best_cost):
                break
            done += 1
            base = seed * 1_000_003 + done * 10
            polishing = pool.submit(polish, candidate, price, base)
            polishing_best = None if best_choice is None else pool.submit(polish, best_choice, centre, base + 2)
            loops.set_price(price)
            loops.sweep(messages, pairs)
            bound = loops.bound(messages, price)
            if bound > best_bound:
                best_bound, best_messages, best_price = bound, messages.copy(), price
            offer(*polishing.result())
            if polishing_best is not None:
                offer(*polishing_best.result())
            decoded = loops.decode(messages)
            found = [
                task.result()
                for task in (
                    pool.submit(relax, decoded, price, base + 4),
                    pool.submit(relax, candidate.copy(), price, base + 6),
                )
            ]
            found.sort(key=lambda entry: entry[0])
            reach, _, used, candidate = found[0]
            for _, cost, bytes_held, choice in found:
                columns.add(cost, bytes_held)
                offer(choice, flat.room - np.rint(bytes_held).astype(np.int64))
            fresh = columns.watch(used)
            master, value = columns.prices()
            if columns.value(price) >= columns.value(centre):
                centre = price
            known = reach - float(price @ flat.room)
            stuck = value - known <= 1e-4 * abs(value) and fresh == 0
            pairs = min(pairs * 2, 80) if stuck else 5
            weight = weight / 2 if stuck else MIX
            price = weight * centre + (1 - weight) * master
            if stuck:
                price = price * np.exp(rng.normal(0.0, 0.02, len(price)))
            log(
                f"round {done}: bound {bound:.7g} (best {best_bound:.9g}), master {value:.7g}, {len(columns.rows)} rows, "
                f"{pairs} sweeps, cost {best_cost:.10g}"
            )
            if best_choice is not None and stuck and done >= next_proof:
                next_proof = done * 5 // 4 + 4
                if settle(held()):
                    break
    return held()
