"""The anytime solver: prices on memory, message passing for the bound and a first choice, tree moves for better ones.

A round, at one set of prices: sweeps of messages (the bound), a choice decoded from them and last round's choice, both
improved by tree moves that ignore the limit but pay the prices (the Lagrangian's minimiser, nearly), the better one
repaired to fit and polished (the incumbent), and the master program for the next prices. Both cores work: the two
searches, and the sweeps beside the polishing. Rounds depend on the seed and on each other, never on time, so that a
number of rounds gives the same answer again.

Where no memory row can bind there are no prices to change what a round looks at: the next one starts from the best
choice with most nodes drawn anew (iterated local search, Lourenço, Martin and Stützle 2003).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from autopar.solver.anytime.compiled_loops import SAFETY, Loops
from autopar.solver.ilp.flat_arrays import Flat
from autopar.solver.ilp.problem import Problem
from autopar.solver.presolve.presolve import keep_strategies, reduce_all
from autopar.solver.presolve.reduction import Reduction, chain

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
WARM_SWEEPS = 200  # at most, before prices come in: messages that have settled without prices follow prices quickly
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
        for _ in range(WARM_SWEEPS // 10):
            self.loops.sweep(self.messages, 10)
            last_bound, self.bound = self.bound, self.loops.bound(self.messages, self.price)
            settled = self.bound - last_bound <= 1e-4 * abs(self.bound)
            if time.perf_counter() >= deadline or settled or self.bound >= cutoff:
                break
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
