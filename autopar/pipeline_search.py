"""Which stages, on which devices, with how many micro-batches, on which schedule."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

from autopar.attention_checks import check_attention
from autopar.built_out import BuiltOut, Found
from autopar.cluster import Cluster
from autopar.constraints import Binding
from autopar.contraction import contract
from autopar.errors import AutoparError, BatchMismatchError, InvalidArgumentError, UnsupportedError
from autopar.graph import OpGraph
from autopar.layer_assignment import assign_layers
from autopar.mesh import LogicalMesh
from autopar.micro_batches import num_examples
from autopar.node_costs import cost_model
from autopar.pins import PinsOnMesh, on_meshes
from autopar.pipelining import (
    PipelineOptions,
    default_chunks,
    part_of,
)
from autopar.progress import Progress
from autopar.purposes import described
from autopar.rules import RuleBook
from autopar.scan_cutting import CutStep, cut_scans, divisors, trips_of
from autopar.sinking import copies_state
from autopar.solver import NoStages, StagePlan, StageProblem
from autopar.solver import Schedule as SearchedSchedule
from autopar.stage_assignment import balanced
from autopar.stage_building import Choice, Cut, build, cut_layers, layers_of_pieces
from autopar.stage_costs import Decisions, PricedOption, again_of, layer_decisions, stage_options, undominated
from autopar.staging import TracedStep
from autopar.whole_search import LONG_STEP, PlanOptions, distinct_meshes

SEARCHED_SCHEDULES = ("1f1b", "eager-1f1b", "zb-h1", "interleaved")
# Examples of a micro-batch: the smallest on many devices, how many sizes are searched through, and their ratio.
SMALLEST_MICROBATCH, MICROBATCH_SIZES, MICROBATCH_RATIO = 4, 3, 4
SHARING = 32  # devices of a stage that may share an example: for more, micro-batches have more examples
MICROBATCHES_A_STAGE, MOST_STAGES = 16, 64  # so many of the one for each of the other leave next to no bubble
NEAR_THE_BEST = 1.15  # so far from the best are answers looked at for steps that are not long: the tables are off by it
MOST_PARTS = 128  # of the devices, as the smallest stages cut them: the search over stages takes minutes for more
FINEST_PARTS = 96  # in which a scan over layers is priced, and so the most stages that it is cut into


# What decisions were made for: mesh, operations and values, devices that examples divide among, and where what is saved
# has a price the examples and the micro-batches in flight.
DecidedFor = tuple[LogicalMesh, int, int, int, int]


def search_pipelines(
    traced: TracedStep,
    cluster: Cluster,
    asked: PipelineOptions,
    limit_bytes: int,
    rules: RuleBook,
    progress: Progress,
    time_limit_s: float,
    to_beat_s: float = float("inf"),
    whole: OpGraph | None = None,
) -> Found | str:
    """The fastest pipeline, of all that was not asked for otherwise, one that fits where there is one; or why there is
    none that may be faster than `to_beat_s`.

    For each number of micro-batches: layers, a table of what each layer costs on each mesh, then the dynamic programme
    over stages for all of them together; the best few are worked out to the last instruction and simulated.
    A scan over layers is priced in small parts and worked out in as many equal ones as there are stages, on equal
    submeshes. Where nothing fits, all is searched again with copies of the state made in each micro-batch anew.

    Raises: what cutting into micro-batches raises, where a number of them was asked for; UnsupportedError for a
    schedule that was asked for and cannot run a scan in parts.
    """

    def searched(keeps_copies: bool) -> tuple[Found | str, bool]:
        return _searched(
            traced, cluster, asked, limit_bytes, rules, progress, time_limit_s, to_beat_s, whole, keeps_copies
        )

    return _leaner_where_needed(searched, limit_bytes)


def _leaner_where_needed(search: Callable[[bool], tuple[Found | str, bool]], limit_bytes: int) -> Found | str:
    """What a search finds that is told whether copies of the state are kept: they are, where that fits, and where it
    says that making them anew would not help.
    """
    found, may_help = search(True)
    if not may_help or (isinstance(found, Found) and found.fits(limit_bytes)):
        return found
    leaner, _ = search(False)
    if isinstance(found, str) or isinstance(leaner, str):
        return found if isinstance(leaner, str) else leaner
    return min(found, leaner, key=lambda one: one.rank(limit_bytes))


def _searched(
    traced: TracedStep,
    cluster: Cluster,
    asked: PipelineOptions,
    limit_bytes: int,
    rules: RuleBook,
    progress: Progress,
    time_limit_s: float,
    to_beat_s: float,
    whole: OpGraph | None,
    keeps_copies: bool,
) -> tuple[Found | str, bool]:
    """(what `search_pipelines` finds, copies of the state being kept or made anew; whether the latter may help)"""
    cuts: dict[int, Cut] = {}
    problems: list[StageProblem] = []
    decided: dict[DecidedFor, Decisions] = {}
    of_problem: list[tuple[int, tuple[PricedOption, ...]]] = []
    step = cut_scans(traced, finest(trips_of(traced, rules)), rules)
    numbers = microbatch_numbers(traced, cluster, asked)
    refused: AutoparError | None = None
    for m in numbers:
        try:
            with progress.pass_(f"{m} micro-batches"):
                cuts[m] = cut_layers(step, m, rules, whole, keeps_copies=keeps_copies)
        except (UnsupportedError, BatchMismatchError) as error:
            refused = error  # some sizes are traced to another program: others may serve
    for m, cut in cuts.items():
        with progress.pass_("layer costs"):
            sizes = sizes_for(cut, cluster, asked, m == min(cuts))
            found = tables(cut, cluster, sizes, limit_bytes, time_limit_s, decided, prices_saved=not is_long(traced))
            priced = undominated(found)
            if is_long(traced):  # what is nowhere better with small micro-batches is not priced for large ones
                better = {(o.mesh, o.terms) for o in priced}
                decided = {key: tuple(d for d in of if (key[0], d.terms) in better) for key, of in decided.items()}
        for name in schedules_of(asked):
            chunks = asked.chunks or default_chunks(name)
            if step.parts > 1 and chunks > 1:
                if asked.schedule is not None or asked.chunks is not None:
                    raise _one_part_a_group(step, name, chunks)
                continue
            for num_stages in stage_numbers(step, cluster) if step.parts > 1 else (asked.num_stages,):
                options = priced if step.parts == 1 else _on(priced, cluster.num_devices // (num_stages or 1))
                if step.parts > 1 and not options:
                    continue  # stages of more devices than share an example
                problems.append(
                    StageProblem(
                        options=tuple(o.option for o in options),
                        num_devices=cluster.num_devices,
                        num_layers=len(cut.layers),
                        num_microbatches=m,
                        schedule=SearchedSchedule(name),
                        limit_bytes=limit_bytes,
                        host_devices=cluster.devices_per_host,
                        chunks=chunks,
                        fixed_num_stages=num_stages,
                    )
                )
                of_problem.append((m, options))
    if refused is not None and not cuts:
        raise refused
    # One stage alone, plain accumulation of gradients, is worked out too, whatever the programme likes better.
    alone = [n for n, p in enumerate(problems) if p.chunks == 1 and asked.num_stages is None and step.parts == 1]
    problems += [dataclasses.replace(problems[n], fixed_num_stages=1) for n in alone]
    of_problem += [of_problem[n] for n in alone]
    first_alone = len(problems) - len(alone)
    builder = BuiltOut(
        cuts, cluster, limit_bytes, time_limit_s, to_beat_s, progress,
        lambda cut, num_stages: cut_layers(
            cut_scans(traced, num_stages, rules), cut.graph.num_microbatches, rules, keeps_copies=keeps_copies
        ),
    )  # fmt: skip
    answers = builder.search(problems, of_problem, first_alone, 1.0 if is_long(traced) else NEAR_THE_BEST)
    slow = builder.best is None and any(isinstance(a, StagePlan) for a in answers)  # not for want of memory
    copies = not slow and any(copies_state(cut.graph) for cut in cuts.values())
    return builder.found() or why_no_pipeline(answers), copies


def is_long(traced: TracedStep) -> bool:
    """Whether whatever is done to a step takes long."""
    return len(traced.jaxpr.eqns) > LONG_STEP


def microbatch_numbers(traced: TracedStep, cluster: Cluster, asked: PipelineOptions) -> list[int]:
    """The numbers of micro-batches to search through, most first.

    At most so many that each has a few examples for the devices of a stage, and that bubbles are small whatever the
    number of stages; then fewer, larger ones, which read parameters less often. The first have examples for powers of
    two of devices, as stages mostly are; the others for an odd number of hosts too.
    """
    if asked.num_microbatches is not None:
        return [asked.num_microbatches]
    examples = num_examples(traced)
    smallest = min(SMALLEST_MICROBATCH, max(1, cluster.num_devices // 16))
    most = examples / max(smallest, cluster.num_devices // (MOST_STAGES * SHARING))
    most = min(most, MICROBATCHES_A_STAGE * min(cluster.num_devices, MOST_STAGES))
    several = 2 if is_long(traced) else MICROBATCH_SIZES  # each size is traced and priced anew
    wanted = [max(1.0, most / MICROBATCH_RATIO**i) for i in range(several)]
    groups = examples // odd_part(examples, cluster)
    stages_are_odd = _odd(cluster.num_devices) > MOST_PARTS
    of = [groups if i or stages_are_odd else examples for i in range(several)]
    return list(dict.fromkeys(nearest_divisor(n, number) for n, number in zip(of, wanted, strict=True)))


def _odd(n: int) -> int:
    """What is left of a number without its factors of two."""
    return n // (n & -n)


def odd_part(examples: int, cluster: Cluster) -> int:
    """The odd number of devices that examples can be split over, not many of them: micro-batches of a power of two
    would leave stages of three or nine hosts without data parallelism.
    """
    most = MICROBATCH_RATIO * SMALLEST_MICROBATCH
    return max(d for d in _divisor_chain(_odd(cluster.num_devices)) if examples % d == 0 and d <= most)


def finest(trips: int) -> int:
    """In how many parts a scan over layers is priced: a divisor of its trips."""
    return max((d for d in divisors(trips) if d <= FINEST_PARTS), default=1)


def stage_numbers(step: CutStep, cluster: Cluster) -> list[int]:
    """The numbers of stages that cut a scan over layers and the devices into equal parts."""
    n, total = cluster.devices_per_host, cluster.num_devices
    sizes = {s: total // s for s in divisors(step.trips) if total % s == 0 and s <= step.parts}
    return [s for s, size in sizes.items() if size % n == 0 or n % size == 0]


def _on(options: Sequence[PricedOption], num_devices: int) -> tuple[PricedOption, ...]:
    """The options of stages on so many devices."""
    return tuple(o for o in options if o.mesh.num_devices == num_devices)


def _one_part_a_group(step: CutStep, schedule: str, chunks: int) -> UnsupportedError:
    return UnsupportedError(
        where=f"the scan over {step.trips} layers of {step.traced.name}",
        expected="a schedule with one stage on each group of devices",
        got=f"{schedule} with {chunks}",
        hint="use 1f1b or zb-h1, or write the layers out in a Python loop: the layers of an array that is stacked over "
        "them lie on the devices in order",
    )


def few_bubbles(traced: TracedStep, num_stages: int, parts: int = 1) -> int:
    """The divisor of the batch nearest to four micro-batches for each stage, of those that leave micro-batches which
    can be cut into so many parts, where the batch can be.
    """
    if num_stages == 1:
        return 1
    examples = num_examples(traced)
    return nearest_divisor(examples // parts if examples % parts == 0 else examples, 4 * num_stages)


def nearest_divisor(n: int, wanted: float) -> int:
    """The divisor of n whose ratio to what is wanted is nearest to one."""
    return min(divisors(n), key=lambda m: abs(math.log(m / wanted)))


def schedules_of(asked: PipelineOptions) -> tuple[str, ...]:
    """Raises: InvalidArgumentError for a schedule that the search over stages has no model of."""
    if asked.schedule is None:
        return SEARCHED_SCHEDULES
    known = [s.value for s in SearchedSchedule]
    if asked.schedule not in known:
        raise InvalidArgumentError(
            where=f"schedule={asked.schedule!r} without a number of stages",
            expected=f"one of {', '.join(known)}",
            got=repr(asked.schedule),
            hint=f"name the stages: plan=autopar.recipes.pipeline(4, {asked.schedule!r})",
        )
    return (asked.schedule,)


def tables(
    cut: Cut,
    cluster: Cluster,
    sizes: Sequence[int],
    limit_bytes: int,
    time_limit_s: float,
    decided: dict[DecidedFor, Decisions],
    *,
    prices_saved: bool = True,
) -> tuple[PricedOption, ...]:
    """The options of every submesh of these sizes.

    `decided` are the decisions made for smaller micro-batches: they are kept where operations and values have the same
    numbers and hang together alike, examples divide among as many of the devices, and what is saved has no price that
    depends on their number (`prices_saved`, which long steps do without); then they are only priced anew. Adds to it
    what is decided here.
    """
    assignment = assign_layers(cut.graph, cut.layers)
    contracted = contract(cut.graph, assignment, len(cut.layers))
    wiring, again = hash(wiring_of(contracted.graph)), again_of(contracted)
    options: list[PricedOption] = []
    models = [cost_model(part, mesh) for part in (part_of(cluster, n) for n in sizes) for mesh in meshes_inside(part)]
    examples = num_examples(cut.step.traced) // cut.graph.num_microbatches
    # Some boundary lies between hosts, and the slowest stage sets the pace.
    link = cluster.between_hosts if cluster.num_hosts > 1 else cluster.inside_host
    for model in models:
        mesh = model.links.mesh
        stages = cluster.num_devices / mesh.num_devices
        in_flight = min(math.ceil(stages), cut.graph.num_microbatches) if prices_saved else 0
        key = mesh, wiring, math.gcd(examples, mesh.num_devices), in_flight and examples, in_flight
        if key not in decided:
            # A stage on this mesh holds about its share of the layers.
            room_bytes, equal = limit_bytes * stages, cut.step.parts > 1
            decided[key] = layer_decisions(contracted, model, room_bytes, in_flight, equal, time_limit_s)
        options += stage_options(contracted, again, cut.layers, model, link, decided[key])
    return tuple(options)


def wiring_of(graph: OpGraph) -> tuple:
    """Operations and values by their numbers, without sizes: equal where decisions for one graph serve another."""
    return tuple(
        (op.id, op.kind, op.section, op.primitive, tuple(a for a in op.inputs if isinstance(a, int)), op.outputs)
        for op in graph.ops()
    )


def submesh_sizes(cluster: Cluster, asked: PipelineOptions, num_layers: int) -> list[int]:
    """Powers of two inside of a host, then whole hosts by powers of two, and all; no smaller than layers allow, but for
    what is left over. Many hosts that this leaves in small parts are cut evenly, each size into the next smaller one.
    """
    n, total = cluster.devices_per_host, cluster.num_devices
    if asked.num_stages is not None:
        if total % asked.num_stages:
            raise InvalidArgumentError(
                where="pipeline",
                expected=f"a number of stages that divides {total} devices",
                got=f"{asked.num_stages} stages",
                hint="ask for a number of stages that divides the devices",
            )
        return [total // asked.num_stages]
    inside = [size for size in (2**i for i in range(n.bit_length())) if n % size == 0]
    hosts = [n * 2**i for i in range(cluster.num_hosts.bit_length()) if 2**i <= cluster.num_hosts]
    sizes = sorted({*inside, *hosts, total})
    enough = [size for size in sizes if size * num_layers >= total]
    # Where the devices are no multiple of the smallest of these, smaller stages make up the rest.
    for size in reversed(sizes[: -len(enough)]):
        if total % enough[0] == 0:
            break
        enough.insert(0, size)
    if total // enough[0] <= MOST_PARTS:
        return enough
    chain = [*inside, *(n * of_hosts for of_hosts in _divisor_chain(cluster.num_hosts))]
    return sorted({size for size in chain if size * num_layers >= total})


def sizes_for(cut: Cut, cluster: Cluster, asked: PipelineOptions, is_largest: bool) -> list[int]:
    """Of the sizes of submeshes those for the micro-batches of a cut: where there are larger ones, these are for stages
    of more devices than share an example.
    """
    sizes = submesh_sizes(cluster, asked, len(cut.layers))
    examples = num_examples(cut.step.traced) // cut.graph.num_microbatches
    return [size for size in sizes if is_largest or size <= max(sizes[0], SHARING * examples)]


def _divisor_chain(n: int) -> list[int]:
    """1 and n with numbers between them of which each divides the next, by the smallest factor that there is."""
    chain = [1]
    while chain[-1] < n:
        rest = n // chain[-1]
        chain.append(chain[-1] * divisors(rest)[1])
    return chain


def meshes_inside(part: Cluster) -> list[LogicalMesh]:
    """The logical meshes of a stage, of at most two axes, of which the inner one stays inside of a host."""
    meshes = distinct_meshes(part, 2)
    return [m for m in meshes if len(m.axis_sizes) == 1 or m.axis_sizes[-1] <= part.devices_per_host]


def equal_choice(
    cut: Cut,
    cluster: Cluster,
    schedule: str,
    num_stages: int,
    chunks: int,
    binding: Binding | None = None,
    recompute: str = "nothing",
    meshes: Sequence[LogicalMesh] | None = None,
) -> list[Choice]:
    """Stages of about equal arithmetic, or of one part of a scan each, on equal submeshes, for every mesh of them that
    a binding leaves, or those that are given.

    Raises: InvalidArgumentError for more stages than layers, or a number of groups that does not cut the devices.
    """
    (size,) = submesh_sizes(cluster, PipelineOptions(num_stages=num_stages // chunks), len(cut.layers))
    first_layers = layers_of_pieces(cut) if cut.step.parts > 1 else balanced(cut.layers, num_stages)
    if meshes is None:
        meshes = meshes_inside(part_of(cluster, size)) if binding is None else [binding.on(size)[0]]
    return [
        Choice(
            schedule=schedule,
            chunks=chunks,
            first_layers=first_layers,
            group_meshes=(mesh,) * (num_stages // chunks),
            policies=(recompute,) * len(cut.layers),
        )
        for mesh in meshes
    ]


def asked_pipeline(
    traced: TracedStep,
    cluster: Cluster,
    options: PlanOptions,
    limit_bytes: int,
    rules: RuleBook,
    progress: Progress,
) -> Found:
    """Stages of equal arithmetic on equal submeshes, as asked; the logical mesh that is fastest and fits. Where none
    does, copies of the state are made in each micro-batch anew.
    """
    found = _leaner_where_needed(
        lambda keeps_copies: _asked(traced, cluster, options, limit_bytes, rules, progress, keeps_copies), limit_bytes
    )
    assert isinstance(found, Found), "stages that were asked for are built whether they fit or not"
    return found


def _asked(
    traced: TracedStep,
    cluster: Cluster,
    options: PlanOptions,
    limit_bytes: int,
    rules: RuleBook,
    progress: Progress,
    keeps_copies: bool,
) -> tuple[Found, bool]:
    """(the best of what was asked for, copies of the state being kept or made anew; whether there are any)"""
    asked, binding = options.pipeline, options.binding
    name = asked.schedule or "1f1b"
    chunks = asked.chunks or default_chunks(name)
    num_stages = (asked.num_stages or 1) * chunks
    with progress.pass_("micro-batches"):
        step = cut_scans(traced, num_stages, rules)
        if step.parts > 1 and chunks > 1:
            raise _one_part_a_group(step, name, chunks)
        parts = binding.example_parts(cluster.num_devices * chunks // num_stages) if binding is not None else 1
        num_microbatches = asked.num_microbatches or few_bubbles(traced, num_stages, parts)
        cut = cut_layers(step, num_microbatches, rules, keeps_copies=keeps_copies)
        if binding is not None:
            cut = dataclasses.replace(cut, graph=described(cut.graph))
            binding.check(cut.graph, cluster.num_devices * chunks // num_stages)
            if binding.shares_sequences:
                check_attention(cut.graph)
    pinned: list[PinsOnMesh] = []
    if options.pins is not None:
        (size,) = submesh_sizes(cluster, PipelineOptions(num_stages=num_stages // chunks), len(cut.layers))
        found = options.pins.found(traced, cut.graph)
        part = part_of(cluster, size)
        pinned = on_meshes(found, part, options.max_mesh_axes, binding, cut.graph, cut.leaves)
    meshes = [at.mesh for at in pinned] or None
    choices = equal_choice(cut, cluster, name, num_stages, chunks, binding, options.recompute, meshes)
    built = []
    for choice, pins in itertools.zip_longest(choices, pinned):
        constraints = binding.on(choice.group_meshes[0].num_devices)[1] if binding is not None else None
        with progress.pass_("build stages"):
            staged = build(cut, choice, cluster, limit_bytes, options.time_limit_s, constraints, pins)
            built.append(Found(staged=staged, choice=choice, weighed=(), keeps_copies=keeps_copies, pins=pins))
    best = min(built, key=lambda found: found.rank(limit_bytes))
    return dataclasses.replace(best, weighed=tuple(found.trial for found in built)), copies_state(cut.graph)


def why_no_pipeline(answers: Sequence[StagePlan | NoStages]) -> str:
    """The reasons of the problems that have no plan."""
    reasons = "; ".join(dict.fromkeys(a.reason for a in answers if isinstance(a, NoStages)))
    return reasons or "no pipeline was near the plan without stages"
