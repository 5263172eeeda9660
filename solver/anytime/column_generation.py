"""The master program of the Lagrangian, whose duals are the next prices on memory rows.

Column generation (Dantzig and Wolfe 1960) over whole choices: min sum of m[k] cost[k] subject to sum of m[k] bytes[k,
r] <= room[r] at the rows seen, sum of m[k] = 1; its duals are the rows' prices. Prices tried lie between these and the
best known ones (Wentges, "Weighted Dantzig-Wolfe decomposition", 1997), or the first ones would swing from nothing to
everything.
"""

from __future__ import annotations

import numpy as np

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
