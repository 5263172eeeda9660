"""The decisions of the stages of a pipeline: isomorphic stages share theirs, slices of one leaf share its layout.

Isomorphic graphs are equal except for the numbers of operations and values.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from autopar.cost.cost_model import CostModel, NodeCosts
from autopar.ir.constraints import Constraints
from autopar.ir.graph import Op, OpGraph
from autopar.ir.layout import Layout, LogicalMesh, replicated
from autopar.ir.partial_sums import find_partials
from autopar.ir.pins import PinnedLayout
from autopar.ir.rewrite import CanonicalForm
from autopar.lowering.lower import ShardingPlan
from autopar.passes.remat import name_of
from autopar.passes.stage_graph import StageGraph
from autopar.runtime.standard_schedules import PipelineSchedule
from autopar.search.inter_op.stage_costs import PricedOption, lowest_price
from autopar.search.inter_op.staged import solve_stage, stage_problem, transfer_layouts_of
from autopar.search.intra_op.ilp import IntraOp, ObjectiveWeights
from autopar.search.intra_op.memory_prices import FIRST_PRICE, MOST_PRICES, PRICE_RISE
from autopar.solver import Stage, StagePlan, StageProblem

# A choice of stages that can be built, from an answer of the search over stages.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageChoice:
    """Stages to build: the first layer of each, the mesh of each group of devices, the policy of each layer.

    `terms`: the weights under which each stage is estimated to fit, where they are known. `over_limit`: whether its
    state alone would exceed the memory under the lowest price of a byte.
    """

    schedule: str
    chunks: int
    first_layers: tuple[int, ...]
    group_meshes: tuple[LogicalMesh, ...]
    policies: tuple[str, ...]
    terms: tuple[ObjectiveWeights, ...] = ()
    over_limit: tuple[bool, ...] = ()

    def text(self, num_microbatches: int) -> str:
        """The choice in a few words, as tables of candidates have it: one stage is a mesh, without a schedule."""
        meshes = [(mesh, len(list(group))) for mesh, group in itertools.groupby(self.group_meshes)]
        stages = len(self.first_layers)
        if stages == 1:
            words = [f"mesh {self.group_meshes[0]}"]
        else:
            each = f"{meshes[0][0]}" if len(meshes) == 1 else ", ".join(f"{n} of {mesh}" for mesh, n in meshes)
            words = [f"{stages} stages on meshes {each}", self.schedule]
        if num_microbatches > 1:
            words.insert(0, f"{num_microbatches} micro-batches")
        if policies := sorted({name_of(policy) for policy in self.policies if policy != "nothing"}):
            words.append(f"recompute {' and '.join(policies)}")
        return ", ".join(words)


def choice_of(problem: StageProblem, answer: StagePlan, options: Sequence[PricedOption]) -> StageChoice:
    """The stages, meshes and policies of an answer of the dynamic programme."""
    chosen = [options[stage.option] for stage in answer.stages]
    groups = len(answer.stages) // problem.chunks
    return StageChoice(
        schedule=problem.schedule.value,
        chunks=problem.chunks,
        first_layers=tuple(stage.first for stage in answer.stages),
        group_meshes=tuple(o.mesh for o in chosen[:groups]),
        policies=tuple(
            policy
            for o, stage in zip(chosen, answer.stages, strict=True)
            for policy in o.policies[stage.first : stage.last]
        ),
        terms=tuple(o.terms for o in chosen),
        over_limit=tuple(
            o.over_limit or _state_bytes(_cheapest(options, o), stage) > problem.limit_bytes
            for o, stage in zip(chosen, answer.stages, strict=True)
        ),
    )


def _cheapest(options: Sequence[PricedOption], like: PricedOption) -> PricedOption:
    """The option on the same mesh, with the same recomputation, that was decided under the lowest price of a byte."""
    same_mesh = (o for o in options if (o.mesh, o.policies) == (like.mesh, like.policies))
    return min(same_mesh, key=lambda o: o.terms.s_per_byte)


def _state_bytes(option: PricedOption, stage: Stage) -> int:
    return int(option.option.state_bytes[stage.first : stage.last].sum())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CanonicalGraph:
    """A graph's structure without numbers. The `ops` and `values` of graphs with equal `key`s correspond in order."""

    key: tuple
    ops: tuple[int, ...]
    values: tuple[int, ...]


def canonical_graph(graph: OpGraph) -> CanonicalGraph:
    form = CanonicalForm(graph, lambda op: (op.role, op.count))
    top = form.block_key(graph.block)
    in_host = frozenset(number for number, v in enumerate(form.values) if v in graph.saved_in_host)
    key = (top, graph.tied, graph.donated, graph.batch, graph.num_microbatches, graph.repeating, in_host)
    return CanonicalGraph(key=key, ops=tuple(form.ops), values=form.values)


def carried_over(plan: ShardingPlan, source: CanonicalGraph, target: CanonicalGraph, graph: OpGraph) -> ShardingPlan:
    """The decisions of one graph for another of equal key."""
    op = dict(zip(source.ops, target.ops, strict=True))
    value = dict(zip(source.values, target.values, strict=True))
    return dataclasses.replace(
        plan,
        strategy={op[o]: s for o, s in plan.strategy.items()},
        partials=find_partials(graph),
        unreduced={value[v]: layout for v, layout in plan.unreduced.items()},
        reduced={value[v]: layout for v, layout in plan.reduced.items()},
        copies={(value[v], readers): layout for (v, readers), layout in plan.copies.items()},
        transfer_layouts={op[o]: layout for o, layout in plan.transfer_layouts.items()},
        in_host=frozenset(value[v] for v in plan.in_host),
        saved_in_host=frozenset(value[v] for v in plan.saved_in_host),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GivenStageLayouts:
    """Layouts that stages are given: pins by value, those of another step's plan by the position of an argument.

    `last_is_shorter`: the last stage has fewer layers of a scan than the others, so that it is not to decide for them.
    """

    pins: Mapping[int, PinnedLayout] = dataclasses.field(default_factory=dict)
    followed: Mapping[int, Layout] = dataclasses.field(default_factory=dict)
    last_is_shorter: bool = False


class StageDecider:
    """Decides the stages of one pipeline, under one set of weights after another.

    Isomorphic stages on equal meshes under equal weights share their decisions. Constraints and pins bind all stages.
    `pieces` gives the leaf that an input of the step is a slice of: all slices of a leaf have the layout that the
    middle stage chooses, since it is like most others. `costs`: of each stage on its mesh. `paired_ops` of the first
    stage are decided alike.
    """

    def __init__(
        self,
        stages: Sequence[StageGraph],
        costs: Sequence[NodeCosts],
        meshes: Sequence[LogicalMesh],
        time_limit_s: float,
        pieces: Mapping[int, int],
        constraints: Constraints | None,
        given: GivenStageLayouts,
        paired_ops: Sequence[tuple[Op, Op]] = (),
    ) -> None:
        self.stages, self.costs, self.time_limit_s = stages, costs, time_limit_s
        self.models = [each.model for each in costs]
        self.pieces, self.constraints, self.given, self.paired_ops = pieces, constraints, given, paired_ops
        self.transfer_layouts = transfer_layouts_of(stages, meshes, constraints)
        self.shapes = [canonical_graph(stage.graph) for stage in stages]
        numbers: dict[Any, int] = {}
        self.shape_numbers = [numbers.setdefault(shape.key, len(numbers)) for shape in self.shapes]
        self.made: list[tuple[int, ShardingPlan]] = []  # the stage that was decided, and its decisions
        self.solved: dict[tuple[Any, ObjectiveWeights], int] = {}  # problem and terms -> which of them
        self.problems: dict[Any, tuple[int, IntraOp]] = {}  # with the stage whose numbers it has
        self.of_problem: dict[Any, list[int]] = {}
        self.carried: dict[tuple[int, int], ShardingPlan] = {}

    def decide(self, terms: Sequence[ObjectiveWeights]) -> list[tuple[int, ShardingPlan]]:
        """The decisions of each stage, with a number: stages with equal numbers have the same decisions."""
        layouts: dict[int, Layout] = {}
        decided: dict[int, tuple[int, ShardingPlan]] = {}
        middle = (len(self.stages) - self.given.last_is_shorter) // 2
        for at in sorted(range(len(self.stages)), key=lambda q: (bool(self.pieces) and q != middle, q)):
            stage = self.stages[at]
            inputs = zip(stage.arguments, stage.graph.block.inputs, strict=False)
            leaf_of = {v: self.pieces[p] for p, v in inputs if p in self.pieces}
            fixed = {v: layouts[leaf] for v, leaf in leaf_of.items() if leaf in layouts} | self.followed(at)
            number = self.number(at, terms[at], fixed)
            decided[at] = number, self.of_stage(number, at)
            for v, leaf in leaf_of.items():
                replicated_layout = replicated(len(stage.graph.values[v].shape))
                layouts.setdefault(leaf, decided[at][1].reduced.get(v, replicated_layout))
        return [decided[at] for at in range(len(self.stages))]

    def number(self, at: int, terms: ObjectiveWeights, fixed: Mapping[int, Layout]) -> int:
        """The number of a stage's decisions. Weights that lead to the same decisions lead to the same number."""
        key = self.key(at, fixed)
        if (key, terms) not in self.solved:
            if key not in self.problems:
                args = (
                    self.stages[at],
                    self.costs[at],
                    self.transfer_layouts[at],
                    fixed,
                    self.constraints,
                    self.pinned(at),
                    self.paired_ops,
                )
                self.problems[key] = at, stage_problem(*args)
            source, problem = self.problems[key]
            sharding = solve_stage(problem, terms, self.time_limit_s)
            numbers = self.of_problem.setdefault(key, [])
            number = next((n for n in numbers if _decides_alike(self.of_stage(n, source), sharding)), len(self.made))
            if number == len(self.made):
                self.made.append((source, sharding))
                numbers.append(number)
            self.solved[key, terms] = number
        return self.solved[key, terms]

    def key(self, at: int, fixed: Mapping[int, Layout]) -> Any:
        """The problem of a stage except for the weights, without the numbers of operations and values."""
        shape, (received, sent) = self.shapes[at], self.transfer_layouts[at]
        number = {v: i for i, v in enumerate(shape.values)}
        op_number = {op: i for i, op in enumerate(shape.ops)}
        arrives = sorted((number[v], layout) for v, layout in received.items() if v in number)
        leaves = sorted((op_number[op], layout) for op, layout in sent.items())
        fixed_layouts = sorted((number[v], layout) for v, layout in fixed.items())
        pinned_dims = sorted((number[v], str(pin.dims)) for v, pin in self.pinned(at).items())
        return (
            self.shape_numbers[at],
            self.models[at].links,
            self.models[at].device,
            str(arrives),
            str(leaves),
            str(fixed_layouts),
            str(pinned_dims),
        )

    def problem_of(self, at: int) -> IntraOp:
        """The problem of a stage that was decided, which no slice of another one's leaves constrains."""
        return self.problems[self.key(at, {})][1]

    def cannot_fit(self, at: int, limit_bytes: float) -> bool:
        """Whether the state of a stage exceeds the memory of a device under whatever decisions are allowed."""
        if self.pieces or self.given.followed:
            return False  # layouts of slices are fixed by another stage
        return self.problem_of(at).least_state_bytes() > limit_bytes

    def pinned(self, at: int) -> dict[int, PinnedLayout]:
        """The pins of values of a stage."""
        values = set(self.shapes[at].values)
        return {v: pin for v, pin in self.given.pins.items() if v in values}

    def followed(self, at: int) -> dict[int, Layout]:
        """The layouts that another step's plan gives to arguments of a stage."""
        stage = self.stages[at]
        inputs = zip(stage.arguments, stage.graph.block.inputs, strict=False)
        return {v: self.given.followed[p] for p, v in inputs if p in self.given.followed}

    def of_stage(self, number: int, at: int) -> ShardingPlan:
        """Decisions in the operation and value numbers of a stage."""
        if (number, at) not in self.carried:
            source, sharding = self.made[number]
            self.carried[number, at] = (
                sharding
                if source == at
                else carried_over(sharding, self.shapes[source], self.shapes[at], self.stages[at].graph)
            )
        return self.carried[number, at]


def _decides_alike(plan_a: ShardingPlan, plan_b: ShardingPlan) -> bool:
    """Whether two plans have the same layouts and strategies; their predicted costs may differ."""
    names = (
        "strategy",
        "unreduced",
        "reduced",
        "copies",
        "transfer_layouts",
        "in_host",
        "saved_in_host",
        "overlapped_axes",
    )
    return all(getattr(plan_a, name) == getattr(plan_b, name) for name in names)


# Decisions of the stages of a pipeline that fit into the memory: decided again under higher prices of a byte.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BuildLimits:
    """The memory of a device, the seconds that a solver may take, and the time of a step from which on a pipeline is of
    no use, so that nothing need be done to make it fit. `decides_again`: whether stages that exceed the memory are
    decided again, unless they need more than `most_bytes`.
    """

    limit_bytes: int
    time_limit_s: float
    to_beat_s: float = math.inf
    decides_again: bool = True
    most_bytes: float = math.inf


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The weights of each stage in one round of decisions, and the peak of each group of devices under them."""

    terms: tuple[ObjectiveWeights, ...]
    peak_bytes: tuple[int, ...]


# For each stage, the number of its decisions and these: stages of equal numbers have the same.
StageDecisions = Sequence[tuple[int, ShardingPlan]]


class Simulated(Protocol):
    """A pipeline on the clock: its time, and the peak of each group of devices."""

    @property
    def step_time_s(self) -> float: ...

    @property
    def peak_bytes(self) -> Sequence[int]: ...


Pipeline = TypeVar("Pipeline", bound=Simulated)


def fit_stages(
    choice: StageChoice,
    schedule: PipelineSchedule,
    decider: StageDecider,
    terms: list[ObjectiveWeights],
    limits: BuildLimits,
    simulated: Callable[[StageDecisions], Pipeline],
    of_whole: float = 1.0,
) -> tuple[Pipeline, tuple[Round, ...]]:
    """The pipeline under the first decisions that fit, else under the last ones; and the rounds that led to it.

    Stages that exceed the memory are decided again with a higher price on the bytes of their state, then with that
    price also on values saved for backward passes, then with higher prices on both, `MOST_PRICES` times at most, unless
    their state exceeds it whatever is decided, or the step takes too long already. Where the first two of these prices
    do not do, the highest come next, and no other where these do not. `of_whole`: how many times as much state, and
    time, the whole step has as the stages that are decided.
    """
    rounds: list[Round] = []
    made: dict[tuple[int, ...], Pipeline] = {}

    def decided() -> tuple[Pipeline, list[int], StageDecisions]:
        """The pipeline under the present weights, the stages that exceed the memory, and the decisions."""
        decisions = decider.decide(terms)
        numbers = tuple(number for number, _ in decisions)
        if numbers not in made:
            made.clear()  # pipelines take much memory
            made[numbers] = simulated(decisions)
        found = made[numbers]
        rounds.append(Round(terms=tuple(terms), peak_bytes=tuple(found.peak_bytes)))
        groups = enumerate(schedule.mesh_of_stage)
        return found, [q for q, group in groups if found.peak_bytes[group] > limits.limit_bytes], decisions

    def leaner(q: int, decisions: StageDecisions) -> ObjectiveWeights:
        dear = FIRST_PRICE * decisions[q][1].report.objective_s * of_whole / limits.limit_bytes
        known_s_per_byte = choice.terms[q].s_per_byte if choice.terms else dear
        in_flight = schedule.in_flight[schedule.mesh_of_stage[q]] // schedule.chunks
        return _leaner(terms[q], known_s_per_byte, dear, in_flight)

    pipeline, over, decisions = decided()
    for number in range(MOST_PRICES if limits.decides_again else 0):
        if not over or pipeline.step_time_s >= limits.to_beat_s or max(pipeline.peak_bytes) > limits.most_bytes:
            break
        if any(decider.cannot_fit(q, limits.limit_bytes / of_whole) for q in over):
            break
        for q in over:
            terms[q] = leaner(q, decisions)
        if number == 2:  # from here on prices rise
            walked, at_highest = list(terms), over
            for _ in range(number + 1, MOST_PRICES):
                for q in over:
                    terms[q] = leaner(q, decisions)
            pipeline, over, decisions = decided()
            if set(over) & set(at_highest):
                break
            rounds.pop()  # a lower price may do
            terms[:] = walked
        pipeline, over, decisions = decided()
    return pipeline, tuple(rounds)


def first_terms(
    choice: StageChoice, models: Sequence[CostModel], constraints: Constraints | None
) -> list[ObjectiveWeights]:
    """The first weights of each stage: the lowest price of a byte, unless it is known that its state alone does not fit
    under it, or that its saved values have a price.

    Under a recipe, hideable communication is charged fully: the plan is that of the recipe's source.
    """
    lowest = [lowest_price(model) for model in models]
    if not choice.terms:
        fractions = [model.exposed_fraction if constraints is None else 1.0 for model in models]
        return [ObjectiveWeights(s_per_byte=p, exposed_fraction=f) for p, f in zip(lowest, fractions, strict=True)]
    return [
        terms if over_limit or terms.in_flight else dataclasses.replace(terms, s_per_byte=price)
        for terms, over_limit, price in zip(choice.terms, choice.over_limit, lowest, strict=True)
    ]


def _leaner(terms: ObjectiveWeights, sufficient_price: float, first_price: float, in_flight: int) -> ObjectiveWeights:
    """Weights under which a stage needs less memory: the price that is known to suffice, then that price also on the
    values saved for the micro-batches in flight, then higher prices.
    """
    if terms.s_per_byte < sufficient_price:
        return dataclasses.replace(terms, s_per_byte=sufficient_price)
    if not terms.in_flight:
        return dataclasses.replace(terms, in_flight=_rounded_up(in_flight))
    return dataclasses.replace(terms, s_per_byte=max(first_price, terms.s_per_byte * PRICE_RISE))


def _rounded_up(n: int) -> int:
    """The next power of two, so that stages that differ only in the micro-batches in flight are decided together."""
    return 1 << max(0, n - 1).bit_length()
