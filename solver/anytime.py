"""The anytime solver: prices on memory, message passing for the bound and a first choice, tree moves for better ones.

A round, at one set of prices: sweeps of messages (the bound), a choice decoded from them and last round's choice, both
improved by tree moves that ignore the limit but pay the prices (the Lagrangian's minimiser, nearly), the better one
repaired to fit and polished (the incumbent), and the master program for the next prices. Both cores work: the two
searches, and the sweeps beside the polishing. Rounds depend on the seed and on each other, never on time, so that a
number of rounds gives the same answer again.

Where no memory row can bind there are no prices to change what a round looks at: the next one starts from the best
choice with most nodes drawn anew (iterated local search, Lourenço, Martin and Stützle 2003). In the end the integer
program searches among the best choices, and completes the proof (`Finish`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autopar.solver.elimination import solve_by_tables
from autopar.solver.exhaustive_search import evaluate
from autopar.solver.integer_program import EXACT_ENTRIES, Answer, Settings, solve_lazily
from autopar.solver.presolve import ConflictError, Reduction, chain, keep_strategies, reduce_all
from autopar.solver.problem import Flat, Problem, flatten

TREE_NODES = 300  # the largest tree of a move
SAFETY = 1e-9  # of the bound: sums of floats in another order differ by less


class Loops:
    """The compiled loops bound to one problem's arrays."""

    def __init__(self, flat: Flat):
        from autopar.solver import local_search, message_passing

        self.flat = flat
        self._messages: Any = message_passing  # numba's types do not know the arguments of what it compiles
        self._search: Any = local_search
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
            price, choice, left, seed % 2**32, moves, TREE_NODES, pull,
        )  # fmt: skip


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
        from ortools.math_opt import model_pb2
        from ortools.math_opt.python import mathopt

        price = np.zeros(len(self.room))
        cost = np.array(self.cost)
        low = float(cost.min())
        if not self.rows:
            return price, low
        scale = max(float(cost.max()) - low, 1e-9 * abs(low), 1e-300)
        table = np.array([u[self.rows] for u in self.used]) / self.room[self.rows]  # (K, rows)
        count, rows = table.shape
        proto = model_pb2.ModelProto()
        proto.variables.ids.extend(range(count))
        proto.variables.lower_bounds.extend([0.0] * count)
        proto.variables.upper_bounds.extend([np.inf] * count)
        proto.variables.integers.extend([False] * count)
        proto.objective.linear_coefficients.ids.extend(range(count))
        proto.objective.linear_coefficients.values.extend(((cost - low) / scale).tolist())
        proto.linear_constraints.ids.extend(range(rows + 1))
        proto.linear_constraints.lower_bounds.extend([-np.inf] * rows + [1.0])
        proto.linear_constraints.upper_bounds.extend([1.0] * (rows + 1))
        block = np.vstack([table.T, np.ones((1, count))])
        row, column = np.nonzero(block)
        proto.linear_constraint_matrix.row_ids.extend(row.tolist())
        proto.linear_constraint_matrix.column_ids.extend(column.tolist())
        proto.linear_constraint_matrix.coefficients.extend(block[row, column].tolist())
        model = mathopt.Model.from_model_proto(proto)
        result = mathopt.solve(model, mathopt.SolverType.GLOP)
        assert result.has_dual_feasible_solution(), "its first column fits, so the master has an optimum"
        duals = result.dual_values()
        for number, at in enumerate(self.rows):
            price[at] = max(0.0, -duals[model.get_linear_constraint(number)]) * scale / self.room[at]
        self._forget(price)
        return price, result.objective_value() * scale + low

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
RECENT = 32  # choices kept for `settle` to combine
DRAWN = 0.6  # of the nodes drawn anew before a round without prices: tree moves put right what they can


@dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """The cheapest choice found that fits (None = none yet), the bound, and the prices and messages that prove it.

    recent: the last choices that minimised cost and price, or fitted, latest last.
    """

    choice: np.ndarray | None
    cost: float
    bound: float
    price: np.ndarray
    messages: np.ndarray
    recent: tuple[np.ndarray, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Settled:
    """What `settle` found: a better choice or none, and whether the search may end there."""

    choice: np.ndarray | None
    finished: bool


class Core:
    """The state between rounds."""

    def __init__(self, flat: Flat, start: np.ndarray, seed: int, report: Callable[[np.ndarray, float], None]):
        self.flat = flat
        self.loops = Loops(flat)
        self.report = report
        self.seed = seed
        self.rng = np.random.default_rng(seed)
        multi = int((np.diff(flat.first) > 1).sum())
        self.moves = int(np.clip(multi // 8, 100, 1000))
        self.columns = Columns(flat.room, _dearest(flat))
        self.choice: np.ndarray | None = None
        self.cost = np.inf
        self.candidate = start.copy()
        self.recent: list[np.ndarray] = []
        self.messages = np.zeros(self.loops.length)
        self.price = self.centre = self.best_price = np.zeros(len(flat.room))
        self.bound = self.best_bound = -np.inf
        self.best_messages = self.messages
        self.centre_used = np.zeros(len(flat.room))
        self.pairs, self.weight = FEW_SWEEPS, MIX
        self.done = 0
        self.settled = False

    def offer(self, choice: np.ndarray, free_bytes: np.ndarray) -> None:
        """Take a choice for the best one if it fits and costs less. left: (R,) bytes free."""
        if len(free_bytes) and free_bytes.min() < 0:
            return
        cost = self.loops.cost(choice)
        if cost < self.cost:
            self.choice, self.cost = choice.copy(), cost
            self._remember(choice)
            self.report(self.choice, cost)

    def _remember(self, choice: np.ndarray) -> None:
        self.recent = [*self.recent, choice.copy()][-RECENT:]

    def warm_up(self, deadline: float, cutoff: float = math.inf) -> None:
        """Tree moves from the start, and messages without prices until they settle, or prove the cutoff."""
        free_bytes = self.loops.left(self.candidate)
        self.offer(self.candidate, free_bytes)
        for step in range(3):
            self.loops.search(self.candidate, free_bytes, self.price, seed=self.seed + step, moves=self.moves, pull=0.0)
            self.offer(self.candidate, free_bytes)
            if time.perf_counter() >= deadline:
                return
        if np.isfinite(self.loops.cost(self.candidate)):
            self.columns.add(self.loops.cost(self.candidate), self.loops.used(self.candidate))
        self.loops.set_price(self.price)
        settled = False  # messages that have settled without prices follow prices quickly
        while not settled and self.bound < cutoff and time.perf_counter() < deadline:
            self.loops.sweep(self.messages, 10)
            last_bound, self.bound = self.bound, self.loops.bound(self.messages, self.price)
            settled = self.bound - last_bound <= 1e-4 * abs(self.bound)
        self.best_bound, self.best_messages = self.bound, self.messages.copy()

    def round(self, pool: Executor) -> str:
        """One round, as the head of this file has it; returns a line on it."""
        self.done += 1
        base = self.seed * 1_000_003 + self.done * 10
        polishing = [pool.submit(self._polish, self.candidate, self.price, base)]
        if self.choice is not None:
            polishing.append(pool.submit(self._polish, self.choice, self.centre, base + 2))
        self.loops.set_price(self.price)
        self.loops.sweep(self.messages, self.pairs)
        self.bound = self.loops.bound(self.messages, self.price)
        if self.bound > self.best_bound:
            self.best_bound, self.best_messages, self.best_price = self.bound, self.messages.copy(), self.price
        for task in polishing:
            self.offer(*task.result())
        decoded = self.loops.decode(self.messages)
        relaxing = [
            pool.submit(self._relax, choice, base + 4 + 2 * k)
            for k, choice in enumerate((decoded, self.candidate.copy()))
        ]
        relaxed = sorted((task.result() for task in relaxing), key=lambda entry: entry[0])
        for _, cost, used, choice in relaxed:
            if np.isfinite(cost):
                self.columns.add(cost, used)
                self.offer(choice, self.flat.room - np.rint(used).astype(np.int64))
        reach, _, used, self.candidate = relaxed[0]
        self._remember(self.candidate)
        line = self._next_prices(reach, used)
        if not len(self.flat.room) and self.choice is not None:
            self.candidate = self._drawn_anew(self.choice)
        return line

    def _drawn_anew(self, choice: np.ndarray) -> np.ndarray:
        """The choice with some nodes at random strategies of theirs."""
        choice, flat = choice.copy(), self.flat
        for node in np.flatnonzero(self.rng.random(len(choice)) < DRAWN).tolist():
            begin, end = int(flat.first[node]), int(flat.first[node + 1])
            choice[node] = self.rng.choice(np.flatnonzero(np.isfinite(flat.cost[begin:end])))
        return choice

    def _polish(self, choice: np.ndarray, price: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Make a choice fit by moves that pay the prices, then improve it by moves that do not."""
        choice = choice.copy()
        free_bytes = self.loops.left(choice)
        self.loops.search(choice, free_bytes, price, seed=seed, moves=self.moves, pull=1.0)
        self.loops.search(choice, free_bytes, price, seed=seed + 1, moves=self.moves, pull=0.0)
        return choice, free_bytes

    def _relax(self, choice: np.ndarray, seed: int) -> tuple[float, float, np.ndarray, np.ndarray]:
        """Improve a choice that pays the prices and has no limit: cost and price, cost, bytes, choice."""
        self.loops.search(choice, self.loops.unlimited.copy(), self.price, seed=seed, moves=self.moves, pull=1.0)
        cost, used = self.loops.cost(choice), self.loops.used(choice)
        return cost + float(self.price @ used), cost, used, choice

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
        return (
            f"round {self.done}: bound {self.bound:.7g} (best {self.best_bound:.9g}), master {value:.7g}, "
            f"{len(self.columns.rows)} rows, {self.pairs} sweeps next, cost {self.cost:.10g}"
        )

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

    def best(self) -> Best:
        """What is known now."""
        return Best(
            choice=self.choice,
            cost=self.cost,
            bound=self.best_bound,
            price=self.best_price,
            messages=self.best_messages,
            recent=tuple(self.recent),
        )

    def closed(self, relative_gap: float) -> bool:
        """Whether the best choice is as good as asked for."""
        gap = self.cost - self.best_bound
        return bool(np.isfinite(gap)) and gap <= (relative_gap + 2 * SAFETY) * abs(self.cost)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When the search ends: at a time on the clock of time.perf_counter, after so many rounds (None = any number), once
    choice and bound are as near as the gap, or once the bound has reached the cutoff.
    """

    deadline: float
    rounds: int | None
    relative_gap: float
    cutoff: float = math.inf


def improve(
    flat: Flat,
    *,
    start: np.ndarray,
    seed: int,
    limits: Limits,
    report: Callable[[np.ndarray, float], None],
    settle: Callable[[Best], Settled] | None,
    log: Callable[[str], None],
) -> Best:
    """Improve choice and bound until a limit is reached.

    start: a choice to begin from, which need not fit. report: called at each better choice. settle: called now and
    then once prices have settled, to search among the best choices and to end the search where the exact program can
    take over (None = not at all). log: called each round.
    """
    core = Core(flat, start, seed, report)
    core.warm_up(limits.deadline, limits.cutoff)
    next_settle = 8 if len(flat.room) else 0
    longest_s = 0.0
    with ThreadPoolExecutor(max_workers=2) as pool:
        while (limits.rounds is None or core.done < limits.rounds) and not core.closed(limits.relative_gap):
            if core.best_bound >= limits.cutoff:
                break
            has_settled = core.settled or not len(flat.room)
            if settle is not None and core.choice is not None and has_settled and core.done >= next_settle:
                settled = settle(core.best())
                if settled.choice is not None:
                    core.offer(settled.choice, core.loops.left(settled.choice))
                if settled.finished:
                    break
                next_settle = core.done * 9 // 8 + 4
            begun = time.perf_counter()
            if begun + longest_s >= limits.deadline:
                break
            log(core.round(pool))
            longest_s = max(time.perf_counter() - begun, 0.7 * longest_s)
    return core.best()


def _dearest(flat: Flat) -> float:
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


# Reduced-cost fixing: strategies that no choice cheaper than the incumbent can take, by the bound of the messages.


def drop_costly(problem: Problem, flat: Flat, best: Best) -> Reduction | None:
    """Keep the strategies with which the bound stays below the cost at hand, then reduce; None when a node has none.

    None proves that no choice is cheaper. What is left has every choice that is cheaper, if there is any.

    Raises: ConflictError when the strategies left exclude each other, which proves the same.
    """
    return keep_cheap(problem, flat, rises(flat, best), best.cost - best.bound + SAFETY * abs(best.cost))


def rises(flat: Flat, best: Best) -> np.ndarray:
    """By how much the bound rises at least with each strategy."""
    loops = Loops(flat)
    loops.set_price(best.price)
    return loops.extra(best.messages.copy())


def keep_cheap(problem: Problem, flat: Flat, rise: np.ndarray, most: float) -> Reduction | None:
    """Keep the strategies with which the bound rises by at most so much, then reduce; None when a node has none.

    Raises: ConflictError when the strategies left exclude each other.
    """
    strategies = [np.flatnonzero(rise[a:b] <= most) for a, b in zip(flat.first[:-1], flat.first[1:], strict=True)]
    if any(len(keep) == 0 for keep in strategies):
        return None
    smaller = keep_strategies(problem, strategies)
    return chain(smaller, reduce_all(smaller.problem))


def combine(problem: Problem, choices: Sequence[np.ndarray]) -> Reduction:
    """Keep the strategies that some of the choices take, then reduce: where they agree, nothing is left to choose.

    After relaxation induced neighbourhoods (Danna, Rothberg and Le Pape, Mathematical Programming 2005), with the
    Lagrangian's minimisers in place of the linear program's.
    """
    strategies_of = np.array(choices)
    strategies = [np.unique(strategies_of[:, node]) for node in range(strategies_of.shape[1])]
    smaller = keep_strategies(problem, strategies)
    return chain(smaller, reduce_all(smaller.problem))


# Tables within the anytime solver: the cheapest choice of strategies that the messages leave cheap, often with proof.
#
# Without memory rows the bound of the messages mostly is within a millionth of the optimum long before moves find the
# optimum itself. Every strategy of a choice that costs so little more than the bound raises the bound by no more than
# that, so that few strategies of each node are left, and tables over them are small (reduced-cost fixing, with the room
# that is tried in place of the one that is proven). The clock plays no part.

STEP = 8.0  # by how much a room is widened or narrowed
TRIES = 6


class TableSearch:
    """Called by `improve` for a reduced problem without memory rows; keeps the bound that it proved."""

    def __init__(self, problem: Problem, flat: Flat, relative_gap: float, log: Callable[[str], None]) -> None:
        self.problem, self.flat, self.relative_gap, self.log = problem, flat, relative_gap, log
        self.bound = -np.inf
        self.has_searched = False

    def settle(self, best: Best) -> Settled:
        """The cheapest choice among strategies that raise the bound by little, in a room as wide as tables allow.

        Every choice outside of a room costs the bound and the room at least. The search ends with a proof, and where
        messages that have come nearer to the optimum since the last time lead to nothing better.
        """
        rise, found, cost = rises(self.flat, best), None, best.cost
        slack = SAFETY * abs(best.cost)
        room, widest, too_wide = (cost - best.bound) / STEP**3, 0.0, np.inf
        for _ in range(TRIES):
            choice, fits = self._cheapest(rise, room)
            if fits:
                widest = room
                its_cost = np.inf if choice is None else evaluate(self.problem, choice.tolist())[0]
                if its_cost < cost - slack:
                    found, cost = choice, its_cost
                self.bound = max(self.bound, min(cost, best.bound + room - slack))
                self.log(f"tables in a room of {room:.3g}: cost {cost:.10g}, bound {self.bound:.10g}")
                if cost - self.bound <= self.relative_gap * abs(cost) + 2 * slack:
                    return Settled(choice=found, finished=True)
            else:
                too_wide = room
            wider = min(widest * STEP, cost - best.bound + slack) if widest else room / STEP
            room = wider if wider < too_wide else math.sqrt(widest * too_wide)
        again, self.has_searched = self.has_searched, self.has_searched or widest > 0
        return Settled(choice=found, finished=again and widest > 0 and found is None)

    def _cheapest(self, rise: np.ndarray, room: float) -> tuple[np.ndarray | None, bool]:
        """The cheapest choice in a room, None where there is none; and whether its tables are small enough."""
        try:
            smaller = keep_cheap(self.problem, self.flat, rise, room)
        except ConflictError:
            return None, True
        if smaller is None:
            return None, True
        choice = solve_by_tables(smaller.problem)
        return (None, False) if choice is None else (np.array(smaller.undo(choice), dtype=np.int64), True)


PROOF_PART = 0.4  # of the time left that an attempt at the proof may take
COMBINE_PART = 0.08  # of the time left that a search among recent choices may take


class Finish:
    """Called by `improve` when prices have settled; keeps the bound that the program proved."""

    def __init__(self, problem: Problem, flat: Flat, settings: Settings, log: Callable[[str], None]):
        self.problem = problem
        self.flat = flat
        self.settings = settings
        self.log = log
        self.bound = -math.inf
        self.longest_s = 0.0

    def settle(self, best: Best) -> Settled:
        """Finish the proof if fixing leaves little; if not, look for a better choice in what recent ones take."""
        begun = time.perf_counter()
        if self.settings.deadline - begun < 2 * self.longest_s + 1:
            return Settled(choice=None, finished=False)
        settled = self._prove(best)
        if settled is None:
            settled = Settled(choice=self._search_recent(best), finished=False)
        self.longest_s = max(self.longest_s, time.perf_counter() - begun)
        return settled

    def _prove(self, best: Best) -> Settled | None:
        """The cheapest choice of all, by the program on the strategies not ruled out; None when these are too many."""
        try:
            smaller = drop_costly(self.problem, self.flat, best)
        except ConflictError:
            smaller = None
        if smaller is None:
            self.bound = best.cost
            return Settled(choice=None, finished=True)
        entries = smaller.problem.num_pairs
        self.log(f"fixing leaves {len(smaller.problem.node_cost)} nodes, {entries} pairs")
        if entries > EXACT_ENTRIES:
            return None
        now = time.perf_counter()
        deadline = now + PROOF_PART * (self.settings.deadline - now)
        answer, choice = self._solve(smaller, best, replace(self.settings, deadline=deadline))
        self.bound = max(self.bound, min(best.cost, answer.bound + smaller.offset))
        return Settled(choice=choice, finished=answer.proven)

    def _search_recent(self, best: Best) -> np.ndarray | None:
        assert best.choice is not None, "prices are only settled around a choice that fits"
        recent = list({choice.tobytes(): choice for choice in best.recent}.values())
        while True:
            smaller = combine(self.problem, (best.choice, *recent))
            entries = smaller.problem.num_pairs
            self.log(f"{len(recent)} recent choices leave {len(smaller.problem.node_cost)} nodes, {entries} pairs")
            if entries <= EXACT_ENTRIES:
                break
            recent = recent[len(recent) // 2 + 1 :]
        now = time.perf_counter()
        deadline = now + COMBINE_PART * (self.settings.deadline - now)
        _, choice = self._solve(smaller, best, replace(self.settings, deadline=deadline))
        return choice

    def _solve(self, smaller: Reduction, best: Best, settings: Settings) -> tuple[Answer, np.ndarray | None]:
        """The program on a smaller problem, begun with the rows that have a price."""
        if not smaller.problem.node_cost:
            return Answer(choice=(), bound=0.0, proven=True), np.array(smaller.undo(()), dtype=np.int64)
        flat = flatten(smaller.problem)
        rows = np.flatnonzero(np.isin(flat.times, self.flat.times[best.price > 0])).tolist()
        answer = solve_lazily(smaller.problem, flat, settings, rows=rows)
        if answer.choice is None:
            return answer, None
        return answer, np.array(smaller.undo(answer.choice), dtype=np.int64)
