"""The tables of the stage search: seconds and bytes of each layer on each mesh that a stage may have.

Layers are priced in a graph of the whole step in which repeated layers stand once (`fold_layers`), under the decisions
of one ILP for each mesh. The cost of a stage follows from the costs of its layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from autopar.cost.cost_model import CostModel, NodeCosts
from autopar.cost.memory_program import task_memory
from autopar.cost.overlap import crossing_s, timed
from autopar.cost.usage import compute_times_s, host_copy_s, predicted_collectives
from autopar.frontend.recompute_in_scans import Recompute
from autopar.hardware.cluster import Cluster
from autopar.hardware.collective_cost import Link
from autopar.ir.graph import HOST, OpKind, Section, read_by, walk
from autopar.ir.layout import LogicalMesh, local_bytes
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
    host_copies_in,
    section_of,
)
from autopar.lowering.lower import ShardingPlan
from autopar.passes.fold_layers import FoldedGraph
from autopar.passes.layers import Layers
from autopar.passes.remat import Recomputation, forward_of_layers, recomputations, text_of_kept
from autopar.search.intra_op.build_choice_graph import SharedTables
from autopar.search.intra_op.ilp import ROUNDS, IntraOp, ObjectiveWeights
from autopar.search.intra_op.memory_prices import (
    FIRST_PRICE,
    MemoryPrices,
    held_values,
    priced_values,
    saved_values,
    search_price,
    state_values,
)
from autopar.search.intra_op.saved_values import LayerValues
from autopar.search.intra_op.slack import Exposure, with_overlapped_axes
from autopar.search.intra_op.spmd_candidate import TimedSharding, timed_sharding
from autopar.solver import StageOption, Status
from autopar.solver.stage_problem import weight_seconds

# Decisions for a graph of layers on one mesh: the fastest, and smaller ones where state or saved values are large.


# A byte always costs a little (a part of reading it once), so that the smallest of equally fast decisions is taken.
TIE_BREAKING_READS = 0.1
# The share of the memory up to which state, and saved values, get no higher price on their bytes (`search_price`).
LARGE_SHARE = 0.5
# The parts of their seconds and of their bytes by which decisions differ from others that stand for them.
ALIKE_SECONDS, ALIKE_BYTES = 0.001, 0.01


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """Decisions for a graph on one mesh, and the weights of the objective under which they were made.

    `over_limit`: other decisions existed whose state alone exceeds the memory.
    """

    terms: ObjectiveWeights
    sharding: ShardingPlan
    over_limit: bool = False


Decisions = tuple[Decided, ...]


def lowest_price(model: CostModel) -> float:
    """Seconds that a byte of state costs where memory is plentiful."""
    return TIE_BREAKING_READS / model.device.memory_bytes_per_s


class LayerDecider:
    """Decisions for a graph of layers on one mesh: the fastest at first, then all that are wanted.

    `room_bytes` is the memory of all layers on this mesh if each stage holds its share of them: their state, with
    hoisted copies, and the values saved for `in_flight` micro-batches, as many as the first stage has (0: saved values
    are not priced). Where all stages are `equal`, decisions whose state alone exceeds the room are dropped, but the
    smallest.
    """

    def __init__(
        self,
        folded: FoldedGraph,
        model: CostModel,
        room_bytes: float,
        in_flight: int,
        equal: bool,
        time_limit_s: float,
    ) -> None:
        self.model, self.room_bytes, self.in_flight, self.equal = model, room_bytes, in_flight, equal
        self.time_limit_s = time_limit_s
        # The layers that stay of a run stand for equal ones: what is best for one of them is so for the other.
        tables = SharedTables(folded.graph, model, folded.partials)
        self.intra_op = IntraOp(folded.graph, model, paired_ops=folded.paired_ops, tables=tables)
        state, copies = priced_values(folded.graph), folded.copies()
        saved = saved_values(folded.graph, self.intra_op.saved_in_host)
        self.state_prices = MemoryPrices(s_per_byte=lowest_price(model), values=state, copies=copies)
        self.saved_prices = dataclasses.replace(self.state_prices, values=saved)
        several = copies | {v: copies.get(v, 1.0) * in_flight for v, _ in saved}
        self.both_prices = dataclasses.replace(self.state_prices, values=state | saved, copies=several)
        self.tie_prices = dataclasses.replace(self.state_prices, values=state_values(folded.graph))
        self.home_prices = dataclasses.replace(self.state_prices, values=held_values(folded.graph))
        self.decided_by_choice: dict[tuple[int, ...], Decided] = {}
        self.terms = ObjectiveWeights(s_per_byte=lowest_price(model), exposed_fraction=model.exposed_fraction)
        self.choice = self.decide(self.terms)

    @property
    def fastest(self) -> Decided | None:
        """None where there is no solution in time."""
        return self.decided_by_choice[tuple(self.choice)] if self.choice is not None else None

    def decide(self, terms: ObjectiveWeights) -> Sequence[int] | None:
        """The choice under these terms, which is added to those found."""
        prices = self.both_prices if terms.in_flight else self.state_prices
        if terms == self.terms:  # memory is not short
            prices = self.tie_prices
        solution = self.intra_op.solve(
            time_limit_s=self.time_limit_s,
            prices=dataclasses.replace(prices, s_per_byte=terms.s_per_byte),
            exposure=Exposure(terms.exposed_fraction),
            rounds=ROUNDS,
        )
        if solution.status not in (Status.OPTIMAL, Status.FEASIBLE):
            return None
        decided = Decided(terms=terms, sharding=self.intra_op.decode(solution))
        self.decided_by_choice.setdefault(tuple(solution.choice), decided)
        return solution.choice

    def decisions(self) -> Decisions:
        """The fastest, and smaller ones where state or saved values take much memory."""
        terms, choice, intra_op, room_bytes = self.terms, self.choice, self.intra_op, self.room_bytes
        if choice is not None and (state_bytes := self.state_bytes(choice)) > LARGE_SHARE * room_bytes:
            seconds_per_byte = intra_op.cost(choice) / state_bytes

            def is_lean(s_per_byte: float) -> bool | None:
                nonlocal terms, choice
                terms = dataclasses.replace(terms, s_per_byte=s_per_byte)
                choice = self.decide(terms)
                return None if choice is None else self.state_bytes(choice) <= LARGE_SHARE * room_bytes

            search_price(is_lean, seconds_per_byte)
        saved_bytes = self.in_flight * intra_op.priced_bytes(choice, self.saved_prices) if choice is not None else 0.0
        if choice is not None and saved_bytes > LARGE_SHARE * room_bytes:
            raised_s_per_byte = FIRST_PRICE * intra_op.cost(choice) / saved_bytes
            s_per_byte = max(terms.s_per_byte, raised_s_per_byte)
            self.decide(dataclasses.replace(terms, s_per_byte=s_per_byte, in_flight=self.in_flight))
        if self.equal:
            return self.that_fit()
        return tuple(self.decided_by_choice[choice] for choice in self.distinct(list(self.decided_by_choice)))

    def distinct(self, choices: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """The choices without those that cost and need nearly what an earlier one does: each is priced."""
        kept: dict[tuple[int, ...], np.ndarray] = {}
        alike = np.array([ALIKE_SECONDS, ALIKE_BYTES, ALIKE_BYTES])
        for choice in choices:
            saved_bytes = self.intra_op.priced_bytes(choice, self.saved_prices)
            needs = np.array([self.intra_op.cost(choice), self.state_bytes(choice), saved_bytes])
            if not any((np.abs(needs - other) <= alike * other).all() for other in kept.values()):
                kept[choice] = needs
        return list(kept)

    def state_bytes(self, choice: Sequence[int]) -> float:
        return self.intra_op.priced_bytes(choice, self.state_prices)

    def that_fit(self) -> Decisions:
        """Without those whose state alone exceeds the room, but the smallest."""
        decided, room_bytes = self.decided_by_choice, self.room_bytes
        home_bytes = {choice: self.intra_op.priced_bytes(choice, self.home_prices) for choice in decided}
        most_bytes = max(room_bytes, min(home_bytes.values(), default=0.0))
        over_limit = any(nbytes > room_bytes for nbytes in home_bytes.values())
        fitting = self.distinct([choice for choice in decided if home_bytes[choice] <= most_bytes])
        return tuple(dataclasses.replace(decided[choice], over_limit=over_limit) for choice in fitting)


_LESS_IS_BETTER = (
    "forward_s", "backward_s", "once_s", "state_bytes", "saved_bytes", "deferred_bytes", "working_bytes", "send_s",
)  # fmt: skip


@dataclasses.dataclass(slots=True)
class _Row:
    """The cost of one layer. Seconds are those of one micro-batch, except `once_s`; bytes are those on one device.

    By the number of each recomputation policy: the recomputed seconds, those that the forward pass takes less, those in
    which the link to the host is busy in each pass, the bytes kept for the backward pass, and the bytes kept for
    deferred gradients of weights.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    weight_s: float = 0.0
    once_s: float = 0.0
    recompute_s: dict[int, float] = dataclasses.field(default_factory=dict)
    spared_s: dict[int, float] = dataclasses.field(default_factory=dict)
    sent_s: dict[int, float] = dataclasses.field(default_factory=dict)
    state_bytes: int = 0
    given_bytes: int = 0
    saved_bytes: dict[int, int] = dataclasses.field(default_factory=dict)
    deferred_bytes: dict[int, int] = dataclasses.field(default_factory=dict)
    working_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PricedOption:
    """A way to run layers: the mesh, the recomputation policy, and the weights of the ILP's objective.

    `policies`: of each layer. `given_bytes`: the part of each layer's state that is an argument of the step; the rest
    is made in each step.
    `over_limit`: under the other weights, the state of any stage alone exceeds the memory.
    """

    option: StageOption
    mesh: LogicalMesh
    given_bytes: np.ndarray
    policies: tuple[str, ...]
    terms: ObjectiveWeights
    over_limit: bool = False


# Choices by value that are tried of stages.
CHOICES = 5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerPolicies:
    """What layers may compute again: policies of all layers.

    Attributes:
        names: Of the policies: first that which keeps all, then those without values in the memory of the hosts, then
            those with some there, last that which keeps the inputs of layers alone.
        of_layers: For each policy that of every layer.
        kept_bytes: Bytes that each keeps of a micro-batch, over all devices.
        again: For each policy what it computes again, and sends to the host, of the layers that stay in a folded graph.
    """

    names: tuple[str, ...]
    of_layers: tuple[tuple[str, ...], ...]
    kept_bytes: tuple[float, ...]
    again: tuple[Mapping[int, Recomputation], ...]

    def ladders(self) -> list[LayerPolicies]:
        """The policies that keep less and less, without values in the memory of the hosts; those with some there."""
        sends = [any(each.in_host for each in of_layers.values()) for of_layers in self.again]
        ends = (0, len(sends) - 1)
        ladders = [[i for i, sent in enumerate(sends) if not sent]]
        ladders += [[i for i, sent in enumerate(sends) if sent or i in ends]] if any(sends) else []
        return [self._of(sorted(ladder, key=lambda i: -self.kept_bytes[i])) for ladder in ladders]

    def _of(self, numbers: Sequence[int]) -> LayerPolicies:
        return LayerPolicies(
            names=tuple(self.names[i] for i in numbers),
            of_layers=tuple(self.of_layers[i] for i in numbers),
            kept_bytes=tuple(self.kept_bytes[i] for i in numbers),
            again=tuple(self.again[i] for i in numbers),
        )


def layer_policies(folded: FoldedGraph, layers: Layers, cluster: Cluster, *, by_value: bool) -> LayerPolicies:
    """All is kept, parts of it, or the inputs of layers alone. `by_value`: whether the parts are chosen by value, as
    those of layers that are written out; else products are kept, or half of them.

    The last layer, whose backward pass follows at once, keeps its products in place of parts by value: what is
    elementwise takes memory of no use there.
    """
    forward, kinds = forward_of_layers(folded.graph, folded.layer_of), layers.kind_of
    policies = {"nothing": dict.fromkeys(folded.weight, Recompute.NOTHING.value)}
    choices: Iterable[Mapping[str, tuple[Sequence[str], Sequence[str]]]] = ()
    if by_value:
        choices = LayerValues.of_written_out(folded, forward, layers, cluster).saved_places(CHOICES)
    for number, places in enumerate(choices):
        texts = {name: text_of_kept(kept, in_host) for name, (kept, in_host) in places.items()}
        saved = {layer: texts[str(kinds[layer])] for layer in forward if str(kinds[layer]) in texts}
        policy = dict.fromkeys(folded.weight, Recompute.CHEAP.value) | saved
        if policy not in policies.values():
            policies[f"by value ({number})"] = policy
    others = (Recompute.ALL,) if len(policies) > 1 else (Recompute.CHEAP, Recompute.HALF, Recompute.ALL)
    policies |= {policy.value: dict.fromkeys(folded.weight, policy.value) for policy in others}
    found = recomputations(folded.graph, folded.layer_of, list(policies.values()))
    return LayerPolicies(
        names=tuple(policies),
        of_layers=tuple(tuple(policy[layer] for layer in folded.stands_for) for policy in policies.values()),
        kept_bytes=tuple(sum(folded.weight[at] * each.kept_bytes for at, each in of.items()) for of in found),
        again=tuple(found),
    )


def stage_options(
    folded: FoldedGraph,
    policies: LayerPolicies,
    layers: Layers,
    model: CostModel,
    link: Link,
    decisions: Decisions,
    known: TimedSharding | None = None,
) -> tuple[PricedOption, ...]:
    """Options for stages on the model's mesh: each of the decisions, and the same with products in pieces where that is
    faster, under each recomputation policy.

    `link` joins a stage with the next one. A value that crosses a
    boundary is sent in parts, one from each device of the mesh. `known`: decisions of the same graph and mesh that are
    on the clock already.
    """
    devices = model.links.mesh.num_devices
    send_s = send_seconds(layers, devices, link)
    options: list[PricedOption] = []
    costs = known.costs if known is not None else NodeCosts(folded.graph, model)
    for decided in decisions:
        is_known = known is not None and known.sharding is decided.sharding
        whole = known if is_known and known else timed_sharding(folded.graph, model, decided.sharding, costs)
        in_pieces = with_overlapped_axes(folded.graph, model, whole)
        for found in (whole,) if in_pieces is whole else (whole, in_pieces):
            terms = dataclasses.replace(decided.terms, overlapped_axes=found.sharding.overlapped_axes)
            rows = _Pricing(folded, policies.again, model, found.lowered, costs).run()
            table = [rows[folded.stands_for[layer]] for layer in range(len(layers))]
            options += [
                PricedOption(
                    option=_option(i, policies.names[i], table, devices, send_s, model),
                    mesh=model.links.mesh,
                    given_bytes=np.array([row.given_bytes for row in table], dtype=np.int64),
                    policies=of_layers,
                    terms=terms,
                    over_limit=decided.over_limit,
                )
                for i, of_layers in enumerate(policies.of_layers)
            ]
    return tuple(options)


def send_seconds(layers: Layers, num_devices: int, link: Link) -> np.ndarray:
    """Seconds of what crosses the boundary behind each layer, sent in parts, one from each device."""
    return np.array([link.latency_s + b / num_devices / link.bytes_per_s for b in layers.crossing_bytes])


def undominated(options: Sequence[PricedOption]) -> tuple[PricedOption, ...]:
    """The options without dominated ones: for every layer, another one on as many devices is as good."""
    by_size: dict[int, list[tuple[np.ndarray, PricedOption]]] = {}
    for o in options:
        costs = np.stack([*(getattr(o.option, name) for name in _LESS_IS_BETTER), -weight_seconds(o.option)])
        frontier = by_size.setdefault(o.option.num_devices, [])
        if not any((other_costs <= costs).all() for other_costs, _ in frontier):
            frontier[:] = [entry for entry in frontier if not (costs <= entry[0]).all()] + [(costs, o)]
    return tuple(o for frontier in by_size.values() for _, o in frontier)


def _option(
    policy: int, name: str, table: Sequence[_Row], num_devices: int, send_s: np.ndarray, model: CostModel
) -> StageOption:
    def beside(computing_s: float, row: _Row) -> float:
        sent_s = row.sent_s[policy]
        return max(computing_s, sent_s) if model.overlap.host_copies else computing_s + sent_s

    # What is computed again, or comes back, is there while the layer's backward pass runs.
    restored_bytes = [max(0, row.saved_bytes[0] - row.saved_bytes[policy]) for row in table]
    return StageOption(
        num_devices=num_devices,
        forward_s=np.array([beside(row.forward_s - row.spared_s[policy], row) for row in table]),
        backward_s=np.array([beside(row.backward_s + row.recompute_s[policy], row) for row in table]),
        weight_s=np.array([row.weight_s for row in table]),
        once_s=np.array([row.once_s for row in table]),
        state_bytes=np.array([row.state_bytes for row in table], dtype=np.int64),
        saved_bytes=np.array([row.saved_bytes[policy] for row in table], dtype=np.int64),
        deferred_bytes=np.array([row.deferred_bytes[policy] for row in table], dtype=np.int64),
        working_bytes=np.array([row.working_bytes for row in table]) + np.array(restored_bytes, dtype=np.int64),
        send_s=send_s,
        name=f"{model.links.mesh}, recompute {name}",
    )


_NOTHING_AGAIN = Recomputation(frozenset(), 0)


def _op_of(instruction: Instruction) -> int | None:
    """The operation that an instruction runs; None of one that moves a value."""
    return None if isinstance(instruction, (Move, HostCopy)) else instruction.op.id


class _Pricing:
    """The costs of the layers of a folded graph under decisions."""

    def __init__(
        self,
        folded: FoldedGraph,
        again: Sequence[Mapping[int, Recomputation]],
        model: CostModel,
        lowered: LoweredBlock,
        costs: NodeCosts,
    ) -> None:
        """`again`: as of `LayerPolicies`."""
        self.folded, self.graph, self.model, self.again = folded, folded.graph, model, again
        self.lowered = lowered
        self.rows = {layer: _Row() for layer in folded.weight}
        self.costs = costs
        self.compute_s = compute_times_s(self.graph, self.lowered, model, self.costs)
        self.awaited = self.read_by_other_layers()
        repeating = [i for i in self.lowered.instructions if section_of(i).repeats]
        self.kept = frozenset(key for i in repeating for key in i.keys_read)

    def run(self) -> dict[int, _Row]:
        parts = self.parts()
        summed_s = {part: [self.seconds(i) for i in instructions] for part, instructions in parts.items()}
        shares = self.shares(parts, summed_s)
        mesh, m = self.model.links.mesh, self.graph.num_microbatches
        forward: dict[int, list[tuple[Instruction, float]]] = {}
        for (layer, section), instructions in parts.items():
            row, weight = self.rows[layer], self.folded.weight[layer]
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
            reads, fills = self.ends(instructions)
            memory = task_memory(self.graph, instructions, reads, fills, self.model)
            row.working_bytes = max(row.working_bytes, memory.temporary_bytes)
            for i in instructions:
                if isinstance(i, Accumulate):
                    row.state_bytes += self.nbytes((i.op.outputs[0], i.sum_))
                elif section is Section.BEFORE and not isinstance(i, Split):
                    row.state_bytes += sum(self.nbytes(key) for key in i.keys_made if key in self.kept)
        made_forward = {key for ran in forward.values() for i, _ in ran for key in i.keys_made}
        made_repeating = {key for i in self.lowered.instructions if section_of(i).repeats for key in i.keys_made}
        for layer, row in self.rows.items():
            for policy, of_layers in enumerate(self.again):
                of_layer = of_layers.get(layer, _NOTHING_AGAIN)
                backward = parts.get((layer, Section.BACKWARD), [])
                runs_again, needed = self.recomputed(of_layer.ops, forward.get(layer, []), backward)
                row.recompute_s[policy] = sum(time_s for _, time_s in runs_again)
                left_out = of_layer.left_out
                row.spared_s[policy] = sum(t for i, t in forward.get(layer, []) if _op_of(i) in left_out)
                saved = {key: self.nbytes(key) for key in needed & made_forward}
                sent_bytes = [nbytes for key, nbytes in saved.items() if key[0] in of_layer.in_host]
                row.sent_s[policy] = sum(map(self.model.device.host_copy_s, sent_bytes))
                row.saved_bytes[policy] = sum(saved.values()) - sum(sent_bytes)
                deferred = self.deferred([i for i, _ in runs_again], backward)
                row.deferred_bytes[policy] = sum(self.nbytes(key) for key in deferred & made_repeating)
        inputs = zip(self.lowered.block.inputs, self.lowered.inputs, self.folded.home_of, strict=True)
        for position, (v, layout, home) in enumerate(inputs):
            if position not in self.graph.batch and home in self.rows:
                value = self.graph.values[v]
                nbytes = local_bytes(value.shape, value.itemsize, layout, mesh)
                self.rows[home].state_bytes += nbytes
                self.rows[home].given_bytes += nbytes
        return self.rows

    def read_by_other_layers(self) -> frozenset[int]:
        """Backward values that the backward pass of another layer waits for, with all values that lead to them."""
        awaited: set[int] = set()
        layer_of = self.folded.layer_of
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
        """Instructions by layer and section. A resharding in the loop belongs to the operation that it is for; a
        resharding outside the loop belongs to the layer of its value.
        """
        layer_of, graph = self.folded.layer_of, self.graph
        made_in = {v: layer_of[op.id] for op in graph.block.ops for v in op.outputs}
        made_in |= dict(zip(graph.block.inputs, self.folded.home_of, strict=True))
        parts: dict[tuple[int, Section], list[Instruction]] = {}
        waiting: list[tuple[Section, Instruction]] = []
        layer = next(iter(self.rows))
        for instruction in self.lowered.instructions:
            section = section_of(instruction)
            if isinstance(instruction, (Move, HostCopy)):
                layer_of_value = made_in.get(instruction.value)
                if section.repeats or layer_of_value not in self.rows:
                    waiting.append((section, instruction))
                else:
                    parts.setdefault((layer_of_value, section), []).append(instruction)
                continue
            layer_of_value = layer_of.get(instruction.op.id)
            layer = layer_of_value if layer_of_value is not None else layer
            for move_section, i in waiting:
                parts.setdefault((layer, move_section), []).append(i)
            parts.setdefault((layer, section), []).append(instruction)
            waiting = []
        for move_section, i in waiting:
            parts.setdefault((layer, move_section), []).append(i)
        return parts

    def shares(
        self,
        parts: Mapping[tuple[int, Section], Sequence[Instruction]],
        seconds: Mapping[tuple[int, Section], Sequence[float]],
    ) -> dict[Section, float]:
        """For each section the ratio of its seconds with overlap to the sum of its seconds; communication may also
        overlap with the computation of neighbouring layers.
        """
        exposed = {}
        for section in {section for _, section in parts}:
            together = tuple(i for (_, at), instructions in parts.items() if at is section for i in instructions)
            summed_s = sum(sum(of_part) for (_, at), of_part in seconds.items() if at is section)
            block = dataclasses.replace(self.lowered, instructions=together)
            exposed[section] = timed(self.graph, block, self.model, self.costs).end_s / summed_s if summed_s else 1.0
        return exposed

    def seconds(self, instruction: Instruction) -> float:
        """The seconds of all runs of an instruction in a step."""
        computed_s = 0.0
        if isinstance(instruction, HostCopy):
            return host_copy_s(self.graph, instruction, self.model)
        if isinstance(instruction, Compute):
            computed_s = self.compute_s[instruction.op.id]
        elif isinstance(instruction, (Split, Accumulate, Stack)):
            computed_s = crossing_s(self.graph, instruction, self.model)
        elif isinstance(instruction, Loop):
            inside = (op.id for block in instruction.op.blocks for op in walk(block))
            computed_s = sum(self.compute_s.get(op, 0.0) for op in inside)
            copies = (copy for block in instruction.blocks for copy in host_copies_in(block))
            computed_s += sum(host_copy_s(self.graph, copy, self.model) for copy in copies)
        if not isinstance(instruction, (Move, Loop)) and not getattr(instruction, "reduced", ()):
            return computed_s
        block = dataclasses.replace(self.lowered, instructions=(instruction,))
        return computed_s + sum(use.time_s for use in predicted_collectives(self.graph, block, self.model))

    def nbytes(self, key: Key) -> int:
        value, (layout, state) = self.graph.values[key[0]], key[1]
        return 0 if state == HOST else local_bytes(value.shape, value.itemsize, layout, self.model.links.mesh)

    def ends(self, instructions: Sequence[Instruction]) -> tuple[list[Key], list[Key]]:
        """(places that instructions read from outside, places that they fill and do not read)."""
        produced: set[Key] = set()
        read: dict[Key, None] = {}
        read_inside: set[Key] = set()
        for i in instructions:
            for key in i.keys_read:
                if key in produced:
                    read_inside.add(key)
                else:
                    read[key] = None
            produced.update(i.keys_made)
        return list(read), [key for key in produced if key not in read_inside]

    def recomputed(
        self,
        repeated_ops: frozenset[int],
        forward: Sequence[tuple[Instruction, float]],
        backward: Sequence[Instruction],
    ) -> tuple[list[tuple[Instruction, float]], set[Key]]:
        """(recomputed instructions with their seconds, places that these and the layer's backward pass read from
        outside), where `repeated_ops` are the recomputed operations of the layer.

        A kept value is kept in the layout in which it is read, and is not sent again; an input is kept as it arrives.
        """
        made_by = {v: i.op.id for i, _ in forward if not isinstance(i, (Move, HostCopy)) for v in i.op.outputs}
        kept_keys = {key for i in backward for key in i.keys_read}
        read: set[Key] = set()
        produced: set[Key] = set()
        runs_again: list[tuple[Instruction, float]] = []
        for i, time_s in reversed(forward):
            if not isinstance(i, (Move, HostCopy)):
                repeats = i.op.id in repeated_ops
            elif i.value in made_by:
                repeats = made_by[i.value] in repeated_ops and not (read | kept_keys).isdisjoint(i.keys_made)
            else:
                repeats = not (read - kept_keys).isdisjoint(i.keys_made)
            if repeats:
                runs_again.append((i, time_s))
                read.update(i.keys_read)
                produced.update(i.keys_made)
        return runs_again[::-1], (read | kept_keys) - produced

    def can_wait(self, instruction: Instruction) -> bool:
        """Whether no other layer waits for the results of this operation of the backward pass."""
        return not isinstance(instruction, (Move, HostCopy)) and self.awaited.isdisjoint(instruction.op.outputs)

    def deferred(self, runs_again: Sequence[Instruction], backward: Sequence[Instruction]) -> set[Key]:
        """The places that the deferrable part of a layer's backward pass reads from outside; recomputation and
        communication for this part alone are deferred with it.
        """
        awaited_ops = [i for i in backward if not isinstance(i, (Move, HostCopy)) and not self.can_wait(i)]
        deferrable = [*runs_again, *(i for i in backward if isinstance(i, (Move, HostCopy)) or self.can_wait(i))]
        awaited = {key for i in awaited_ops for key in i.keys_read}
        read: set[Key] = set()
        produced: set[Key] = set()
        for i in reversed(deferrable):
            if awaited.isdisjoint(i.keys_made):
                read.update(i.keys_read)
                produced.update(i.keys_made)
            else:
                awaited.update(i.keys_read)
        return read - produced
