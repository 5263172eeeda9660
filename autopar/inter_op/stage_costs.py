"""The tables of the stage search: seconds and bytes of each layer on each mesh that a stage may have.

Layers are priced in a graph of the whole step in which repeated ones stand once (`fold_layers`), under the decisions of
one ILP for each mesh; a stage costs what its layers do together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from autopar.cost.collective_usage import predicted_collectives
from autopar.cost.compute_times import compute_times_s
from autopar.cost.cost_model import CostModel, NodeCosts
from autopar.cost.memory_program import task_memory
from autopar.cost.overlap import crossing_s, timed
from autopar.hardware.collective_cost import Link
from autopar.inter_op.layer_decisions import Decisions
from autopar.intra_op.ilp import ObjectiveWeights
from autopar.ir.graph import OpKind, Section, read_by, walk
from autopar.ir.layout import local_bytes
from autopar.ir.mesh import LogicalMesh
from autopar.lowering.decisions import ShardingPlan
from autopar.lowering.instructions import (
    Accumulate,
    Compute,
    HostCopy,
    Instruction,
    Key,
    Loop,
    LoweredBlock,
    Move,
    Split,
    Stack,
    section_of,
)
from autopar.lowering.lower import lower
from autopar.passes.fold_layers import FoldedGraph
from autopar.passes.layers import Layers
from autopar.passes.remat import Recompute, recomputed_ops
from autopar.solver import StageOption
from autopar.solver.stages.problem import weight_seconds

_LESS_IS_BETTER = (
    "forward_s", "backward_s", "once_s", "state_bytes", "saved_bytes", "deferred_bytes", "working_bytes", "send_s",
)  # fmt: skip


@dataclasses.dataclass(slots=True)
class _Row:
    """Of one layer. Seconds of one micro-batch, but for `once_s`; bytes on one device.

    For each policy of recomputation what is computed again, what is kept for the backward pass, and what then for the
    gradients of weights where they are put off.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    weight_s: float = 0.0
    once_s: float = 0.0
    again_s: dict[Recompute, float] = dataclasses.field(default_factory=dict)
    state_bytes: int = 0
    given_bytes: int = 0
    saved_bytes: dict[Recompute, int] = dataclasses.field(default_factory=dict)
    deferred_bytes: dict[Recompute, int] = dataclasses.field(default_factory=dict)
    working_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PricedOption:
    """A way to run layers: the mesh, what they recompute, and the terms under which it is decided.

    `given_bytes`: of each layer's state what the step is given; the rest is made in each step anew.
    `over_limit`: the state of any stage alone would not fit under others.
    """

    option: StageOption
    mesh: LogicalMesh
    given_bytes: np.ndarray
    policy: str
    terms: ObjectiveWeights
    over_limit: bool = False


# For each policy and each layer the forward operations that are computed again.
Again = Mapping[Recompute, Mapping[int, frozenset[int]]]


def again_of(contracted: FoldedGraph) -> Again:
    return {policy: recomputed_ops(contracted.graph, contracted.layer_of, policy) for policy in Recompute}


def stage_options(
    contracted: FoldedGraph, again: Again, layers: Layers, model: CostModel, link: Link, decisions: Decisions
) -> tuple[PricedOption, ...]:
    """Options for stages on the model's mesh: each of the decisions with each policy of recomputation.

    `again` is `again_of(contracted)`; `link` joins a stage with the next one. What crosses a boundary is sent split
    over all devices of the mesh.
    """
    devices = model.links.mesh.num_devices
    send_s = np.array([link.latency_s + b / devices / link.bytes_per_s for b in layers.crossing_bytes])
    found: list[PricedOption] = []
    costs = NodeCosts(contracted.graph, model)
    for decided in decisions:
        rows = _Pricing(contracted, again, model, decided.sharding, costs).run()
        table = [rows[contracted.stands_for[layer]] for layer in range(len(layers))]
        found += [
            PricedOption(
                option=_option(policy, table, devices, send_s, model),
                mesh=model.links.mesh,
                given_bytes=np.array([row.given_bytes for row in table], dtype=np.int64),
                policy=policy.value,
                terms=decided.terms,
                over_limit=decided.over_limit,
            )
            for policy in Recompute
        ]
    return tuple(found)


def undominated(options: Sequence[PricedOption]) -> tuple[PricedOption, ...]:
    """Without those that another one on as many devices is at least as good as, for every layer."""
    found: dict[int, list[tuple[np.ndarray, PricedOption]]] = {}
    for o in options:
        costs = np.stack([*(getattr(o.option, name) for name in _LESS_IS_BETTER), -weight_seconds(o.option)])
        alike = found.setdefault(o.option.num_devices, [])
        if not any((other <= costs).all() for other, _ in alike):
            alike[:] = [kept for kept in alike if not (costs <= kept[0]).all()] + [(costs, o)]
    return tuple(o for alike in found.values() for _, o in alike)


def _option(
    policy: Recompute, table: Sequence[_Row], num_devices: int, send_s: np.ndarray, model: CostModel
) -> StageOption:
    # What is computed again is there while the layer's backward pass runs.
    rest = [max(0, row.saved_bytes[Recompute.NOTHING] - row.saved_bytes[policy]) for row in table]
    return StageOption(
        num_devices=num_devices,
        forward_s=np.array([row.forward_s for row in table]),
        backward_s=np.array([row.backward_s + row.again_s[policy] for row in table]),
        weight_s=np.array([row.weight_s for row in table]),
        once_s=np.array([row.once_s for row in table]),
        state_bytes=np.array([row.state_bytes for row in table], dtype=np.int64),
        saved_bytes=np.array([row.saved_bytes[policy] for row in table], dtype=np.int64),
        deferred_bytes=np.array([row.deferred_bytes[policy] for row in table], dtype=np.int64),
        working_bytes=np.array([row.working_bytes for row in table]) + np.array(rest, dtype=np.int64),
        send_s=send_s,
        name=f"{model.links.mesh}, recompute {policy.value}",
    )


class _Pricing:
    """What each layer of a contracted graph costs under decisions."""

    def __init__(
        self, contracted: FoldedGraph, again: Again, model: CostModel, sharding: ShardingPlan, costs: NodeCosts
    ) -> None:
        self.contracted, self.graph, self.model, self.again = contracted, contracted.graph, model, again
        self.lowered: LoweredBlock = lower(self.graph, sharding, model.links)
        self.rows = {layer: _Row() for layer in contracted.weight}
        self.costs = costs
        self.compute_s = compute_times_s(self.graph, self.lowered, model, self.costs)
        self.awaited = self.read_by_other_layers()
        repeating = [i for i in self.lowered.instructions if section_of(i).repeats]
        self.kept = frozenset(key for i in repeating for key in i.keys_read)

    def run(self) -> dict[int, _Row]:
        parts = self.parts()
        summed_s = {where: [self.seconds(i) for i in instructions] for where, instructions in parts.items()}
        shares = self.shares(parts, summed_s)
        mesh, m = self.model.links.mesh, self.graph.num_microbatches
        forward: dict[int, list[tuple[Instruction, float]]] = {}
        for (layer, section), instructions in parts.items():
            row, weight = self.rows[layer], self.contracted.weight[layer]
            runs = weight * (m if section.repeats else 1)
            seconds = [shares[section] * t / runs for t in summed_s[layer, section]]
            if section is Section.FORWARD:
                forward[layer] = list(zip(instructions, seconds, strict=True))
                row.forward_s += sum(seconds)
            elif section.repeats:
                row.backward_s += sum(seconds)
                row.weight_s += sum(t for t, i in zip(seconds, instructions, strict=True) if self.can_wait(i))
            else:
                row.once_s += sum(seconds)
            reads, made = self.ends(instructions)
            row.working_bytes = max(row.working_bytes, task_memory(self.graph, instructions, reads, made, self.model))
            for i in instructions:
                if isinstance(i, Accumulate):
                    row.state_bytes += self.nbytes((i.op.outputs[0], i.sum_))
                elif section is Section.BEFORE and not isinstance(i, Split):
                    row.state_bytes += sum(self.nbytes(key) for key in i.keys_made if key in self.kept)
        made_forward = {key for ran in forward.values() for i, _ in ran for key in i.keys_made}
        made_repeating = {key for i in self.lowered.instructions if section_of(i).repeats for key in i.keys_made}
        for layer, row in self.rows.items():
            for policy in Recompute:
                backward = parts.get((layer, Section.BACKWARD), [])
                again, kept = self.recomputed(
                    self.again[policy].get(layer, frozenset()), forward.get(layer, []), backward
                )
                row.again_s[policy] = sum(time_s for _, time_s in again)
                row.saved_bytes[policy] = sum(self.nbytes(key) for key in kept & made_forward)
                deferred = self.deferred([i for i, _ in again], backward)
                row.deferred_bytes[policy] = sum(self.nbytes(key) for key in deferred & made_repeating)
        inputs = zip(self.lowered.block.inputs, self.lowered.inputs, self.contracted.home_of, strict=True)
        for position, (v, layout, home) in enumerate(inputs):
            if position not in self.graph.batch and home in self.rows:
                value = self.graph.values[v]
                nbytes = local_bytes(value.shape, value.itemsize, layout, mesh)
                self.rows[home].state_bytes += nbytes
                self.rows[home].given_bytes += nbytes
        return self.rows

    def read_by_other_layers(self) -> frozenset[int]:
        """Backward values that the backward pass of another layer waits for, and all that they are made of."""
        awaited: set[int] = set()
        layer_of = self.contracted.layer_of
        made_in = {v: layer_of[op.id] for op in self.graph.block.ops for v in op.outputs}
        for op in reversed(self.graph.block.ops):
            if op.section is not Section.BACKWARD or op.kind is OpKind.ACCUMULATE:
                continue
            needed = not awaited.isdisjoint(op.outputs)
            for v in read_by(op):
                if needed or made_in.get(v) != layer_of[op.id]:
                    awaited.add(v)
        return frozenset(awaited)

    def parts(self) -> dict[tuple[int, Section], list[Instruction]]:
        """Instructions by layer and section; a resharding in the loop goes with the operation that it is for, one that
        is made once with what it reshards.
        """
        layer_of, graph = self.contracted.layer_of, self.graph
        made_in = {v: layer_of[op.id] for op in graph.block.ops for v in op.outputs}
        made_in |= dict(zip(graph.block.inputs, self.contracted.home_of, strict=True))
        parts: dict[tuple[int, Section], list[Instruction]] = {}
        waiting: list[tuple[Section, Instruction]] = []
        layer = next(iter(self.rows))
        for instruction in self.lowered.instructions:
            section = section_of(instruction)
            if isinstance(instruction, (Move, HostCopy)):
                here = made_in.get(instruction.value)
                if section.repeats or here not in self.rows:
                    waiting.append((section, instruction))
                else:
                    parts.setdefault((here, section), []).append(instruction)
                continue
            here = layer_of.get(instruction.op.id)
            layer = here if here is not None else layer
            for its, i in waiting:
                parts.setdefault((layer, its), []).append(i)
            parts.setdefault((layer, section), []).append(instruction)
            waiting = []
        for its, i in waiting:
            parts.setdefault((layer, its), []).append(i)
        return parts

    def shares(
        self,
        parts: Mapping[tuple[int, Section], Sequence[Instruction]],
        seconds: Mapping[tuple[int, Section], Sequence[float]],
    ) -> dict[Section, float]:
        """What is left of the seconds of each section where what is sent hides behind what is computed, also of the
        layer before or behind it.
        """
        found = {}
        for section in {section for _, section in parts}:
            together = tuple(i for (_, where), instructions in parts.items() if where is section for i in instructions)
            summed_s = sum(sum(of_part) for (_, where), of_part in seconds.items() if where is section)
            block = dataclasses.replace(self.lowered, instructions=together)
            found[section] = timed(self.graph, block, self.model, self.costs).end_s / summed_s if summed_s else 1.0
        return found

    def seconds(self, instruction: Instruction) -> float:
        """Of all runs of an instruction in a step."""
        computed_s = 0.0
        if isinstance(instruction, Compute):
            computed_s = self.compute_s[instruction.op.id]
        elif isinstance(instruction, (Split, Accumulate, Stack)):
            computed_s = crossing_s(self.graph, instruction, self.model)
        elif isinstance(instruction, Loop):
            inside = (op.id for block in instruction.op.blocks for op in walk(block))
            computed_s = sum(self.compute_s.get(op, 0.0) for op in inside)
        if not isinstance(instruction, (Move, Loop)) and not getattr(instruction, "reduced", ()):
            return computed_s
        block = dataclasses.replace(self.lowered, instructions=(instruction,))
        return computed_s + sum(use.time_s for use in predicted_collectives(self.graph, block, self.model))

    def nbytes(self, key: Key) -> int:
        value = self.graph.values[key[0]]
        return local_bytes(value.shape, value.itemsize, key[1][0], self.model.links.mesh)

    def ends(self, instructions: Sequence[Instruction]) -> tuple[list[Key], list[Key]]:
        """(what instructions read from outside, what they make that is not read inside)."""
        made: set[Key] = set()
        read: dict[Key, None] = {}
        inside: set[Key] = set()
        for i in instructions:
            for key in i.keys_read:
                if key in made:
                    inside.add(key)
                else:
                    read[key] = None
            made.update(i.keys_made)
        return list(read), [key for key in made if key not in inside]

    def recomputed(
        self,
        again: frozenset[int],
        forward: Sequence[tuple[Instruction, float]],
        backward: Sequence[Instruction],
    ) -> tuple[list[tuple[Instruction, float]], set[Key]]:
        """(what is run again, with its seconds, where the given operations of a layer are, what that and the layer's
        backward pass read from outside).

        What is kept of the layer is kept as it is read, and not sent again; what enters the layer, as it arrives.
        """
        made_by = {v: i.op.id for i, _ in forward if not isinstance(i, (Move, HostCopy)) for v in i.op.outputs}
        kept = {key for i in backward for key in i.keys_read}
        read: set[Key] = set()
        made: set[Key] = set()
        runs_again: list[tuple[Instruction, float]] = []
        for i, time_s in reversed(forward):
            if not isinstance(i, (Move, HostCopy)):
                repeats = i.op.id in again
            elif i.value in made_by:
                repeats = made_by[i.value] in again and not (read | kept).isdisjoint(i.keys_made)
            else:
                repeats = not (read - kept).isdisjoint(i.keys_made)
            if repeats:
                runs_again.append((i, time_s))
                read.update(i.keys_read)
                made.update(i.keys_made)
        return runs_again[::-1], (read | kept) - made

    def can_wait(self, instruction: Instruction) -> bool:
        """No other layer waits for what this operation of the backward pass makes."""
        return not isinstance(instruction, (Move, HostCopy)) and self.awaited.isdisjoint(instruction.op.outputs)

    def deferred(self, again: Sequence[Instruction], backward: Sequence[Instruction]) -> set[Key]:
        """What is read of outside by the part of a layer's backward pass that can wait, with all that is run again or
        sent for it alone.
        """
        must = [i for i in backward if not isinstance(i, (Move, HostCopy)) and not self.can_wait(i)]
        may_wait = [*again, *(i for i in backward if isinstance(i, (Move, HostCopy)) or self.can_wait(i))]
        awaited = {key for i in must for key in i.keys_read}
        read: set[Key] = set()
        made: set[Key] = set()
        for i in reversed(may_wait):
            if awaited.isdisjoint(i.keys_made):
                read.update(i.keys_read)
                made.update(i.keys_made)
            else:
                awaited.update(i.keys_read)
        return read - made
