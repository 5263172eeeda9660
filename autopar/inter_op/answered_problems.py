"""The problems of the search over stages with their answers, which bound those of the next ones."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from autopar.common.progress import Progress
from autopar.inter_op.microbatch_walk import BestStages, Tried
from autopar.inter_op.posed_problems import Posed
from autopar.inter_op.stage_answers import by_tables
from autopar.solver import NoStages, StagePlan, best_stages

Answer = StagePlan | NoStages


class AnsweredProblems:
    """Problems of several stages, then those of one stage, each with its answer by the tables.

    What takes `within` times as long as the best so far, or longer, is not searched for; `tolerance` times that where
    others than the best are wanted.
    """

    def __init__(self, progress: Progress, within: float, tolerance: float) -> None:
        self.progress, self.within, self.tolerance = progress, within, tolerance
        self.several: list[tuple[Posed, Answer]] = []
        self.alone: list[tuple[Posed, Answer]] = []

    def solve(self, posed: Sequence[Posed]) -> None:
        """Problems of several stages in a number of micro-batches more."""
        under_s = self.within * self.tolerance * self.fastest_s
        with self.progress.pass_("stages"):
            self.add(posed, best_stages([problem for problem, _ in posed], self.within, under_s))

    def add(self, posed: Sequence[Posed], answers: Sequence[Answer]) -> None:
        """Problems of several stages that are answered."""
        self.several += zip(posed, answers, strict=True)

    def solve_one_stage(self) -> None:
        """Problems of one stage alone: one for each number of micro-batches and schedule that has others."""
        free_of = {(p.num_microbatches, p.schedule): (p, of) for (p, of), _ in self.several if p.chunks == 1}
        posed = [(dataclasses.replace(p, fixed_num_stages=1), of) for p, of in free_of.values()]
        with self.progress.pass_("stages"):
            self.alone += zip(posed, best_stages([problem for problem, _ in posed]), strict=True)

    @property
    def posed(self) -> list[Posed]:
        return [posed for posed, _ in (*self.several, *self.alone)]

    @property
    def answers(self) -> list[Answer]:
        return [answer for _, answer in (*self.several, *self.alone)]

    @property
    def fastest_s(self) -> float:
        """Of several stages; inf: there is no plan."""
        return min((a.step_time_s for _, a in self.several if isinstance(a, StagePlan)), default=math.inf)

    def best_of_several_stages(self, within: float) -> BestStages | None:
        """The fastest, where it takes at most `within` times as long as the best."""
        plans = [(a, posed) for posed, a in (*self.several, *self.alone) if isinstance(a, StagePlan)]
        found = [(a, posed) for a, posed in plans if len(a.stages) > posed[0].chunks]
        if not found:
            return None
        answer, (problem, (m, options)) = min(found, key=lambda plan: plan[0].step_time_s)
        if answer.step_time_s > within * min(a.step_time_s for a, _ in plans):
            return None
        groups = answer.stages[: len(answer.stages) // problem.chunks]
        return BestStages(m, [options[stage.option].mesh.num_devices for stage in groups])

    def of_one_stage(self) -> dict[int, Tried]:
        """One stage, by the tables, in each number of micro-batches in which it fits."""
        estimated: dict[int, Tried] = {}
        for (problem, (m, options)), answer in (*self.several, *self.alone):
            if problem.fixed_num_stages == 1 and isinstance(answer, StagePlan):
                found = by_tables(problem, answer, options)
                estimated[m] = min(estimated.get(m, found), found, key=lambda tried: tried.step_time_s)
        return estimated
