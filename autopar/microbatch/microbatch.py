"""The graph of a training step over micro-batches, with the results of the whole batch.

The graph of a micro-batch is cut out of that of the whole batch (`cut_graph`); where it cannot be, the step is traced
on a micro-batch. Each value of the whole step is, in terms of the micro-batches, the same in all of them, the
concatenation of their values, or the sum of their values (`value_states`). Literals are those of the whole batch, so no
sum needs a factor. Each operation then runs before the loop over micro-batches, in it, or after it (`loop_sections`). A
step whose examples depend on one another is refused.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from autopar.errors import BatchMismatchError, InvalidArgumentError, MixedExamplesError, UnsupportedError
from autopar.frontend.build_graph import build_graph
from autopar.ir.graph import Atom, Block, OpGraph
from autopar.ir.rewrite import renumbered
from autopar.ir.traced_step import TracedStep
from autopar.microbatch.accumulation import AccumulatingFollower, check_patterns
from autopar.microbatch.alignment import with_literals_of
from autopar.microbatch.cut_graph import cut_graph
from autopar.microbatch.hoist_draws import hoist_draws
from autopar.microbatch.island_states import body_states
from autopar.microbatch.known_results import split_known_results
from autopar.microbatch.loop_sections import LoopSections
from autopar.microbatch.loop_writer import LoopWriter
from autopar.microbatch.microbatch_analysis import Follower
from autopar.microbatch.smaller_step import example_leaves, num_examples, smaller_step
from autopar.microbatch.value_states import find_states
from autopar.microbatch.whole_batch_work import works_on_all_at_once
from autopar.sharding.rules import RuleBook, with_rules


def micro_batched(
    traced: TracedStep,
    num_microbatches: int,
    rules: RuleBook,
    whole: OpGraph | None = None,
    on_fewer: Callable[[TracedStep, int], TracedStep] = smaller_step,
) -> OpGraph:
    """The graph of a step whose batch is split into `num_microbatches`.

    `whole` is the graph of the whole batch, if it is built already; `on_fewer` gives the step on a number of examples,
    as `SmallerSteps` does for several numbers. Inputs and outputs are those of the whole step.
    SPLIT, ACCUMULATE and STACK operations mark the values that enter and leave the loop; operations are ordered by
    section.

    Raises: InvalidArgumentError for a number below one; BatchMismatchError when it does not divide the batch;
    MixedExamplesError when the result of one example depends on the others; UnsupportedError for other differences of
    the traces.
    """
    if num_microbatches < 1:
        raise InvalidArgumentError(
            where="num_microbatches", expected="a positive number", got=str(num_microbatches), hint="1 cuts nothing"
        )
    examples = num_examples(traced)
    if examples % num_microbatches:
        raise BatchMismatchError(
            where=traced.name,
            expected=f"a batch that can be cut into {num_microbatches} equal micro-batches",
            got=f"{examples} examples",
            hint=f"choose num_microbatches from the divisors of {examples}, or another batch size",
        )
    whole = whole or build_graph(traced, rules)
    if num_microbatches == 1:
        return _over_micro_batches(traced, whole, Follower(whole, whole, 1, body_states=body_states), rules)
    if traced.per_microbatch:
        return _per_microbatch(traced, whole, num_microbatches, rules)
    if traced.blockwise_attention:  # whose operations are put into the graph of a trace
        _, part = _traced_part(traced, num_microbatches, rules, on_fewer)
        return _of_both(traced, whole, part, num_microbatches, rules)
    cut_error: UnsupportedError
    try:
        part = _cut(traced, whole, num_microbatches, rules)
    except UnsupportedError as error:
        cut_error, is_cut = error, False
    else:
        try:
            found = _of_both(traced, whole, part, num_microbatches, rules)
            return _with_all_in_loop(found, traced, whole, rules, on_fewer)
        except UnsupportedError as error:  # by a trace, other dimensions may be those of the examples
            cut_error, is_cut = error, True
    try:
        _, part = _traced_part(traced, num_microbatches, rules, on_fewer)
    except UnsupportedError as unlike:
        raise (cut_error if is_cut else _neither(unlike, cut_error)) from None
    return _of_both(traced, whole, part, num_microbatches, rules)


def _with_all_in_loop(
    found: OpGraph,
    traced: TracedStep,
    whole: OpGraph,
    rules: RuleBook,
    on_fewer: Callable[[TracedStep, int], TracedStep],
) -> OpGraph:
    """The graph that was found, or that of a trace on a micro-batch where that leaves no work on all examples out of
    the loop: what indices of random rows read has the size of the whole batch where it is cut.
    """
    examples, first = num_examples(traced), len(found.block.inputs) - len(traced.in_avals)
    batch = [first + i for i in example_leaves(traced)]
    if not works_on_all_at_once(found, examples, batch):
        return found
    try:
        _, part = _traced_part(traced, found.num_microbatches, rules, on_fewer)
        by_trace = _of_both(traced, whole, part, found.num_microbatches, rules)
    except UnsupportedError:
        return found
    return found if works_on_all_at_once(by_trace, examples, batch) else by_trace


def _cut(traced: TracedStep, whole: OpGraph, num_microbatches: int, rules: RuleBook) -> OpGraph:
    """The graph of a micro-batch, cut out of that of the whole batch. Raises: UnsupportedError."""
    first = len(whole.block.inputs) - len(traced.in_avals)
    inputs = {first + i: dim for i, dim in example_leaves(traced).items()}
    return cut_graph(whole, inputs, num_microbatches, rules, traced.name)


def _traced_part(
    traced: TracedStep,
    num_microbatches: int,
    rules: RuleBook,
    on_fewer: Callable[[TracedStep, int], TracedStep],
) -> tuple[TracedStep, OpGraph]:
    """The trace of a micro-batch, and its graph with the literals of the whole batch.

    Raises: UnsupportedError where it is not like that of the whole batch.
    """
    smaller = on_fewer(traced, num_examples(traced) // num_microbatches)
    jaxpr = with_literals_of(traced.jaxpr, smaller.jaxpr, traced.name)
    constants = tuple(a if a.shape == b.shape else b for a, b in zip(traced.constants, smaller.constants, strict=True))
    return smaller, build_graph(dataclasses.replace(smaller, jaxpr=jaxpr, constants=constants), rules)


def _neither(unlike: UnsupportedError, cut_error: UnsupportedError) -> UnsupportedError:
    """The error of a step that is neither like its trace on a micro-batch nor can be cut."""
    return UnsupportedError(
        where=unlike.where, expected=unlike.expected, got=unlike.got,
        hint=f"{unlike.hint} (nor can the whole batch's operations be cut: {cut_error.where}: {cut_error.got})",
    )  # fmt: skip


def _of_both(traced: TracedStep, whole: OpGraph, part: OpGraph, num_microbatches: int, rules: RuleBook) -> OpGraph:
    """The graph over micro-batches, of those of the whole batch and of a micro-batch. Raises: UnsupportedError."""
    whole, part = split_known_results(*hoist_draws(whole, part))
    follower = Follower(whole, part, num_microbatches, body_states=body_states)
    try:
        return _over_micro_batches(traced, whole, follower, rules)
    except MixedExamplesError as error:
        blocks = math.lcm(*follower.wanted_blocks)
        if blocks == 1 or num_examples(traced) % (blocks * num_microbatches):
            raise
        # A loss that is written out over chunks of the batch: a micro-batch has a part of each chunk.
        in_blocks = Follower(whole, part, num_microbatches, body_states=body_states, blocks=blocks)
        try:
            return _over_micro_batches(traced, whole, in_blocks, rules)
        except UnsupportedError:
            raise error from None


def _per_microbatch(traced: TracedStep, whole: OpGraph, num_microbatches: int, rules: RuleBook) -> OpGraph:
    """The graph of a step with named modules that may mix the examples of a micro-batch."""
    unlike: UnsupportedError | None = None
    try:
        smaller, part = _traced_part(traced, num_microbatches, rules, smaller_step)
    except UnsupportedError as error:
        if not traced.is_pure():  # what the whole batch's trace holds may have been meant for its examples alone
            raise
        unlike = error
        try:
            part = _cut(traced, whole, num_microbatches, rules)
        except UnsupportedError as cut_error:
            raise _neither(error, cut_error) from cut_error
    try:
        return _of_both(traced, whole, part, num_microbatches, rules)
    except MixedExamplesError:
        if unlike is not None:  # the literals of a micro-batch are those of its trace
            raise unlike from None
    return _accumulated(traced, smaller, whole, num_microbatches, rules)


def _accumulated(
    traced: TracedStep, smaller: TracedStep, whole: OpGraph, num_microbatches: int, rules: RuleBook
) -> OpGraph:
    """The graph of a step whose named modules are taken per micro-batch, with the literals of a micro-batch."""
    check_patterns(traced, whole)
    whole, part = split_known_results(*hoist_draws(whole, build_graph(smaller, rules)))
    follower = AccumulatingFollower(
        whole=whole,
        part=part,
        num_microbatches=num_microbatches,
        body_states=body_states,
        patterns=traced.per_microbatch,
    )
    graph = _over_micro_batches(traced, whole, follower, rules)
    # Which examples share a micro-batch matters: those that stand beside one another, as in a user's own loop.
    return dataclasses.replace(graph, per_microbatch=tuple(sorted(follower.mixing)), runs_of_examples=1)


def _over_micro_batches(traced: TracedStep, whole: OpGraph, follower: Follower, rules: RuleBook) -> OpGraph:
    """The graph over micro-batches, of the graphs of the whole batch and of one micro-batch."""
    num_microbatches = follower.num_microbatches
    _check_same_operations(traced.name, whole.block, follower.part.block)
    num_constants = len(whole.block.inputs) - len(traced.in_avals)
    examples = {num_constants + i: dim for i, dim in example_leaves(traced).items()}
    states = find_states(whole, follower.part, follower, examples)
    whole, part = states.whole, states.part
    sections = LoopSections(traced.name, whole, states, follower.num_microbatches)
    writer = LoopWriter(whole, part, follower, states, sections)
    outputs = tuple(writer.through(a) for a in whole.block.outputs)
    block = with_rules(dataclasses.replace(whole.block, ops=writer.ops(), outputs=outputs), rules)
    micro_batched_graph = dataclasses.replace(
        whole,
        values=tuple(writer.values),
        block=block,
        num_microbatches=num_microbatches,
        runs_of_examples=follower.runs,
    )
    return renumbered(micro_batched_graph)


def _check_same_operations(step_name: str, block: Block, part: Block) -> None:
    """Raises: UnsupportedError."""
    is_same = (block.inputs, _numbers(block.outputs), len(block.ops)) == (
        part.inputs, _numbers(part.outputs), len(part.ops)
    )  # fmt: skip
    for a, b in zip(block.ops, part.ops, strict=False):
        is_same = is_same and (a.kind, a.primitive, a.outputs) == (b.kind, b.primitive, b.outputs)
        is_same = is_same and _numbers(a.inputs) == _numbers(b.inputs)
        for x, y in zip(a.blocks, b.blocks, strict=False):
            _check_same_operations(step_name, x, y)
    if not is_same:
        raise UnsupportedError(
            where=step_name,
            expected="the same operations for a micro-batch as for the whole batch",
            got="others",
            hint="do not let Python branch on the number of examples",
        )


def _numbers(atoms: Sequence[Atom]) -> tuple[int | None, ...]:
    return tuple(a if isinstance(a, int) else None for a in atoms)
