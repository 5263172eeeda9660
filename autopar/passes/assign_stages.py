"""The pipeline stage of every operation of a training step, with copies of values that each stage computes itself."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from autopar.common import jax_compat
from autopar.errors import InvalidArgumentError
from autopar.frontend.recompute_in_scans import is_product
from autopar.ir.graph import Block, Op, OpGraph, OpKind, Role, Section, read_by
from autopar.ir.primitives import is_inexact, linear_operands
from autopar.ir.rewrite import Fresh, clone, makers, reading, renumbered
from autopar.passes.assign_layers import LayerAssignment, assign_layers
from autopar.passes.layers import Layers

_ADDITIONS = frozenset({"add", "add_any", "sub"})
_FOLLOWERS = frozenset({"neg", "transpose", "reshape", "squeeze", "expand_dims", "convert_element_type", "copy"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StagedGraph:
    """A graph whose operations have stages.

    `stages[i]` is the stage of the i-th operation of the top block, `homes[i]` of the i-th input: state lies there.
    Operations may read arguments, hoisted values and forward values of other stages; `check_stages` says what they
    may not. New state is made at its home where an operation of the update makes it.
    """

    graph: OpGraph
    stages: tuple[int, ...]
    homes: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        return 1 + max(self.stages, default=0)


_FEWER_STAGES = (
    "use fewer stages; layers are the model's numbered modules, its repeated matrix products, or those of a scan over "
    "state that the step returns and donates (donate_argnums)"
)


def more_layers(graph: OpGraph) -> str:
    """What to do where a step has fewer layers than stages are asked for."""
    products = [op for op in graph.block.ops if op.role is not Role.BACKWARD and is_product(op)]
    inside = [op for op in products if op.section is Section.FORWARD]
    before = [op for op in products if op.section is Section.BEFORE]
    if before and not inside and graph.num_microbatches > 1:
        known = "works on what is known before the micro-batches, and runs once for all of them"
        return f"use num_microbatches=1: {_made_at(before[0])} {known}"
    loops = {_made_at(op): op for op in inside if op.blocks}
    if len(loops) == 1 and all(op.blocks for op in inside):
        where, op = next(iter(loops.items()))
        what = where if op.kind is OpKind.COND else f"each trip of {where}"
        return f"{_FEWER_STAGES}; {what} needs the parameters of all layers"
    return _FEWER_STAGES


def _made_at(op: Op) -> str:
    line = jax_compat.source_line(op.eqn)
    return f"the {op.primitive} at {line}" if line else f"the {op.place or op.primitive}"


def balanced(layers: Layers, num_stages: int, hint: str = _FEWER_STAGES) -> tuple[int, ...]:
    """The first layer of each of `num_stages` contiguous stages, so that the longest arithmetic is the shortest. `hint`
    is that of the error (`more_layers`).

    Raises: InvalidArgumentError when there are fewer layers than stages.
    """
    n = len(layers)
    if not 1 <= num_stages <= n:
        raise InvalidArgumentError(
            where="stages",
            expected=f"at most one stage a layer ({n} layers)",
            got=f"{num_stages} stages",
            hint=hint,
        )
    before = [0.0, *itertools.accumulate(layers.flops)]
    # largest[i], for k stages: the largest arithmetic of the first i layers in k stages, and the last stage's start.
    largest = [0.0] + [float("inf")] * n
    starts: list[list[int]] = []
    for _ in range(num_stages):
        options = [[(max(largest[a], before[b] - before[a]), a) for a in range(b)] for b in range(1, n + 1)]
        best = [min(costs) for costs in options]
        largest = [float("inf"), *(value for value, _ in best)]
        starts.append([0, *(start for _, start in best)])
    cuts, end = [], n
    for start in reversed(starts):
        end = start[end]
        cuts.append(end)
    return tuple(reversed(cuts))


def assign(
    graph: OpGraph,
    layers: Layers,
    first_layers: Sequence[int],
    assignment: LayerAssignment | None = None,
) -> StagedGraph:
    """Cuts at layers: stage q holds layers `first_layers[q]` to `first_layers[q + 1]` - 1.

    The result computes what `graph` computes, up to the order of sums: (1) sums of gradients from several stages are
    taken behind the loop over micro-batches, (2) recomputed values are not sent, (3) every stage has its own copy of
    the portable operations and of the parts of barriers that it reads.
    `assignment` of the graph to these layers saves finding it again.
    Raises: InvalidArgumentError for cuts that are not in order or beyond the layers.
    """
    _check_cuts(first_layers, len(layers))
    of_layers = assign_layers(graph, layers) if assignment is None else assignment

    def stage_of(layer: int) -> int:
        return bisect.bisect_right(first_layers, layer) - 1

    stages = [None if layer is None else stage_of(layer) for layer in of_layers.layer_of]
    homes = tuple(map(stage_of, of_layers.homes))
    graph, stages = accumulate_per_stage(graph, stages)
    graph = _saved_at_cuts(graph, stages, of_layers.same_as)
    graph, placed = _copies(graph, stages, homes)
    staged = StagedGraph(graph=renumbered(graph), stages=tuple(placed), homes=homes)
    check_stages(staged)
    return staged


def check_stages(staged: StagedGraph) -> None:
    """Asserts the invariants of pipeline schedules.

    (1) A forward operation reads forward values of its own and earlier stages. (2) A backward operation reads backward
    values of its own and later stages. (3) What runs before the loop reads nothing of it; sums over micro-batches are
    made where their summands are.
    """
    ops = staged.graph.block.ops
    assert len(ops) == len(staged.stages), f"{len(ops)} operations, {len(staged.stages)} stages"
    producer = {v: (op, stage) for op, stage in zip(ops, staged.stages, strict=True) for v in op.outputs}
    for op, stage in zip(ops, staged.stages, strict=True):
        for v in read_by(op):
            if v not in producer:
                continue
            maker, at = producer[v]
            text = f"{op.primitive} ({op.id}) in {op.module!r}, {op.section.value} of stage {stage}, reads stage {at}"
            if op.section is Section.BEFORE:
                assert maker.section is Section.BEFORE, text
            elif op.kind in (OpKind.ACCUMULATE, OpKind.STACK):
                assert at == stage, text
            elif op.section is Section.FORWARD:
                assert maker.section is Section.BEFORE or at <= stage, text
            elif op.section.is_backward and maker.section.is_backward:
                assert at >= stage, text


def accumulate_per_stage(graph: OpGraph, stages: Sequence[int | None]) -> tuple[OpGraph, list[int | None]]:
    """Takes sums of gradients from several stages behind the loop: each stage accumulates its own summand.

    `sum over micro-batches of (a + b)` becomes `(sum of a) + (sum of b)`, for additions whose result is only
    accumulated, directly or behind linear operations (tied embeddings). The addition runs where the update reads it.
    """
    ops = graph.block.ops
    at = {op.id: stage for op, stage in zip(ops, stages, strict=True)}
    maker = makers(ops)
    readers: dict[int, list[Op]] = {}
    for op in ops:
        for v in read_by(op):
            readers.setdefault(v, []).append(op)
    moved = _additions_over_stages(graph, at, readers)
    if not moved:
        return graph, list(stages)

    fresh = Fresh(graph)
    pattern = next(op for op in ops if op.kind is OpKind.ACCUMULATE)
    summed: dict[int, int] = {}
    sums: list[tuple[Op, int | None]] = []
    names: dict[int, int] = {}
    late: list[tuple[Op, int | None]] = []
    for op in ops:
        if op.id not in moved:
            continue
        for v in read_by(op):
            if v in summed or v in names:
                continue
            summed[v] = fresh.copy_of(v)
            total = replace(
                pattern, id=fresh.op_id(), inputs=(v,), outputs=(summed[v],), section=op.section, role=op.role,
                module=op.module, count=op.count,
            )  # fmt: skip
            sums.append((total, at[maker[v].id] if v in maker else 0))
        once = replace(op, section=Section.AFTER, role=Role.UPDATE, count=op.count / graph.num_microbatches)
        late.append((clone(once, names := {**summed, **names}, fresh), _wanted_at(op, readers, at)))
    # The old sums are now what the moved operations make.
    for op in ops:
        if op.kind is OpKind.ACCUMULATE and op.inputs[0] in names and op.inputs[0] not in summed:
            names[op.outputs[0]] = names[op.inputs[0]]
    gone = moved | {op.id for op in ops if op.kind is OpKind.ACCUMULATE and op.outputs[0] in names}
    kept = [(reading(op, names) if op.section is Section.AFTER else op, at[op.id]) for op in ops if op.id not in gone]
    in_loop = [pair for pair in kept if pair[0].section is not Section.AFTER]
    after = [pair for pair in kept if pair[0].section is Section.AFTER]
    rows = [*in_loop, *sums, *late, *after]
    return _with_rows(graph, fresh, rows, names), [stage for _, stage in rows]


def _additions_over_stages(
    graph: OpGraph, at: Mapping[int, int | None], readers: Mapping[int, Sequence[Op]]
) -> set[int]:
    """The operations to move behind the loop: additions over stages that may move, and those that follow them."""
    ops = graph.block.ops
    maker = makers(ops)
    outputs = {v for v in graph.block.outputs if isinstance(v, int)}
    # Those that may, last first: read by nothing but sums over micro-batches and other operations that may move.
    movable: set[int] = set()
    for op in reversed(ops):
        linear = op.primitive in _ADDITIONS | _FOLLOWERS and op.kind is OpKind.EQUATION and op.section.is_backward
        if linear and outputs.isdisjoint(op.outputs) and _linear_in_all(op):
            users = [r for v in op.outputs for r in readers.get(v, ())]
            if users and all(r.kind is OpKind.ACCUMULATE or r.id in movable for r in users):
                movable.add(op.id)
    moved: set[int] = set()
    for op in ops:
        if op.id not in movable:
            continue
        sources = [maker[v] for v in read_by(op) if v in maker]
        mixed = len({at[m.id] for m in sources if at[m.id] is not None}) > 1
        if (mixed and op.primitive in _ADDITIONS) or any(m.id in moved for m in sources):
            moved.add(op.id)
    return moved


def held_through(graph: OpGraph) -> list[int]:
    """What a step holds through its last micro-batch, however its layers are cut into stages: the state, which the
    update reads, and the sums of the micro-batches before, if there are any.
    """
    state = [v for position, v in enumerate(graph.block.inputs) if position not in graph.batch]
    return [*state, *(_sums_in_place(graph) if graph.num_microbatches > 1 else ())]


def _sums_in_place(graph: OpGraph) -> list[int]:
    """The sums over micro-batches that no assignment of stages takes behind the loop."""
    readers: dict[int, list[Op]] = {}
    for op in graph.block.ops:
        for v in read_by(op):
            readers.setdefault(v, []).append(op)
    each_by_itself = {op.id: stage for stage, op in enumerate(graph.block.ops)}
    may_move = _additions_over_stages(graph, each_by_itself, readers)
    maker = makers(graph.block.ops)
    sums = (op for op in graph.block.ops if op.kind is OpKind.ACCUMULATE)
    return [v for op in sums if not any(maker[a].id in may_move for a in read_by(op) if a in maker) for v in op.outputs]


def _linear_in_all(op: Op) -> bool:
    operands = frozenset(range(len(op.inputs)))
    if op.primitive == "convert_element_type":
        # Rounding once, behind the sum, is what accumulating in the wider type is for.
        return all(is_inexact(v.aval.dtype) for v in (*op.eqn.invars, *op.eqn.outvars))
    return all(isinstance(a, int) for a in op.inputs) and operands in linear_operands(op.primitive, op.eqn)


def _wanted_at(op: Op, readers: Mapping[int, Sequence[Op]], at: Mapping[int, int | None]) -> int | None:
    """The stage of the update that depends on a moved operation."""
    following: Op | None = op
    while following is not None:
        (result,) = following.outputs
        following = None
        for reader in readers[result]:
            if reader.kind is not OpKind.ACCUMULATE:
                following = reader
                break
            for update in readers.get(reader.outputs[0], ()):
                if at[update.id] is not None:
                    return at[update.id]
    return 0


def _saved_at_cuts(graph: OpGraph, stages: Sequence[int | None], same_as: Mapping[int, int]) -> OpGraph:
    """Reads the forward value where a later stage would wait for an earlier one to compute it again."""
    at = {v: stage for op, stage in zip(graph.block.ops, stages, strict=True) for v in op.outputs}
    ops = []
    for op, stage in zip(graph.block.ops, stages, strict=True):
        names = {}
        if stage is not None and op.section.is_backward:
            for v in read_by(op):
                producer_stage = at.get(v)
                there = same_as.get(v) in at  # the forward pass may have no other use for it
                if there and producer_stage is not None and producer_stage < stage:
                    names[v] = same_as[v]
        ops.append(reading(op, names))
    return dataclasses.replace(graph, block=replace(graph.block, ops=tuple(ops)))


def _copies(graph: OpGraph, stages: Sequence[int | None], homes: Sequence[int]) -> tuple[OpGraph, list[int]]:
    """Copies each operation without a stage to each stage that reads it; of barriers the part that the stage reads."""
    ops = graph.block.ops
    reading_stages: dict[int, set[int]] = {}
    tied = {a: homes[i] for i, o in graph.tied if isinstance(a := graph.block.outputs[o], int)}
    for v in graph.block.outputs:
        if isinstance(v, int):
            reading_stages.setdefault(v, set()).add(tied.get(v, 0))
    for op, stage in zip(reversed(ops), reversed(stages), strict=True):
        if op.kind is OpKind.BARRIER and stage is None:
            for v, out in zip(op.inputs, op.outputs, strict=True):
                assert isinstance(v, int), "a barrier passes values only"
                reading_stages.setdefault(v, set()).update(reading_stages.get(out, ()))
        else:
            own = {stage} if stage is not None else set().union(*(reading_stages.get(v, set()) for v in op.outputs))
            for v in read_by(op):
                reading_stages.setdefault(v, set()).update(own)
    fresh = Fresh(graph)
    names: dict[int, dict[int, int]] = {}  # by stage
    rows: list[tuple[Op, int | None]] = []
    used: set[int] = set()
    for op, stage in zip(ops, stages, strict=True):
        if stage is not None:
            rows.append((reading(op, names.get(stage, {})), stage))
            continue
        for q in sorted(set().union(*(reading_stages.get(v, set()) for v in op.outputs))):
            part = op
            if op.kind is OpKind.BARRIER:
                pairs = [
                    (v, out) for v, out in zip(op.inputs, op.outputs, strict=True) if q in reading_stages.get(out, ())
                ]
                part = replace(op, inputs=tuple(v for v, _ in pairs), outputs=tuple(o for _, o in pairs))
            here = names.setdefault(q, {})
            if used.isdisjoint(part.outputs):
                # The first copy keeps its values.
                used |= set(part.outputs)
                rows.append((replace(reading(part, here), id=fresh.op_id()), q))
            else:
                rows.append((clone(part, here, fresh), q))
    of_output = {v: names.get(tied.get(v, 0), {}).get(v, v) for v in graph.block.outputs if isinstance(v, int)}
    stages_of = [stage for _, stage in rows if stage is not None]
    return _with_rows(graph, fresh, rows, of_output), stages_of


def _with_rows(
    graph: OpGraph, fresh: Fresh, rows: Sequence[tuple[Op, int | None]], names: Mapping[int, int]
) -> OpGraph:
    outputs = tuple(names.get(v, v) if isinstance(v, int) else v for v in graph.block.outputs)
    block = Block(inputs=graph.block.inputs, outputs=outputs, ops=tuple(op for op, _ in rows))
    return dataclasses.replace(graph, values=tuple(fresh.values), block=block)


def _check_cuts(first_layers: Sequence[int], num_layers: int) -> None:
    ordered = all(a < b for a, b in itertools.pairwise(first_layers))
    if not first_layers or first_layers[0] != 0 or not ordered or first_layers[-1] >= num_layers:
        raise InvalidArgumentError(
            where="first layers of the stages",
            expected=f"0, then rising numbers below the number of layers ({num_layers})",
            got=str(tuple(first_layers)),
            hint="`balanced(layers, num_stages)` gives a valid cut",
        )
