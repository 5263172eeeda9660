"""The problems of the search over stages, for each number of micro-batches, schedule and number of equal parts: their
tables of options, and their answers.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence

from autopar.common.progress import Progress
from autopar.cost.cost_model import CostModel, cost_model
from autopar.cost.stream_simulator import Ran
from autopar.hardware.cluster import Cluster
from autopar.hardware.collective_cost import Link
from autopar.ir.graph import OpGraph
from autopar.ir.layout import LogicalMesh
from autopar.passes.fold_layers import FoldedGraph
from autopar.passes.layers import Layers
from autopar.passes.smaller_step import num_examples
from autopar.passes.split_scan import SplitStep
from autopar.plan.context import PlanningContext
from autopar.search.inter_op.build_stages import MicrobatchedStep
from autopar.search.inter_op.decide_stages import BuildLimits, choice_of
from autopar.search.inter_op.search_space import (
    NEAR_THE_BEST,
    BestStages,
    Tried,
    chunk_numbers,
    is_long,
    meshes_inside,
    schedules_of,
    stage_numbers,
    submesh_sizes,
)
from autopar.search.inter_op.stage_costs import (
    LARGE_SHARE,
    Decisions,
    LayerDecider,
    LayerPolicies,
    PricedOption,
    layer_policies,
    stage_options,
    undominated,
)
from autopar.search.inter_op.staged import part_of
from autopar.search.intra_op.memory_prices import saved_values
from autopar.search.intra_op.spmd_candidate import TimedSharding, timed_sharding
from autopar.solver import NoStages, StagePlan, StageProblem, best_stages, fullness
from autopar.solver import Schedule as SearchedSchedule

# The options of layers on each of several meshes, and the meshes that no fast pipeline has.


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshOptions:
    """The options of all layers on one mesh, in two parts: how long the fastest decisions take, and all decisions with
    their options.

    `room_bytes`, `in_flight`, `equal` and `time_limit_s` are those of `LayerDecider`. `known`: decisions that are known
    already from smaller micro-batches.
    """

    folded: FoldedGraph
    policies: LayerPolicies
    layers: Layers
    link: Link
    model: CostModel
    room_bytes: float
    in_flight: int
    equal: bool
    time_limit_s: float
    known: Decisions | None

    @property
    def ran(self) -> Ran | None:
        """How all layers run under the fastest decisions; None where there are none in time."""
        return self._timed.ran if self._timed is not None else None

    def priced(self) -> tuple[Decisions, tuple[PricedOption, ...]]:
        """All decisions, and their options."""
        decisions = self._decider.decisions() if self._decider is not None else self.known or ()
        options = stage_options(self.folded, self.policies, self.layers, self.model, self.link, decisions, self._timed)
        return decisions, options

    @functools.cached_property
    def _decider(self) -> LayerDecider | None:
        if self.known is not None:
            return None
        return LayerDecider(self.folded, self.model, self.room_bytes, self.in_flight, self.equal, self.time_limit_s)

    @functools.cached_property
    def _timed(self) -> TimedSharding | None:
        first, costs = self.known[0] if self.known else None, None
        if self._decider is not None:
            first, costs = self._decider.fastest, self._decider.intra_op.costs
        return timed_sharding(self.folded.graph, self.model, first.sharding, costs) if first is not None else None


# Seconds of all layers on a mesh, over those on the fastest mesh of as many devices, from which it is left out: however
# little memory it takes, the fastest one is decided for little memory too. The same of the seconds of a device, over
# those on any mesh, once a pipeline is known.
MUCH_SLOWER = 2.0


@dataclasses.dataclass(slots=True, kw_only=True)
class MeshScreen:
    """What is known so far of stages on devices of a cluster.

    Attributes:
        num_devices: Of the cluster. Beside several stages, what takes all of them is never left out.
        is_of_one: Whether it is for one stage alone, left out where the work of a device takes `longest_s` or longer.
        are_equal: Whether all stages lie on the same mesh.
        longest_s: The step time from which on pipelines are of no use; inf while none is known.
        least_device_s: Seconds of one device for all layers on the mesh that takes fewest.
        has_left_out: Whether any mesh was left out.
        has_left_out_for_pipeline: Whether one was because a pipeline is known.
    """

    num_devices: int
    is_of_one: bool = False
    are_equal: bool = False
    longest_s: float = math.inf
    least_device_s: float = math.inf
    has_left_out: bool = False
    has_left_out_for_pipeline: bool = False

    @property
    def knows_pipeline(self) -> bool:
        return self.longest_s < math.inf

    def pays(self, num_devices: int, ran: Ran, fastest_s: float) -> bool:
        """Whether a stage of a pipeline that takes less than `longest_s` may be on a mesh, on which all layers run so
        under their fastest decisions; they take `fastest_s` on the fastest mesh of as many devices.
        """
        if num_devices == self.num_devices:
            return not self.is_of_one or ran.busy_s <= self.longest_s
        if ran.end_s > MUCH_SLOWER * fastest_s:
            self.has_left_out = True
            return False
        if not self.knows_pipeline:
            return True
        least_device_s = min(self.least_device_s, fastest_s * num_devices)
        pays = ran.end_s * num_devices <= MUCH_SLOWER * least_device_s and self.get_through(num_devices, ran, fastest_s)
        self.has_left_out |= not pays
        self.has_left_out_for_pipeline |= not pays
        return pays

    def get_through(self, num_devices: int, ran: Ran, fastest_s: float) -> bool:
        """Whether all devices get through all layers by `longest_s`, where one stage is on a mesh: while it runs its
        layers, all others run theirs, as on this mesh or at best as on the one that takes fewest seconds of a device.
        Whatever overlaps, no stream takes less than the sum of its work.
        """
        if not ran.busy_s:
            return True
        least_device_s = min(self.least_device_s, fastest_s * num_devices)
        others = (self.num_devices - num_devices) / (ran.busy_s * num_devices if self.are_equal else least_device_s)
        return self.longest_s * (others + 1 / ran.busy_s) >= 1

    def saw(self, num_devices: int, seconds: float) -> None:
        """All layers take so long on a mesh of so many devices."""
        self.least_device_s = min(self.least_device_s, seconds * num_devices)


# The table of a step's options: the decisions of its layers on every submesh, priced.

# The key of decisions: mesh, operations and values, devices over which examples split, the examples (0: any number),
# the micro-batches in flight of which saved values have a price (1: several).
DecidedFor = tuple[LogicalMesh, int, int, int, int]


class DecidedOptions(dict[DecidedFor, Decisions]):
    """Decisions by what they are for.

    Attributes:
        read: The keys of those that were priced, since somebody emptied it.
        policies: Those of layers, by the hash of their operations and values (`wiring_of`).
    """

    def __init__(self) -> None:
        super().__init__()
        self.read: set[DecidedFor] = set()
        self.policies: dict[int, LayerPolicies] = {}


def _on_meshes(
    microbatched: MicrobatchedStep,
    cluster: Cluster,
    sizes: Sequence[int],
    limits: BuildLimits,
    decided: DecidedOptions,
    is_long: bool,
) -> Iterator[tuple[int, dict[DecidedFor, MeshOptions]]]:
    """Each size with the layers on the meshes of a submesh so large. Arguments: those of `tables`."""
    folded = microbatched.folded
    wiring, saved_bytes = hash(wiring_of(folded.graph)), _saved_bytes(folded) if is_long else 0.0
    examples = num_examples(microbatched.step.traced) // microbatched.graph.num_microbatches
    # Some boundary lies between hosts, and the slowest stage sets the pace.
    link = cluster.between_hosts if cluster.num_domains > 1 else cluster.inside_host
    layers = microbatched.layers
    if wiring not in decided.policies:
        decided.policies[wiring] = layer_policies(folded, layers, cluster, by_value=microbatched.step.parts == 1)
    for size in sizes:
        # A stage on this mesh holds about its share of the layers.
        stages, equal = cluster.num_devices / size, microbatched.step.parts > 1
        room_bytes = limits.limit_bytes * stages
        in_flight = min(math.ceil(stages), microbatched.graph.num_microbatches)
        if is_long and in_flight * saved_bytes / size <= LARGE_SHARE * room_bytes:
            in_flight = 0
        counts = (0, min(in_flight, 1)) if is_long else (examples, in_flight)
        part, of_size = part_of(cluster, size), dict[DecidedFor, MeshOptions]()
        for mesh in meshes_inside(part):
            key = mesh, wiring, math.gcd(examples, size), *counts
            of_size[key] = MeshOptions(
                folded=folded,
                policies=decided.policies[wiring],
                layers=layers,
                link=link,
                model=cost_model(part, mesh),
                room_bytes=room_bytes,
                in_flight=in_flight,
                equal=equal,
                time_limit_s=limits.time_limit_s,
                known=decided.get(key),
            )
        yield size, of_size


def tables(
    microbatched: MicrobatchedStep,
    cluster: Cluster,
    sizes: Sequence[int],
    limits: BuildLimits,
    decided: DecidedOptions,
    *,
    is_long: bool = False,
    screen: MeshScreen | None = None,
) -> tuple[PricedOption, ...]:
    """The options of every submesh of these sizes, but for those that the screen leaves out. Adds new decisions to
    `decided`, and to the screen what meshes take.

    `decided` holds the decisions for smaller micro-batches. In long steps they are reused, and only priced again, where
    operations and values have the same numbers and connections, examples split over as many of the devices, and saved
    values need a price in both: where they crowd the memory though they are split over all devices.
    """
    options: list[PricedOption] = []
    too_large: list[int] = []  # on several times as many devices layers take even more seconds of a device
    for size, on_meshes in _on_meshes(microbatched, cluster, sizes, limits, decided, is_long):
        if size < cluster.num_devices and any(size % n == 0 for n in too_large):
            continue
        paying = list(on_meshes)
        if screen is not None:
            paying = _paying(size, {key: on.ran for key, on in on_meshes.items()}, screen)
            if screen.knows_pipeline and not paying:
                too_large.append(size)
        for key in paying:
            decided[key], priced = on_meshes.pop(key).priced()
            decided.read.add(key)
            options += priced
    return tuple(options)


def _paying(num_devices: int, ran: Mapping[DecidedFor, Ran | None], screen: MeshScreen) -> list[DecidedFor]:
    """Those of meshes of one size that the screen leaves in; it is told how long all layers take on the fastest."""
    timed = {n: each for n, each in ran.items() if each is not None}
    if not timed:
        return list(ran)
    fastest_s = min(each.end_s for each in timed.values())
    paying = [n for n, each in timed.items() if screen.pays(num_devices, each, fastest_s)]
    screen.saw(num_devices, fastest_s)
    return paying


def _saved_bytes(folded: FoldedGraph) -> float:
    """What all layers save of a micro-batch for its backward pass, on all devices together, each value once."""
    values, copies = {v for v, _ in saved_values(folded.graph)}, folded.copies()
    return sum(folded.graph.values[v].nbytes * copies.get(v, 1.0) for v in sorted(values))


def wiring_of(graph: OpGraph) -> tuple:
    """The operations and values of a graph by number, without sizes: the key of decisions that apply to it."""
    return tuple(
        (op.id, op.kind, op.section, op.primitive, tuple(a for a in op.inputs if isinstance(a, int)), op.outputs)
        for op in graph.ops()
    )


# Answers of the search over stages: the order in which they are built, what they come to, and why there are none.

_NUMBER = re.compile(r"\d+(?:,\d+)*")


def in_turn(plans: Iterable[tuple[Hashable, float, int]]) -> list[int]:
    """The numbers of plans given as (kind, seconds, number): the fastest of each kind, fastest first, then each second,
    and so on.
    """
    turn: dict[Hashable, int] = {}
    by_turn: list[tuple[int, int]] = []
    for kind, _, number in sorted(plans, key=lambda plan: plan[1]):
        turn[kind] = turn.get(kind, -1) + 1
        by_turn.append((turn[kind], number))
    return [number for _, number in sorted(by_turn, key=lambda entry: entry[0])]


def why_no_pipeline(answers: Sequence[StagePlan | NoStages]) -> str:
    """The reasons of the problems that have no plan."""
    reasons: dict[str, tuple[list[int], str]] = {}
    for answer in answers:
        if isinstance(answer, NoStages):  # of reasons that differ in numbers alone that with the smallest
            numbers = [int(n.replace(",", "")) for n in _NUMBER.findall(answer.reason)]
            kind = _NUMBER.sub("", answer.reason)
            reasons[kind] = min(reasons.get(kind, (numbers, answer.reason)), (numbers, answer.reason))
    return "; ".join(reason for _, reason in reasons.values()) or "no pipeline was near the plan without stages"


def by_tables(problem: StageProblem, answer: StagePlan, options: tuple[PricedOption, ...]) -> Tried:
    """One stage that was not built."""
    return Tried(
        step_time_s=answer.step_time_s,
        most_bytes=round(fullness(problem, answer.stages) * problem.limit_bytes),
        policies=tuple(choice_of(problem, answer, options).policies),
    )


# A problem with its options.
Posed = tuple[StageProblem, tuple[PricedOption, ...]]


class PosedProblems:
    """Makes the problems of a step, whose scans are in parts, from the tables of its layers.

    `screen` leaves out meshes that no fast pipeline has; decisions are kept for other numbers of micro-batches.
    """

    def __init__(self, context: PlanningContext, step: SplitStep, screen: MeshScreen | None) -> None:
        self.context, self.step, self.screen = context, step, screen
        self.decided = DecidedOptions()

    def screen_from(self, longest_s: float) -> None:
        """From now on, pipelines that take so long or longer are of no use."""
        if self.screen is not None:
            self.screen.longest_s = min(self.screen.longest_s, longest_s)

    def of(
        self,
        microbatched: MicrobatchedStep,
        *,
        sizes_between: tuple[float, float] = (0, math.inf),
    ) -> list[Posed]:
        """The problems for a number of micro-batches: each schedule and, for scans, each number of stages, on submeshes
        of these sizes.
        """
        posed: list[Posed] = []
        least, most = sizes_between
        with self.context.progress.pass_("layer costs"):
            sizes = [size for size in self.sizes(len(microbatched.layers)) if least <= size <= most]
            self.decided.read.clear()
            priced = self.priced(microbatched, sizes, self.screen)
            if is_long(self.context.traced):  # options dominated in small micro-batches are not priced for large ones
                better = {(o.mesh, dataclasses.replace(o.terms, overlapped_axes=())) for o in priced}
                for key in self.decided.read:
                    kept = tuple(d for d in self.decided[key] if (key[0], d.terms) in better)
                    if kept:  # of a mesh none of whose options pays here, all may pay in other micro-batches
                        self.decided[key] = kept
        for name in schedules_of(self.context.request, self.context.cluster):
            posed += self.on_schedule(microbatched, name, priced)
        return posed

    def sizes(self, num_layers: int) -> Sequence[int]:
        """The sizes of submeshes to price."""
        return submesh_sizes(self.context.cluster, self.context.request, num_layers)

    def priced(
        self, microbatched: MicrobatchedStep, sizes: Sequence[int], screen: MeshScreen | None = None
    ) -> tuple[PricedOption, ...]:
        """The undominated options of submeshes of these sizes."""
        limits = BuildLimits(limit_bytes=self.context.limit_bytes, time_limit_s=self.context.deadline.solve_s())
        options = tables(
            microbatched,
            self.context.cluster,
            sizes,
            limits,
            self.decided,
            is_long=is_long(self.context.traced),
            screen=screen,
        )
        return undominated(options)

    def on_schedule(
        self,
        microbatched: MicrobatchedStep,
        name: str,
        priced: tuple[PricedOption, ...],
        numbers: Sequence[int] = (),
    ) -> list[Posed]:
        """The problems of one schedule, one for each number of chunks of a group, and of groups of devices: `numbers`,
        by default of scans those that divide them, else any.
        """
        request, cluster = self.context.request, self.context.cluster
        chunks_of_group = chunk_numbers(request, name, len(microbatched.layers))
        problems = []
        in_parts = self.step.parts > 1
        pairs = [
            (number, chunks)
            for chunks in chunks_of_group
            for number in numbers or (stage_numbers(self.step, cluster, chunks) if in_parts else (None,))
        ]
        for num_stages, chunks in pairs:
            options = priced if self.step.parts == 1 else _on(priced, cluster.num_devices // (num_stages or 1))
            if self.step.parts > 1 and not options:
                continue  # more devices than examples
            problem = StageProblem(
                options=tuple(o.option for o in options),
                num_devices=cluster.num_devices,
                num_layers=len(microbatched.layers),
                num_microbatches=microbatched.graph.num_microbatches,
                schedule=SearchedSchedule(name),
                limit_bytes=self.context.limit_bytes,
                host_devices=cluster.domain_devices,
                chunks=chunks,
                fixed_num_stages=num_stages,
            )
            problems.append((problem, options))
        return problems


def _on(options: Sequence[PricedOption], num_devices: int) -> tuple[PricedOption, ...]:
    """The options of stages on this number of devices."""
    return tuple(o for o in options if o.mesh.num_devices == num_devices)


# The problems of the search over stages with their answers, which bound those of the next ones.


Answer = StagePlan | NoStages


class AnsweredProblems:
    """Problems of several stages, then those of one stage, each with its answer by the tables.

    What takes `within` times as long as the best so far, or is far from the plan without stages (`to_beat_s`), is not
    searched for; `tolerance` times that where others than the best are wanted.
    """

    def __init__(self, progress: Progress, within: float, tolerance: float, to_beat_s: float) -> None:
        self.progress, self.within, self.tolerance, self.to_beat_s = progress, within, tolerance, to_beat_s
        self.several: list[tuple[Posed, Answer]] = []
        self.alone: list[tuple[Posed, Answer]] = []

    def solve(self, posed: Sequence[Posed]) -> None:
        """Problems of several stages in a number of micro-batches more."""
        # The first numbers of micro-batches may be far from the best.
        under_s = self.tolerance * min(self.within * self.fastest_s, NEAR_THE_BEST**2 * self.to_beat_s)
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
        answer, (problem, options) = min(found, key=lambda plan: plan[0].step_time_s)
        if answer.step_time_s > within * min(self.to_beat_s, *(a.step_time_s for a, _ in plans)):
            return None
        groups = answer.stages[: len(answer.stages) // problem.chunks]
        return BestStages(problem.num_microbatches, [options[stage.option].mesh.num_devices for stage in groups])

    def of_one_stage(self) -> dict[int, Tried]:
        """One stage, by the tables, in each number of micro-batches in which it fits."""
        estimated: dict[int, Tried] = {}
        for (problem, options), answer in (*self.several, *self.alone):
            if problem.fixed_num_stages == 1 and isinstance(answer, StagePlan):
                found, m = by_tables(problem, answer, options), problem.num_microbatches
                estimated[m] = min(estimated.get(m, found), found, key=lambda tried: tried.step_time_s)
        return estimated
