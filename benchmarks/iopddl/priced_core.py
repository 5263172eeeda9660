"""Prices on memory for the anytime solver: Lagrangian relaxation of formula (4).

A round, at one set of prices: sweeps of messages (the bound), a choice decoded from them and last round's choice, both
improved by tree moves that ignore the limit but pay the prices (the Lagrangian's minimiser, nearly), the better one
repaired to fit and polished (the incumbent), and the master program for the next prices. In the end the integer program
searches among the best choices, and completes the proof (`Finish`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import numpy as np
from scipy.optimize import linprog

from autopar.solver.presolve import ConflictError, Reduction
from autopar.solver.solving import SAFETY, Limits, Loops, settle
from benchmarks.iopddl.integer_program import EXACT_ENTRIES, Answer, solve_lazily
from benchmarks.iopddl.memory import FlatLimited, Limited, entries, flatten_limited, keep, num_pairs, shares, used


class PricedLoops(Loops):
    """The compiled loops on node costs to which the prices of the bytes held are added."""

    flat: FlatLimited

    def __init__(self, flat: FlatLimited) -> None:
        from benchmarks.iopddl import loops

        super().__init__(flat)
        self._limited: Any = loops
        self.price = np.zeros(len(flat.room))

    def set_price(self, price: np.ndarray) -> None:
        """Make the sweeps, the bound and the decoding charge these prices."""
        f, self.price = self.flat, price
        self.theta = f.cost.copy()
        if len(f.low):
            owners, width, _, entry = entries(f)
            sums = np.concatenate([[0.0], np.cumsum(price)])
            rate = np.repeat(sums[f.high] - sums[f.low], width)
            held = f.bytes[np.repeat(f.span_bytes, width) + entry]
            np.add.at(self.theta, np.repeat(f.first[owners], width) + entry, rate * held)

    def bound(self, messages: np.ndarray) -> float:
        """The bound that messages and prices prove."""
        value = super().bound(messages) - float(self.price @ self.flat.room)
        return value - SAFETY * abs(value)

    def used(self, choice: np.ndarray) -> np.ndarray:
        """Bytes beyond the least in every row."""
        return used(self.flat, shares(self.flat, choice))

    def left(self, choice: np.ndarray) -> np.ndarray:
        """Bytes still free in every row."""
        return self.flat.room - np.rint(self.used(choice)).astype(np.int64)

    def search(
        self, choice: np.ndarray, *, seed: int, moves: int, price: np.ndarray | None = None, limited: bool = True
    ) -> None:
        """Tree moves that pay a price, and within the limit; the choice is updated."""
        f = self.flat
        left = self.left(choice) if limited else np.full(len(f.room), 2**61, dtype=np.int64)
        spans = (f.span_first, f.low, f.high, f.span_bytes, f.bytes)
        price = np.zeros(len(f.room)) if price is None else price
        self._limited.search(f.arrays, spans, price, choice, left, seed % 2**32, moves, TREE_NODES)


# The master program of the Lagrangian, whose duals are the next prices on memory rows.
#
# Column generation (Dantzig and Wolfe 1960) over whole choices: min sum of m[k] cost[k] subject to sum of m[k] bytes[k,
# r] <= room[r] at the rows seen, sum of m[k] = 1; its duals are the rows' prices. Prices tried lie between these and
# the best known ones (Wentges, "Weighted Dantzig-Wolfe decomposition", 1997), or the first ones would swing from
# nothing to everything.

MOST_COLUMNS = 240  # more make the master slower than they improve it; the dearest at the current prices go first


class Columns:
    """Choices seen, by cost and bytes at every row, and the rows that the master prices."""

    def __init__(self, room: np.ndarray, dearest: float):
        """room: (R,) bytes. dearest: no choice costs more; it stands for the choice that fits until one is found."""
        self.room = np.maximum(room.astype(np.float64), 1.0)
        self.cost: list[float] = [dearest]
        self.used: list[np.ndarray] = [np.zeros(len(room))]
        self.rows: list[int] = []

    def add(self, cost: float, used: np.ndarray) -> None:
        """Add a choice; used: (R,) bytes beyond the least in every row."""
        self.cost.append(cost)
        self.used.append(used)

    def watch(self, used: np.ndarray) -> int:
        """Start to price the rows that a choice breaks the worst, one of each stretch of time; returns how many."""
        over = used / self.room - 1.0
        width = max(2, len(over) // 400)
        for row in self.rows:
            near = slice(max(0, row - width), row + width + 1)
            over[near] = np.where(over[near] < 0.05 + max(0.0, over[row]), -1.0, over[near])
        fresh = 0
        while fresh < 10 and len(over):
            row = int(np.argmax(over))
            if over[row] <= 1e-9:
                break
            self.rows.append(row)
            over[max(0, row - width) : row + width + 1] = -1.0
            fresh += 1
        return fresh

    def value(self, price: np.ndarray) -> float:
        """The least cost + price * (bytes - room) of the choices seen: the Lagrangian as far as it is known."""
        rows = self.rows
        rates = price[rows]
        room = self.room[rows]
        return min(c + float(rates @ (u[rows] - room)) for c, u in zip(self.cost, self.used, strict=True))

    def prices(self) -> tuple[np.ndarray, float]:
        """The master's prices, (R,) cost a byte, and its value."""
        price = np.zeros(len(self.room))
        cost = np.array(self.cost)
        low = float(cost.min())
        if not self.rows:
            return price, low
        scale = max(float(cost.max()) - low, 1e-9 * abs(low), 1e-300)
        table = np.array([u[self.rows] for u in self.used]) / self.room[self.rows]  # (K, rows)
        ones = np.ones((1, len(cost)))
        result = linprog((cost - low) / scale, table.T, np.ones(len(self.rows)), ones, np.ones(1))
        assert result.status == 0, "its first column fits, so the master has an optimum"
        price[self.rows] = np.maximum(0.0, -result.ineqlin.marginals) * scale / self.room[self.rows]
        self._forget(price)
        return price, float(result.fun) * scale + low

    def _forget(self, price: np.ndarray) -> None:
        """Drop the columns of the largest reduced cost once there are too many; the first one fits and stays."""
        if len(self.cost) <= MOST_COLUMNS:
            return
        rates = price[self.rows]
        dear = [c + float(rates @ u[self.rows]) for c, u in zip(self.cost, self.used, strict=True)]
        dear[0] = -np.inf
        keep = sorted(np.argsort(dear, kind="stable")[: MOST_COLUMNS * 2 // 3].tolist())
        self.cost = [self.cost[k] for k in keep]
        self.used = [self.used[k] for k in keep]


MIX = 0.6  # of the best prices in those tried, Wentges' weight
FEW_SWEEPS, MANY_SWEEPS = 5, 80  # a round, while prices move; once they have settled
RECENT = 32  # choices kept for `Finish` to combine
TREE_NODES = 300  # the largest tree of a move


class PricedCore:
    """The state between rounds: the cheapest choice that fits (None = none yet), prices and messages with the bound
    that they prove. Rounds depend on the seed and on each other, never on time.
    """

    def __init__(self, loops: PricedLoops, start: np.ndarray, seed: int, report: Callable[[float], None]) -> None:
        """start: need not fit. report: called with the cost of each better choice."""
        self.loops, self.flat, self.report, self.seed = loops, loops.flat, report, seed
        self.rng = np.random.default_rng(seed)
        multi = int((np.diff(self.flat.first) > 1).sum())
        self.moves = int(np.clip(multi // 8, 100, 1000))
        self.columns = Columns(self.flat.room, _dearest(self.flat))
        self.choice: np.ndarray | None = None
        self.cost, self.bound = np.inf, -np.inf
        self.candidate = start.copy()
        self.recent: list[np.ndarray] = []  # the last choices that minimised cost and price, or fitted, latest last
        self.messages = self.best_messages = np.zeros(loops.length)
        self.price = self.centre = self.best_price = np.zeros(len(self.flat.room))
        self.centre_used = np.zeros(len(self.flat.room))
        self.pairs, self.weight = FEW_SWEEPS, MIX
        self.done, self.settled = 0, False

    def offer(self, choice: np.ndarray) -> None:
        """Take a choice for the best one if it fits and costs less."""
        cost = self.loops.cost(choice)
        if cost < self.cost and self.loops.left(choice).min(initial=0) >= 0:
            self.choice, self.cost = choice.copy(), cost
            self._remember(choice)
            self.report(cost)

    def _remember(self, choice: np.ndarray) -> None:
        self.recent = [*self.recent, choice.copy()][-RECENT:]

    def warm_up(self, deadline: float) -> None:
        """Tree moves from the start, and messages without prices, which then follow prices quickly."""
        self.offer(self.candidate)
        for step in range(3):
            self.loops.search(self.candidate, seed=self.seed + step, moves=self.moves)
            self.offer(self.candidate)
            if time.perf_counter() >= deadline:
                return
        if np.isfinite(self.loops.cost(self.candidate)):
            self.columns.add(self.loops.cost(self.candidate), self.loops.used(self.candidate))
        self.bound = settle(self.loops, self.messages, deadline, math.inf)
        self.best_messages = self.messages.copy()

    def raise_bound(self) -> float:
        """A round's sweeps at its prices, and the bound after them; the best one is kept."""
        self.loops.set_price(self.price)
        self.loops.sweep(self.messages, self.pairs)
        bound = self.loops.bound(self.messages)
        if bound > self.bound:
            self.bound, self.best_messages, self.best_price = bound, self.messages.copy(), self.price
        return bound

    def round(self, pool: Executor) -> str:
        """One round, as the head of this file has it; returns a line on it."""
        self.done += 1
        base = self.seed * 1_000_003 + self.done * 10
        polishing = [pool.submit(self._polish, self.candidate, self.price, base)]
        if self.choice is not None:
            polishing.append(pool.submit(self._polish, self.choice, self.centre, base + 2))
        bound = self.raise_bound()
        for task in polishing:
            self.offer(task.result())
        decoded = self.loops.decode(self.messages)
        relaxing = [
            pool.submit(self._relax, choice, base + 4 + 2 * k)
            for k, choice in enumerate((decoded, self.candidate.copy()))
        ]
        relaxed = sorted((task.result() for task in relaxing), key=lambda entry: entry[0])
        for _, cost, held, choice in relaxed:
            if np.isfinite(cost):
                self.columns.add(cost, held)
                self.offer(choice)
        reach, _, held, self.candidate = relaxed[0]
        self._remember(self.candidate)
        return f"round {self.done}: bound {bound:.7g} (best {self.bound:.9g}), {self._next_prices(reach, held)}"

    def _polish(self, choice: np.ndarray, price: np.ndarray, seed: int) -> np.ndarray:
        """Make a choice fit by moves that pay the prices, then improve it by moves that do not."""
        choice = choice.copy()
        self.loops.search(choice, seed=seed, moves=self.moves, price=price)
        self.loops.search(choice, seed=seed + 1, moves=self.moves)
        return choice

    def _relax(self, choice: np.ndarray, seed: int) -> tuple[float, float, np.ndarray, np.ndarray]:
        """Improve a choice that pays the prices and has no limit: cost and price, cost, bytes, choice."""
        self.loops.search(choice, seed=seed, moves=self.moves, price=self.price, limited=False)
        cost, held = self.loops.cost(choice), self.loops.used(choice)
        return cost + float(self.price @ held), cost, held, choice

    def _next_prices(self, reach: float, used: np.ndarray) -> str:
        """Prices between the master's and the best; once they have settled, close to them and with more sweeps."""
        fresh = self.columns.watch(used)
        master, value = self.columns.prices()
        if self.columns.value(self.price) >= self.columns.value(self.centre):
            self.centre, self.centre_used = self.price, used
        reached = reach - float(self.price @ self.flat.room)
        self.settled = value - reached <= 1e-4 * abs(value) and fresh == 0
        self.pairs = min(self.pairs * 2, MANY_SWEEPS) if self.settled else FEW_SWEEPS
        self.weight = self.weight / 2 if self.settled else MIX
        self.price = self.weight * self.centre + (1 - self.weight) * master
        if self.done % 2 and not self.settled and np.isfinite(self.cost):
            self.price = self._step_uphill()
        if self.settled:
            self.price = self.price * np.exp(self.rng.normal(0.0, 0.02, len(self.price)))
        rows = len(self.columns.rows)
        return f"master {value:.7g}, {rows} rows, {self.pairs} sweeps next, cost {self.cost:.10g}"

    def _step_uphill(self) -> np.ndarray:
        """A subgradient step from the best prices, as long as the gap allows (Polyak 1969).

        With many rows that bind apart from each other the master needs a column for each of them, and this does not.
        """
        rows = self.columns.rows
        slope = self.centre_used[rows] / self.columns.room[rows] - 1.0
        slope[(self.centre[rows] <= 0) & (slope < 0)] = 0.0
        steep = float(slope @ slope)
        if steep == 0.0:
            return self.centre
        price = self.centre.copy()
        length = 0.5 * max(0.0, self.cost - self.columns.value(self.centre)) / steep
        price[rows] = np.maximum(0.0, price[rows] + length * slope / self.columns.room[rows])
        return price

    def closed(self) -> bool:
        """Whether the best choice is proven."""
        gap = self.cost - self.bound
        return bool(np.isfinite(gap)) and gap <= 2 * SAFETY * abs(self.cost)


def improve(
    core: PricedCore,
    limits: Limits,
    finish: Callable[[PricedCore], tuple[np.ndarray | None, bool]],
    log: Callable[[str], None],
) -> None:
    """Improve choice and bound until a limit is reached.

    finish: called now and then once prices have settled, for a better choice or None, and whether the search may end.
    log: called each round.
    """
    core.warm_up(limits.deadline)
    next_settle, longest_s = 8, 0.0
    with ThreadPoolExecutor(max_workers=2) as pool:
        while (limits.rounds is None or core.done < limits.rounds) and not core.closed():
            if core.choice is not None and core.settled and core.done >= next_settle:
                choice, finished = finish(core)
                if choice is not None:
                    core.offer(choice)
                if finished:
                    break
                next_settle = core.done * 9 // 8 + 4
            begun = time.perf_counter()
            if begun + longest_s >= limits.deadline:
                break
            log(core.round(pool))
            longest_s = max(time.perf_counter() - begun, 0.7 * longest_s)


def _dearest(flat: FlatLimited) -> float:
    """No allowed choice costs more."""
    cost = np.where(np.isfinite(flat.cost), flat.cost, -np.inf)
    total = float(np.maximum.reduceat(cost, flat.first[:-1]).sum()) if flat.nodes else 0.0
    width = np.diff(flat.first)[flat.source] * np.diff(flat.first)[flat.target]
    tops: dict[tuple[int, int], float] = {}
    for begin, size in zip(flat.start.tolist(), width.tolist(), strict=True):
        if (begin, size) not in tops:
            block = flat.matrix[begin : begin + size]
            tops[begin, size] = float(block[np.isfinite(block)].max())
        total += tops[begin, size]
    return total


PROOF_PART = 0.4  # of the time left that an attempt at the proof may take
COMBINE_PART = 0.08  # of the time left that a search among recent choices may take


class Finish:
    """Called by `improve` when prices have settled; keeps the bound that the program proved."""

    def __init__(self, limited: Limited, flat: FlatLimited, deadline: float, log: Callable[[str], None]) -> None:
        self.limited, self.flat, self.deadline, self.log = limited, flat, deadline, log
        self.bound = -math.inf
        self.longest_s = 0.0

    def settle(self, core: PricedCore) -> tuple[np.ndarray | None, bool]:
        """Finish the proof if fixing leaves little; if not, look for a better choice in what recent ones take."""
        begun = time.perf_counter()
        if self.deadline - begun < 2 * self.longest_s + 1:
            return None, False
        settled = self._prove(core)
        if settled is None:
            settled = self._search_recent(core), False
        self.longest_s = max(self.longest_s, time.perf_counter() - begun)
        return settled

    def _prove(self, core: PricedCore) -> tuple[np.ndarray | None, bool] | None:
        """The cheapest choice of all, by the program on the strategies not ruled out; None when these are too many."""
        smaller = drop_costly(self.limited, core)
        if smaller is None:
            self.bound = core.cost
            return None, True
        pairs = num_pairs(smaller[0].problem)
        self.log(f"fixing leaves {len(smaller[0].problem.node_cost)} nodes, {pairs} pairs")
        if pairs > EXACT_ENTRIES:
            return None
        answer, choice = self._solve(*smaller, core, PROOF_PART)
        self.bound = max(self.bound, min(core.cost, answer.bound + smaller[1].offset))
        return choice, answer.proven

    def _search_recent(self, core: PricedCore) -> np.ndarray | None:
        assert core.choice is not None, "prices are only settled around a choice that fits"
        recent = list({choice.tobytes(): choice for choice in core.recent}.values())
        while True:
            smaller, reduction = combine(self.limited, (core.choice, *recent))
            pairs = num_pairs(smaller.problem)
            self.log(f"{len(recent)} recent choices leave {len(smaller.problem.node_cost)} nodes, {pairs} pairs")
            if pairs <= EXACT_ENTRIES:
                return self._solve(smaller, reduction, core, COMBINE_PART)[1]
            recent = recent[len(recent) // 2 + 1 :]

    def _solve(
        self, smaller: Limited, reduction: Reduction, core: PricedCore, part: float
    ) -> tuple[Answer, np.ndarray | None]:
        """The program on a smaller problem, begun with the rows that have a price, in a part of the time left."""
        now = time.perf_counter()
        if not smaller.problem.node_cost:
            choice: tuple[int, ...] | None = ()
            answer = Answer(choice=(), bound=0.0, proven=True)
        else:
            flat = flatten_limited(smaller)
            rows = np.flatnonzero(np.isin(flat.times, self.flat.times[core.best_price > 0])).tolist()
            answer = solve_lazily(smaller.problem, flat, now + part * (self.deadline - now), rows=rows)
            choice = answer.choice
        return answer, None if choice is None else np.array(reduction.undo(choice), dtype=np.int64)


def drop_costly(limited: Limited, core: PricedCore) -> tuple[Limited, Reduction] | None:
    """Keep the strategies with which the bound stays below the cost at hand, then reduce.

    None proves that no choice is cheaper. What is left has every choice that is cheaper, if there is any.
    """
    core.loops.set_price(core.best_price)
    core.loops.bound(core.best_messages)
    cheap = np.flatnonzero(core.loops.extra <= core.cost - core.bound + SAFETY * abs(core.cost))
    first = core.flat.first
    strategies = np.split(cheap, np.searchsorted(cheap, first[1:-1]))
    strategies = [kept - begin for kept, begin in zip(strategies, first[:-1], strict=True)]
    if any(len(kept) == 0 for kept in strategies):
        return None
    try:
        return keep(limited, strategies)
    except ConflictError:
        return None


def combine(limited: Limited, choices: Sequence[np.ndarray]) -> tuple[Limited, Reduction]:
    """Keep the strategies that some of the choices take, then reduce: where they agree, nothing is left to choose.

    After relaxation induced neighbourhoods (Danna, Rothberg and Le Pape, Mathematical Programming 2005), with the
    Lagrangian's minimisers in place of the linear program's.
    """
    strategies_of = np.array(choices)
    return keep(limited, [np.unique(strategies_of[:, node]) for node in range(strategies_of.shape[1])])
