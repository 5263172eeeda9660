"""One stage on all devices: its bounds, its numbers of micro-batches, and its decisions by themselves.

The tables decide layers one by one, and add up what is sent. Only the simulation of a stage tells which decisions wait
least, so that one stage that comes near the best is decided again: by itself, under data parallelism and ZeRO, with
other charges, in other numbers of micro-batches, with more recomputation in some layers than in others.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

from autopar.cost.usage import compute_times_s
from autopar.ir.binding import Binding
from autopar.ir.graph import Section
from autopar.search.inter_op.build_stages import MicrobatchedStep
from autopar.search.inter_op.decide_stages import StageChoice
from autopar.search.inter_op.evaluate import PipelineEvaluator
from autopar.search.inter_op.pipeline_candidate import PipelineCandidate, PipelineEstimate
from autopar.search.inter_op.search_space import NEAR_THE_BEST, own_meshes
from autopar.search.inter_op.stage_costs import LayerPolicies
from autopar.search.inter_op.staged import StagedStep
from autopar.search.inter_op.truncated_model import ESTIMATE_ERROR


def least_in_turn_s(staged: StagedStep, most_devices: int) -> float:
    """Seconds that the one stage of a step takes at least as several, of at most so many devices each, in one
    micro-batch: these run their forward passes one after another. Communication and work done twice are left out.
    """
    (planned,) = staged.stages
    graph, num_devices = planned.stage.graph, planned.model.links.mesh.num_devices
    strategy, section = planned.sharding.strategy, {op.id: op.section for op in graph.ops()}
    shared_s = forward_s = 0.0
    for op, seconds in compute_times_s(graph, planned.lowered.lowered, planned.model).items():
        op_s = seconds * (strategy[op].split if op in strategy else 1) / num_devices
        shared_s += op_s
        forward_s += op_s if section[op] is Section.FORWARD else 0.0
    return shared_s + forward_s * (num_devices / most_devices - 1)


# One stage is evaluated in more micro-batches if it takes at most so many times as long as the best.
WALKED_WITHIN = 1.05


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchCounts:
    """The numbers of micro-batches in which one stage is evaluated, in rising order. `cut` gives the step in one, None
    where it admits none. `least_s`: of the step under any plan, where no device repeats the work of another.
    """

    numbers: Sequence[int]
    cut: Callable[[int], MicrobatchedStep | None]
    num_examples: int
    num_devices: int
    least_s: float

    def admits(self, m: int, choice: StageChoice) -> bool:
        """Whether the step in m micro-batches has the layers of a choice."""
        microbatched = self.cut(m)
        return microbatched is not None and len(microbatched.layers) == len(choice.policies)

    def shared_by_most(self, m: int) -> int:
        """At most m micro-batches: those whose examples are shared out over most devices, and of these the most."""
        return max((self._sharing(n), n) for n in self.numbers if n <= m)[1]

    def take_too_long(self, m: int, best: PipelineCandidate | PipelineEstimate | None) -> bool:
        """Whether recipes take longer than the best in m micro-batches, or without one far longer than they may at
        least. They split nothing but examples, so that devices repeat the work of others where there are fewer.
        """
        longest_s = best.step_time_s if best is not None else NEAR_THE_BEST * self.least_s
        return self.least_s * self.num_devices / self._sharing(m) > longest_s

    def _sharing(self, m: int) -> int:
        """The devices over which recipes split the examples of a micro-batch."""
        return math.gcd(self.num_examples // m, self.num_devices)


def refine_in_other_counts(evaluator: PipelineEvaluator, others: MicrobatchCounts) -> None:
    """Evaluates what fits in fewer micro-batches while that is faster and may become the best, and what comes near the
    best in more of them: while that is faster, or until it fits.

    Each recipe and each way to recompute by itself.
    """
    begun: dict[tuple[str, tuple[str, ...]], PipelineEstimate] = {}
    for found in sorted(evaluator.refinements, key=lambda found: found.rank(evaluator.limit_bytes)):
        if found.binding is None and found.choice.terms:
            continue  # whose prices are those of a number of micro-batches
        begun.setdefault((found.name, found.choice.policies), found)
    for first in begun.values():
        if first.fits(evaluator.limit_bytes) and _walk(evaluator, others, first, -1):
            continue
        if evaluator.best is not None and first.step_time_s <= WALKED_WITHIN * evaluator.best.step_time_s:
            _walk(evaluator, others, first, 1)


def _walk(evaluator: PipelineEvaluator, others: MicrobatchCounts, first: PipelineEstimate, step: int) -> bool:
    """Whether the next number in a direction is better than the first; goes on as long as the next one is."""
    at, position = first, others.numbers.index(first.num_microbatches) + step
    while 0 <= position < len(others.numbers) and not evaluator.deadline.passed:
        m = others.numbers[position]
        if at.binding is not None and others.take_too_long(m, evaluator.best):
            break
        if not evaluator.may_gain(m, at.choice) or not others.admits(m, at.choice):
            break
        if step < 0 and evaluator.least_bytes(m, at.choice) > evaluator.limit_bytes:
            break
        found = evaluator.refined(m, at.choice, at.name, at.binding)
        if found is None or found.rank(evaluator.limit_bytes) >= at.rank(evaluator.limit_bytes):
            break
        if step < 0 and evaluator.best is not None and _in_one_s(at, found) > evaluator.best.step_time_s:
            return True
        at, position = found, position + step
    return at is not first


def _in_one_s(more: PipelineEstimate, fewer: PipelineEstimate) -> float:
    """Seconds in one micro-batch, if each takes off as much as the last ones did."""
    each_s = (more.step_time_s - fewer.step_time_s) / (more.num_microbatches - fewer.num_microbatches)
    return fewer.step_time_s - each_s * (fewer.num_microbatches - 1)


BY_ITSELF = "decided by itself"  # one stage, whose decisions are not those of the tables
IN_SOME_LAYERS = "{} in {} layers"
TRIED_MIXES = 3  # of policies of layers, in each number of micro-batches


def refine_one_stage(evaluated: PipelineEvaluator, others: MicrobatchCounts, counts: Iterable[float]) -> None:
    """Evaluates the best pipeline of one stage under other decisions, where it comes near the best of all: as it
    recomputes, and without any recomputation, in the first number of micro-batches from its own on in which that may
    fit.

    In one micro-batch, what keeps all is a program without stages, of which those were weighed. `counts`: other
    fractions of hidden communication that are charged.
    """
    best = _near_the_best(evaluated)
    if best is None:
        return
    m, choice = best.num_microbatches, best.choice
    keeps_all = dataclasses.replace(choice, policies=("nothing",) * len(choice.policies))
    numbers: dict[StageChoice, int] = {}
    for saving in dict.fromkeys((keeps_all, choice)):  # what keeps all is mostly faster, and bounds the other
        known_to_fit = saving == choice and best.fits(evaluated.limit_bytes)
        number = m if known_to_fit else first_that_may_fit(evaluated, others, m, saving)
        if number is not None:
            numbers[saving] = number
    weighed = [(1, keeps_all)] if evaluated.context.weighed_one_program else []
    for saving, number in numbers.items():
        for mesh in own_meshes(evaluated.cluster, choice.group_meshes[0]):
            own = dataclasses.replace(saving, group_meshes=(mesh,), terms=(), over_limit=())
            if (number, saving) not in weighed and evaluated.may_gain(number, saving):
                evaluated.refined(number, own, BY_ITSELF)
        in_number = _number_of_recipes(evaluated, others, number, saving)
        if in_number is not None and (in_number, saving) not in weighed:
            of_recipes(evaluated, others, in_number, saving)
    for count in counts:
        terms = tuple(dataclasses.replace(t, exposed_fraction=count) for t in choice.terms)
        if numbers.get(choice) == m and terms != choice.terms and evaluated.may_gain(m, choice):
            evaluated.refined(m, dataclasses.replace(choice, terms=terms), f"hidden sends count {count:g}")


def of_recipes(evaluated: PipelineEvaluator, others: MicrobatchCounts, m: int, choice: StageChoice) -> None:
    """Evaluates one stage under data parallelism and ZeRO, which may come near the best: the leanest first, and none
    that holds more through its micro-batches than a device has.
    """
    for held_bytes, name, binding in evaluated.recipes(m):
        if others.take_too_long(m, evaluated.best) or not evaluated.may_gain(m, choice):
            return
        if held_bytes > evaluated.limit_bytes:
            evaluated.does_not_fit(m, name, held_bytes)
        else:
            evaluated.refined(m, choice, name, binding)


def _near_the_best(evaluated: PipelineEvaluator) -> PipelineEstimate | None:
    """The best of one stage: the best of all, or one that fits and takes little longer."""
    one_stage = [candidate for (stages, _), (candidate, _) in evaluated.best_of.items() if stages == 1]
    found = min(one_stage, key=lambda each: each.rank(evaluated.limit_bytes), default=None)
    if found is None or evaluated.best is None:
        return None
    if found.rank(evaluated.limit_bytes) <= evaluated.best.rank(evaluated.limit_bytes):
        return found
    is_near = found.step_time_s <= NEAR_THE_BEST * evaluated.best.step_time_s
    return found if found.fits(evaluated.limit_bytes) and is_near else None


def first_that_may_fit(
    evaluated: PipelineEvaluator, others: MicrobatchCounts, m: int, choice: StageChoice
) -> int | None:
    """The first number of micro-batches, from m on, in which a choice may fit; None where there is none.

    Twice as many micro-batches need half of the memory at least, so that some numbers are left out.
    """
    least = m * 1.0
    for number in (n for n in others.numbers if n >= m):
        if evaluated.deadline.passed:
            return None
        if number < least or not others.admits(number, choice):
            continue
        needed_bytes = evaluated.least_bytes(number, choice)
        if needed_bytes <= evaluated.limit_bytes:
            return number
        least = number * needed_bytes / evaluated.limit_bytes
    return None


def _number_of_recipes(
    evaluated: PipelineEvaluator, others: MicrobatchCounts, m: int, choice: StageChoice
) -> int | None:
    """The number of micro-batches of recipes where other decisions have m: fewer, where more devices share the examples
    and that may fit. None where recipes take too long, since devices repeat the work of others.
    """
    number = others.shared_by_most(m)
    if (
        number != m
        and not evaluated.deadline.passed
        and not others.take_too_long(number, evaluated.best)
        and others.admits(number, choice)
        and evaluated.least_bytes(number, choice) <= evaluated.limit_bytes
    ):
        return number
    return None if others.take_too_long(m, evaluated.best) else m


def recompute_in_some_layers(
    evaluated: PipelineEvaluator, others: MicrobatchCounts, policies: Sequence[LayerPolicies]
) -> None:
    """Evaluates pipelines of one stage with more recomputation in some layers than in others, where memory is short:
    the best in as many micro-batches, in fewer and in more, while keeping all would be faster and does not fit; then
    those that are faster than the best and exceed the memory.
    """
    best, at = evaluated.best, _near_the_best(evaluated)
    if best is None or not best.fits(evaluated.limit_bytes) or evaluated.context.program_fits:
        return
    if at is not None:
        _around_the_best(evaluated, others, policies, best, at)
    one_stage = [found for (stages, _), (found, _) in evaluated.best_of.items() if stages == 1]
    for found in sorted(one_stage, key=lambda each: each.step_time_s):
        if evaluated.best is None or found.step_time_s >= (1 - ESTIMATE_ERROR) * evaluated.best.step_time_s:
            return
        if not found.fits(evaluated.limit_bytes):
            _leaner_in_some_layers(evaluated, found, policies)


def _leaner_in_some_layers(
    evaluated: PipelineEvaluator, found: PipelineEstimate, policies: Sequence[LayerPolicies]
) -> None:
    """What exceeds the memory, with more recomputation in as many layers as it takes to fit."""
    terms = found.rounds[-1].terms if found.rounds else ()
    plain = dataclasses.replace(found.choice, terms=terms, over_limit=(True,) * len(terms))
    for ladder in policies:
        if plain.policies in ladder.of_layers:
            begins = ladder.of_layers.index(plain.policies)
            _in_some_layers(evaluated, found.num_microbatches, plain, None, ladder, begins)


def _around_the_best(
    evaluated: PipelineEvaluator,
    others: MicrobatchCounts,
    policies: Sequence[LayerPolicies],
    best: PipelineCandidate | PipelineEstimate,
    at: PipelineEstimate,
) -> None:
    """The best in as many micro-batches, in fewer and in more. `at` is the best of one stage."""
    binding = best.binding if isinstance(best, PipelineEstimate) and len(best.choice.first_layers) == 1 else None
    of = best.choice if binding is not None else at.choice
    terms = at.rounds[-1].terms if at.rounds and binding is None else ()  # under which the state fits
    plain = dataclasses.replace(of, terms=terms, over_limit=(True,) * len(terms))
    of_step = [each for each in policies if len(plain.policies) > 1 and plain.policies in each.of_layers]
    position = others.numbers.index(at.num_microbatches)
    for m in others.numbers[max(0, position - 1) : position + 2] if of_step else ():
        if others.admits(m, plain):
            for ladder in of_step:
                _in_some_layers(evaluated, m, plain, binding, ladder)


def _in_some_layers(
    evaluated: PipelineEvaluator,
    m: int,
    plain: StageChoice,
    binding: Binding | None,
    policies: LayerPolicies,
    begins: int = 0,
) -> None:
    """In m micro-batches: a policy that keeps more than fits in as many layers as it may, the next one in the others,
    spread evenly; from the policy of number `begins` on. Between mixes that were evaluated a peak is on a line over the
    bytes that are kept.
    """
    limit_bytes, mixes = evaluated.limit_bytes, _Mixes(policies, len(plain.policies))
    peak_bytes: dict[int, int] = {}
    times_s: dict[int, float] = {}

    def of(mix: int) -> PipelineEstimate | PipelineCandidate | None:
        choice = dataclasses.replace(plain, policies=mixes.policies_of(mix))
        found = evaluated.as_it_is(m, choice, binding) if not evaluated.deadline.passed else None
        if found is not None:
            peak_bytes[mix], times_s[mix] = found.peak_bytes, found.step_time_s
        return found

    def gains(mix: int) -> bool:
        """Whether what recomputes more than a mix, and is no faster, may be worth its building."""
        assert evaluated.best is not None, "one fits"
        return times_s[mix] < (1 - ESTIMATE_ERROR / 2) * evaluated.best.step_time_s

    begins *= mixes.num_layers
    first = of(begins) if begins < mixes.last else None
    if first is None or first.fits(limit_bytes) or not gains(begins):
        return
    # The bytes that are kept err where all is: much of it is fused.
    for mix in (begins + mixes.num_layers, mixes.last):
        found = of(mix)
        if found is None:
            return
        if found.fits(limit_bytes):
            break
        if not gains(mix):
            return
    else:
        return
    for _ in range(TRIED_MIXES):
        over = max(mix for mix, nbytes in peak_bytes.items() if nbytes > limit_bytes)
        under = min(mix for mix, nbytes in peak_bytes.items() if nbytes <= limit_bytes)
        if under - over <= 1 or not gains(over):
            break
        share = (peak_bytes[over] - limit_bytes) / (peak_bytes[over] - peak_bytes[under])
        wanted_bytes = mixes.kept_bytes(over) - share * (mixes.kept_bytes(over) - mixes.kept_bytes(under))
        mix = next((n for n in range(over + 1, under) if mixes.kept_bytes(n) <= wanted_bytes), under - 1)
        choice = dataclasses.replace(plain, policies=mixes.policies_of(mix))
        refined = evaluated.refined(m, choice, mixes.name_of(mix), binding)
        if refined is None:
            break
        peak_bytes[mix], times_s[mix] = refined.peak_bytes, refined.step_time_s


@dataclasses.dataclass(frozen=True, slots=True)
class _Mixes:
    """Policies of layers, each in none of the layers, in one, and so on up to all of them: numbered in this order."""

    policies: LayerPolicies
    num_layers: int

    @property
    def last(self) -> int:
        return (len(self.policies.names) - 1) * self.num_layers

    def policies_of(self, mix: int) -> tuple[str, ...]:
        number, n = divmod(mix, self.num_layers)
        next_in = {round((i + 1) * self.num_layers / n) - 1 for i in range(n)}
        of_layers = self.policies.of_layers
        return tuple(of_layers[number + (layer in next_in)][layer] for layer in range(self.num_layers))

    def kept_bytes(self, mix: int) -> float:
        number, n = divmod(mix, self.num_layers)
        at = self.policies.kept_bytes[number]
        return at + (n / self.num_layers * (self.policies.kept_bytes[number + 1] - at) if n else 0.0)

    def name_of(self, mix: int) -> str:
        number, n = divmod(mix, self.num_layers)
        return IN_SOME_LAYERS.format(self.policies.names[number + (n > 0)], n or self.num_layers)
