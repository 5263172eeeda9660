"""The recipes that the search is compared with: a table, in which each is a walk over the plans that it may mean.

A recipe such as data parallelism leaves open into how many micro-batches the batch is cut and what is recomputed, and
Megatron's grid leaves open how many devices share what. Each recipe is therefore a generator: it yields attempts, is
told what each came to, and goes on from the best. A new one is a function here and a line of `RECIPES`.
"""

import dataclasses
import math
from collections.abc import Callable, Generator, Iterable, Iterator

from autopar import recipes
from autopar.hardware.cluster import Cluster
from autopar.intra_op.logical_meshes import distinct_meshes
from autopar.ir.layout import even_layout
from autopar.ir.mesh import LogicalMesh
from autopar.ir.traced_step import TracedStep
from autopar.plan.options import PlanRequest
from autopar.recipes import Recipe
from benchmarks.auto_vs_manual.models import Model

AUTO = "auto"
TIMED = "auto, timed"  # the fastest by the clock of the plans that the search predicts to be the best (`autopar.tune`)
FIRST_EXAMPLES = 4  # of each copy of the model in a micro-batch, where a walk begins that is lean
MOST_STAGES = 16
RECOMPUTE = ("nothing", "matmuls", "input")  # in the order of what they save


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """A model's step, traced, on a cluster."""

    model: Model
    traced: TracedStep
    cluster: Cluster

    @property
    def examples(self) -> int:
        return self.model.sizes["batch"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attempt:
    """One plan to be made."""

    text: str
    options: PlanRequest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What an attempt came to; no time where a plan was refused for the memory it needs."""

    step_time_s: float
    peak_bytes: int
    limit_bytes: int

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.limit_bytes

    def rank(self) -> tuple[bool, float]:
        """Smaller is better: what fits first, then what is faster; of what does not fit, the smaller."""
        return not self.fits, self.step_time_s if self.fits else float(self.peak_bytes)


Walk = Generator[Attempt, Outcome | None, None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """One setting: devices that share each matrix, stages, ZeRO, examples of a copy in a micro-batch, recomputation."""

    tp: int = 1
    pp: int = 1
    zero: int = 0
    examples: int
    recompute: str

    def num_microbatches(self, problem: Problem) -> int | None:
        """None where the batch cannot be cut so."""
        together = problem.cluster.num_devices // (self.tp * self.pp) * self.examples
        return problem.examples // together if problem.examples % together == 0 else None

    def saves_more(self, other: "Point") -> bool:
        """Whether the same setting needs less memory than another, or as much, by micro-batches and recomputation."""
        same = (self.tp, self.pp, self.zero) == (other.tp, other.pp, other.zero)
        level = RECOMPUTE.index
        return same and self.examples <= other.examples and level(self.recompute) >= level(other.recompute)


def first_points(problem: Problem, **setting: int) -> list[Point]:
    """Where a walk over a setting begins: the batch as it is (where that fits nothing leaner is looked at), and a few
    examples at a time with everything recomputed; with stages the latter alone.

    Nothing where the batch has fewer examples than there are copies of the model.
    """
    copies = problem.cluster.num_devices // (setting.get("tp", 1) * setting.get("pp", 1))
    share, rest = divmod(problem.examples, copies)
    if rest or not share:
        return []
    examples = max(e for e in range(1, min(share, FIRST_EXAMPLES) + 1) if share % e == 0)
    few = Point(examples=examples, recompute="input", **setting)
    return [few] if setting.get("pp", 1) > 1 else [Point(examples=share, recompute="nothing", **setting), few]


def neighbours(point: Point, m: int, outcome: Outcome, zeros: Iterable[int]) -> Iterator[Point]:
    """What may be better than a point, which has m micro-batches: leaner where it does not fit, else faster.

    Micro-batches grow and shrink as memory allows, by two at least: what does not depend on them makes both steps
    careful. Smaller ones are faster where there are stages, for they leave smaller bubbles; and where they make room to
    keep more for the backward pass.
    """
    level, leaner = RECOMPUTE.index(point.recompute), RECOMPUTE.index(point.recompute) + 1
    smaller = [point.examples // parts for parts in (2, 4) if point.examples % parts == 0]
    if outcome.fits:
        more = 2 if point.pp > 1 else math.gcd(power_below(outcome.limit_bytes / outcome.peak_bytes), m)
        yield dataclasses.replace(point, examples=more * point.examples)
        if level > 0:
            for examples in (point.examples, *smaller):
                yield dataclasses.replace(point, examples=examples, recompute=RECOMPUTE[level - 1])
        if point.pp > 1 and smaller:
            yield dataclasses.replace(point, examples=smaller[0])
    else:
        parts = math.gcd(power_below(outcome.peak_bytes / outcome.limit_bytes), point.examples)
        if parts > 1:
            yield dataclasses.replace(point, examples=point.examples // parts)
        if leaner < len(RECOMPUTE):
            examples = point.examples // max(parts // 2, 1)
            yield dataclasses.replace(point, examples=examples, recompute=RECOMPUTE[leaner])
    for zero in zeros:
        if zero != point.zero:
            yield dataclasses.replace(point, zero=zero)


def walk(
    problem: Problem,
    starts: Iterable[Point],
    recipe_of: Callable[[Point, int], Recipe],
    zeros: Iterable[int] = (),
) -> Walk:
    """All starts, then from the best of them to its neighbours for as long as one is better."""
    seen: dict[Point, Outcome | None] = {}

    def tried(points: Iterable[Point]) -> Generator[Attempt, Outcome | None, None]:
        for point in points:
            if point in seen or (m := point.num_microbatches(problem)) is None:
                continue
            if any(o is not None and not o.fits and known.saves_more(point) for known, o in seen.items()):
                continue  # a leaner one did not fit
            if point.pp == 1 and any(o is not None and o.fits and point.saves_more(known) for known, o in seen.items()):
                continue  # a richer one fits
            text = [f"tp {point.tp}"] * (point.tp > 1) + [f"{point.pp} stages"] * (point.pp > 1)
            text += [f"ZeRO {point.zero}"] * (point.zero > 0) + [f"{m} micro-batches"] * (m > 1)
            text += [f"recompute {point.recompute}"] * (point.recompute != "nothing")
            seen[point] = yield Attempt(text=", ".join(text) or "one program", options=of(recipe_of(point, m)))

    def best() -> Point | None:
        known = [(outcome.rank(), n, point) for n, (point, outcome) in enumerate(seen.items()) if outcome is not None]
        return min(known)[2] if known else None

    yield from tried(starts)
    here = best()
    while here is not None:
        outcome = seen[here]
        m = here.num_microbatches(problem)
        assert outcome is not None, "the best came to something"
        assert m is not None, "what was tried can be cut"
        yield from tried(neighbours(here, m, outcome, zeros))
        if best() == here:
            return
        here = best()


def power_below(ratio: float) -> int:
    """The largest power of two that is no more than a ratio, and at least two."""
    return max(2, 2 ** math.floor(math.log2(ratio)))


def of(recipe: Recipe) -> PlanRequest:
    return recipe.request


def cut(m: int, pp: int = 1) -> int | None:
    """The number of micro-batches to ask for: none where nothing is cut."""
    return m if m > 1 or pp > 1 else None


# The recipes


def auto(problem: Problem) -> Walk:
    yield Attempt(text="", options=PlanRequest())


def data_parallel(problem: Problem, zero: int = 0, offload: str = "nothing", zero_size: int | None = None) -> Walk:
    return walk(
        problem,
        first_points(problem, zero=zero),
        lambda p, m: recipes.combine(
            zero=zero, zero_size=zero_size, num_microbatches=cut(m), recompute=p.recompute, offload=offload
        ),
    )


def hybrid_sharded(problem: Problem) -> Walk:
    """The devices of a host share the whole state (ZeRO-3), hosts are copies. On one host that is ZeRO-3 itself."""
    return data_parallel(problem, 3, zero_size=problem.cluster.domain_devices)


def tensor_parallel(problem: Problem) -> Walk:
    """All devices of a host share each matrix, hosts are copies."""
    tp = min(problem.cluster.domain_devices, problem.cluster.num_devices)
    return walk(
        problem,
        first_points(problem, tp=tp),
        lambda p, m: recipes.combine(tp=tp, num_microbatches=cut(m), recompute=p.recompute),
    )


def megatron(problem: Problem, most_tp: int | None = None) -> Walk:
    """Every product of tensor (inside of a host), pipeline and data parallelism; the optimiser's state in parts.

    Those with most tensor parallelism come first: they are the likeliest to fit, where a walk is ended early.
    """
    n, inside = problem.cluster.num_devices, problem.cluster.domain_devices
    starts = [
        point
        for tp in reversed(powers(most_tp or inside))
        for pp in powers(MOST_STAGES)
        if n % (tp * pp) == 0 and inside % tp == 0
        for point in first_points(problem, tp=tp, pp=pp, zero=1 if tp * pp < n else 0)
    ]
    return walk(
        problem,
        starts,
        lambda p, m: recipes.combine(
            tp=p.tp, pp=p.pp, zero=p.zero, num_microbatches=cut(m, p.pp), recompute=p.recompute
        ),
    )


def expert_and_data(problem: Problem) -> Walk:
    """Experts in parts over as many devices as divide them, examples over all; ZeRO-2 for what is not of experts.

    Source: Rajbhandari et al., "DeepSpeed-MoE", 2022, section 5; Lepikhin et al., "GShard", 2020, section 3.
    """
    n = problem.cluster.num_devices
    experts = problem.model.sizes.get("experts", 1)
    ep = max(d for d in range(1, n + 1) if n % d == 0 and experts % d == 0)

    return walk(
        problem,
        first_points(problem, zero=2),
        lambda p, m: recipes.combine(ep=ep, zero=p.zero, num_microbatches=cut(m), recompute=p.recompute),
        zeros=(0, 2, 3),
    )


def sequence(problem: Problem, kind: str) -> Walk:
    """The devices of a host share each sequence, hosts are copies."""
    sp = min(problem.cluster.domain_devices, problem.cluster.num_devices)
    return walk(
        problem,
        first_points(problem, tp=sp),
        lambda p, m: recipes.combine(sp=sp, sequence=kind, num_microbatches=cut(m), recompute=p.recompute),
    )


def grid_of_devices(problem: Problem, kind: str) -> Walk:
    """Tensor parallelism on a square or a cube of all devices, where they make one."""
    n, depth = problem.cluster.num_devices, 2 if kind == "2.5d" else None
    sizes = {"2d": [q * q for q in range(2, 65)], "2.5d": [2 * q * q for q in range(2, 65)]}
    if n in sizes.get(kind, [q**3 for q in range(2, 17)]):
        recipe = recipes.tensor_parallel(kind, size=n, depth=depth)
        yield Attempt(text=f"{kind}, {n} devices", options=of(recipe))


def unbound(point: Point, m: int) -> Recipe:
    """Stages of equal arithmetic, or one; inside of each the integer program is free."""
    recipe = recipes.pipeline(point.pp, num_microbatches=m)
    return dataclasses.replace(recipe, request=dataclasses.replace(recipe.request, recompute=point.recompute))


def intra_operator(problem: Problem) -> Walk:
    """One program on all devices, without stages, laid out by the integer program."""
    for mesh in distinct_meshes(problem.cluster, 2):
        if problem.examples <= problem.cluster.num_devices * FIRST_EXAMPLES:
            yield Attempt(text=f"mesh {mesh}", options=PlanRequest(axis_sizes=mesh.axis_sizes))
    yield from walk(problem, first_points(problem), unbound)


def equal_stages(problem: Problem) -> Walk:
    """Two stages or more of equal arithmetic on equal submeshes."""
    sizes = [pp for pp in powers(MOST_STAGES) if pp > 1 and problem.cluster.num_devices % pp == 0]
    return walk(problem, [point for pp in sizes for point in first_points(problem, pp=pp)], unbound)


def inter_operator(problem: Problem) -> Walk:
    """As many stages as devices."""
    return walk(problem, first_points(problem, pp=problem.cluster.num_devices), unbound)


def shard_the_largest(problem: Problem) -> Walk:
    """Every array that the step takes split along its largest dimension over all devices; the rest follows best."""
    mesh = LogicalMesh(axis_sizes=(problem.cluster.num_devices,))
    fixed = tuple((i, even_layout(aval.shape, mesh)) for i, aval in enumerate(problem.traced.in_avals))
    yield Attempt(text=f"mesh {mesh}", options=PlanRequest(axis_sizes=mesh.axis_sizes, fixed=fixed))


def powers(most: int) -> list[int]:
    """Powers of two up to a number."""
    return [2**i for i in range(most.bit_length()) if 2**i <= most]


RECIPES: dict[str, Callable[[Problem], Walk]] = {
    AUTO: auto,
    "data parallel": data_parallel,
    "zero 1": lambda problem: data_parallel(problem, 1),
    "zero 2": lambda problem: data_parallel(problem, 2),
    "zero 3": lambda problem: data_parallel(problem, 3),
    "zero 2 offload": lambda problem: data_parallel(problem, 2, offload="optimizer"),
    "hybrid sharded": hybrid_sharded,
    "tensor parallel": tensor_parallel,
    "megatron grid": megatron,
    "pipeline and data": lambda problem: megatron(problem, most_tp=1),
    "expert and data": expert_and_data,
    "ulysses": lambda problem: sequence(problem, "ulysses"),
    "ring attention": lambda problem: sequence(problem, "ring"),
    "2d tensor parallel": lambda problem: grid_of_devices(problem, "2d"),
    "2.5d tensor parallel": lambda problem: grid_of_devices(problem, "2.5d"),
    "3d tensor parallel": lambda problem: grid_of_devices(problem, "3d"),
    "equal stages": equal_stages,
    "inter-operator only": inter_operator,
    "intra-operator only": intra_operator,
    "shard the largest": shard_the_largest,
}
NAMES = (AUTO, TIMED, *(name for name in RECIPES if name != AUTO))  # of all rows, in the order of tables
