"""Builds the nodes and edges of the integer program (`choice_graph`) from the graph of operations, and
keeps what programs of one graph and mesh share.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence, Set

from autopar.cost.cost_model import CostModel, NodeCosts
from autopar.ir.constraints import Constraints
from autopar.ir.graph import ALL, Atom, Block, FactorKind, Op, OpGraph, OpKind, Role, Value
from autopar.ir.layout import Layout, LogicalMesh, enumerate_layouts, enumerate_with_partial, replicated
from autopar.ir.partial_sums import Partials, find_partials
from autopar.ir.primitives import is_summing_type, sums_locally
from autopar.ir.strategies import Signature, Strategy, enumerate_strategies, following
from autopar.ops.kernels.local import admits
from autopar.passes.fold_step import ONE_EACH, Weights
from autopar.plan.context import PlanningContext
from autopar.search.intra_op.choice_graph import (
    ChoiceGraph,
    LayoutLists,
    Layouts,
    LayoutSite,
    Node,
    Reshard,
    any_partial,
)
from autopar.search.intra_op.formulation import Ilp, build, replaced_state

# Edges of the integer program from reads of values, through copies where several nodes read one value.
#
# A gather that several readers share is paid once: they read a copy, one for the readers of each role, and one for all
# roles. What is the same in each micro-batch has the copy for all roles for one reader too: it may be gathered once.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """`target` reads a value that lies at `source`; counted `count` times a step, for so many readers (`weight`)."""

    value: int
    source: LayoutSite
    target: LayoutSite
    role: Role
    count: float
    weight: float = 1.0


def shared_reads(
    reads: Sequence[Read],
    new_copy: Callable[[int, str, LayoutSite, float], Reshard],
    copies: Mapping[int, float] | None = None,
    once: Set[int] = frozenset(),
) -> list[Reshard]:
    """The edges of the reads. `new_copy(value, readers, source, count)` makes a copy and the edge that fills it.

    A value that stands for several (`copies`) is copied for each of them, however many readers stand for more. `once`:
    the values that are the same for every micro-batch, known before the first one.
    """
    reshards: list[Reshard] = []
    groups: dict[tuple[int, LayoutSite], dict[Role, dict[LayoutSite, float]]] = {}
    weight_at: dict[tuple[int, LayoutSite], float] = {}
    for read in reads:
        targets = groups.setdefault((read.value, read.source), {}).setdefault(read.role, {})
        targets[read.target] = max(targets.get(read.target, 0.0), read.count)
        if read.weight != 1.0:
            weight_at[read.value, read.target] = read.weight

    def copied(
        value: int, readers: str, source: LayoutSite, counts: dict[LayoutSite, float], fewest: int = 2
    ) -> LayoutSite:
        """Where readers read a value: a copy if there are several, else its source."""
        if len(counts) < fewest or len(source.layouts) == 1 or any_partial(source.layouts):
            return source
        each = max(count / weight_at.get((value, target), 1.0) for target, count in counts.items())
        reshards.append(new_copy(value, readers, source, each * (copies or {}).get(value, 1.0)))
        return reshards[-1].target

    for (value, source), by_role in groups.items():
        outside = {
            role: {t: n for t, n in targets.items() if t.node != source.node} for role, targets in by_role.items()
        }
        num_roles = sum(bool(targets) for targets in outside.values())
        common = source
        repeats = value in once and any(outside[role] for role in by_role if role is not Role.UPDATE)
        if num_roles > 1 or repeats:
            counts = {t: n for targets in outside.values() for t, n in targets.items()}
            common = copied(value, ALL, source, counts, fewest=1 if repeats else 2)
        for role, targets in by_role.items():
            shared = copied(value, role.value, common, outside[role])
            for target, count in targets.items():
                at = shared if target in outside[role] else source
                reshards.append(Reshard(value=value, source=at, target=target, count=count))
    return reshards


def build_choice_graph(
    graph: OpGraph,
    mesh: LogicalMesh,
    transfer_layouts: Mapping[int, Layout] | None = None,
    arrivals: Mapping[int, Layout] | None = None,
    order_of: Callable[[Value], tuple[int, ...]] | None = None,
    weights: Weights = ONE_EACH,
    partials: Partials | None = None,
) -> ChoiceGraph:
    """Nodes and edges of a graph. Their order follows the program, so that it is the same in every process.

    Args:
        transfer_layouts: For each SEND operation (by id) the layout of its operand.
        arrivals: For each input from another stage the layout in which it arrives.
        order_of: The mesh axes of a value in the order in which they split one of its dimensions; ascending by default.
        weights: Of a graph whose repeated layers are folded, how many of the whole graph each operation stands for.
        partials: Of the graph, where that is known.
    """
    partials = find_partials(graph) if partials is None else partials
    builder = _Builder(graph, mesh, transfer_layouts or {}, arrivals or {}, order_of or (lambda value: ()), partials)
    builder.weights = weights
    return builder.run()


class _Builder:
    def __init__(
        self,
        graph: OpGraph,
        mesh: LogicalMesh,
        transfer_layouts: Mapping[int, Layout],
        arrivals: Mapping[int, Layout],
        order_of: Callable[[Value], tuple[int, ...]],
        partials: Partials,
    ) -> None:
        self.graph, self.mesh, self.transfer_layouts, self.arrivals = graph, mesh, transfer_layouts, arrivals
        self.order_of, self.partials = order_of, partials
        self.weights, self.weight = ONE_EACH, 1.0  # `weight` of the operation that reads
        self.once = graph.once() if graph.is_cut else frozenset()
        self.nodes: list[Node] = []
        self.unreduced: dict[int, LayoutSite] = {}
        self.reduced: dict[int, LayoutSite] = {}
        self.of_op: dict[int, tuple[int, tuple[Strategy, ...]]] = {}
        self.reads: list[Read] = []
        self.copies: dict[tuple[int, str], LayoutSite] = {}
        self.placements: dict[int, Reshard] = {}
        self.followed: set[int] = set()
        self.order: dict[int, int] = {}
        self.state_nodes: set[int] = set()
        self.replaces = replaced_state(graph)
        self.whole: int | None = None
        self.lists = LayoutLists()
        self._enumerated: dict[tuple, tuple[Strategy, ...]] = {}
        self._followed: dict[tuple, tuple[Strategy, ...] | None] = {}

    def run(self) -> ChoiceGraph:
        block = self.graph.block
        for position, value in enumerate(block.inputs):
            if value in self.arrivals:
                self.arrive(value)
                continue
            node = self.layout_node(value, "argument", self.graph.values[value].name, evenly=True)
            if node is not None and position in self.graph.donated:
                self.state_nodes.add(node)
        self.block(block)
        counts = self.graph.result_counts()
        for source, target in self.graph.tied:
            self.read_into(block.outputs[target], self.reduced.get(block.inputs[source]), Role.UPDATE, counts[target])
        for position, atom in enumerate(block.outputs):
            if isinstance(atom, int):
                self.followed.add(atom)  # a result of the step is whole, wherever it lies
                if self.graph.values[atom].rounded:
                    self.read(atom, None, (), Role.UPDATE, counts[position])
        reshards = [r for value, r in self.placements.items() if value in self.followed]
        cut = {op.inputs[0] for op in block.ops if op.kind is OpKind.SPLIT}  # each micro-batch reads its own part
        reshards += shared_reads(self.reads, self.copy, self.weights.of_value, self.once - cut)
        return ChoiceGraph(
            mesh=self.mesh, nodes=tuple(self.nodes), reshards=tuple(reshards), unreduced=self.unreduced,
            reduced=self.reduced, copies=self.copies, of_op=self.of_op, partials=self.partials, lists=self.lists,
        )  # fmt: skip

    # Lists of layouts

    def shared(self, layouts: Layouts) -> Layouts:
        return self.lists.shared(layouts)

    def every_layout(self, value: int) -> Layouts:
        v = self.graph.values[value]
        return self.shared(enumerate_layouts(v.split_shape, self.mesh, self.order_of(v)))

    def every_partial_layout(self, value: int) -> Layouts:
        """All layouts of a value, partial ones included."""
        v = self.graph.values[value]
        return self.shared(enumerate_with_partial(v.split_shape, self.mesh, self.order_of(v)))

    def strategies(self, op: Op, signature: Signature) -> tuple[Strategy, ...]:
        # The order of what it reads and makes, where that is one: then nothing need be laid anew.
        orders = {self.order_of(self.graph.values[a]) for a in (*op.inputs, *op.outputs) if isinstance(a, int)}
        order = orders.pop() if len(orders) == 1 else ()
        key = (op.key, signature.linear, order)
        if key not in self._enumerated:
            self._enumerated[key] = enumerate_strategies(signature, self.mesh, order)
        return self._enumerated[key]

    def following(self, op: Op, signature: Signature, i: int, layouts: Layouts) -> tuple[Strategy, ...] | None:
        key = (op.key, signature.linear, i, id(layouts))
        if key not in self._followed:
            self._followed[key] = following(signature, i, layouts, self.mesh)
        return self._followed[key]

    # Nodes

    def node(self, size: int, kind: str, name: str, layouts: Layouts = ()) -> int:
        self.nodes.append(Node(size=size, name=name, kind=kind, layouts=layouts))
        return len(self.nodes) - 1

    def layout_node(
        self, value: int, kind: str, name: str, *, partial_too: bool = False, evenly: bool = False
    ) -> int | None:
        """A node that chooses among all layouts of a value, or those that split it `evenly`, and is its site; None if
        there is only one layout.
        """
        layouts = self.every_partial_layout(value) if partial_too else self.every_layout(value)
        if evenly:
            shape = self.graph.values[value].shape
            layouts = self.shared(tuple(layout for layout in layouts if layout.fits(shape, self.mesh)))
        if len(layouts) == 1:
            return None
        node = self.node(len(layouts), kind, name, layouts)
        self.unreduced[value] = self.reduced[value] = LayoutSite(node, layouts)
        self.order[value] = len(self.order)
        return node

    def block(self, block: Block) -> None:
        for op in block.ops:
            self.weight = self.weights.of_op.get(op.id, 1.0)
            if op.kind is OpKind.EQUATION:
                self.equation(op)
            elif op.kind is OpKind.BARRIER:
                for source, target in zip(op.inputs, op.outputs, strict=True):
                    self.alias(source, target)
            elif op.kind is OpKind.SCAN:
                self.scan(op)
            elif op.kind is OpKind.WHILE:
                self.while_loop(op)
            elif op.kind is OpKind.COND:
                self.branches(op)
            elif op.kind is OpKind.SPLIT:
                self.boundary(op.inputs[0], op.outputs[0], f"{op.module or 'batch'} split", op.role, op.count)
            elif op.kind is OpKind.ACCUMULATE:
                self.accumulate(op)
            elif op.kind is OpKind.STACK:
                self.alias(op.inputs[0], op.outputs[0])
            else:
                layouts = self.shared((self.transfer_layouts[op.id],))
                self.read(op.inputs[0], self.node(1, "transfer", "sent", layouts), layouts, op.role, op.count)

    def accumulate(self, op: Op) -> None:
        """The sum over micro-batches has a layout of its own: partial ones are reduced once, behind the loop."""
        (source,), (target,) = op.inputs, op.outputs
        name = f"{op.module or 'sum'} accumulated"
        partial_too = self.partials.reads_unreduced(op, 0)
        self.layout_node(target, "boundary", name, partial_too=partial_too)
        self.read_into(source, self.unreduced.get(target), op.role, op.count, unreduced=partial_too)
        if target in self.unreduced and partial_too:
            self.place(target, f"{name}, placed", op.count / self.graph.num_microbatches)

    def alias(self, source: Atom, target: int) -> None:
        """Gives the target the layout of the source."""
        if isinstance(source, int) and source in self.reduced:
            self.unreduced[target] = self.reduced[target] = self.reduced[source]
            self.order[target] = len(self.order)
            self.followed.add(source)

    # Equations

    def equation(self, op: Op) -> None:
        signature = self.signature(op)
        leader = self.leader(op, signature)
        if leader is not None:
            position, node, strategies = leader
        else:
            strategies = self.strategies(op, signature)
            if len(strategies) == 1:
                for i, atom in enumerate(op.inputs):
                    self.read(atom, None, (), op.role, op.count, unreduced=self.partials.reads_unreduced(op, i))
                return
            position, node = None, self.node(len(strategies), "operation", f"{op.module}/{op.primitive}")
        self.nodes[node].members.append((op, strategies))
        self.of_op[op.id] = (node, strategies)
        for i, atom in enumerate(op.inputs):
            if i != position:
                layouts = self.lists.of_operand(strategies, i)
                self.read(atom, node, layouts, op.role, op.count, unreduced=self.partials.reads_unreduced(op, i))
        for i, value in enumerate(op.outputs):
            layouts = self.lists.of_result(strategies, i)
            partial = any_partial(layouts)
            if len(self.every_layout(value)) == 1 and not partial:
                continue
            self.unreduced[value] = self.reduced[value] = LayoutSite(node, layouts)
            self.order[value] = len(self.order)
            if partial:
                self.place(value, f"{op.module}/{op.primitive} placed", op.count)

    def arrive(self, value: int) -> None:
        """A value arrives in one layout, and is then resharded once for all its readers."""
        layouts = self.shared((self.arrivals[value],))
        self.unreduced[value] = LayoutSite(self.node(1, "transfer", "received", layouts), layouts)
        self.order[value] = len(self.order)
        self.place(value, "received, placed", float(self.graph.num_microbatches))

    def place(self, value: int, name: str, count: float) -> None:
        """Gives a value that may be partial a second site, where it is reduced."""
        layouts = self.every_layout(value)
        self.reduced[value] = LayoutSite(self.node(len(layouts), "placement", name, layouts), layouts)
        self.placements[value] = Reshard(
            value=value, source=self.unreduced[value], target=self.reduced[value], count=count
        )

    def signature(self, op: Op) -> Signature:
        assert op.rule is not None, "equations have rules"
        sums = any(f.kind is FactorKind.SUM for f in op.rule.factors)
        members = self.partials.unreduced_operands(op)
        passes = any(self.may_be_partial(op.inputs[i]) for i in members)
        return Signature(
            rule=op.rule,
            operand_shapes=tuple(self.shape(a) for a in op.inputs),
            result_shapes=tuple(self.graph.values[v].split_shape for v in op.outputs),
            sums_partially=sums and sums_locally(op.eqn) and is_summing_type(op.eqn),
            linear=(members,) if passes else (),
            admits=admits(op.eqn),
        )

    def may_be_partial(self, atom: Atom) -> bool:
        return isinstance(atom, int) and atom in self.unreduced and any_partial(self.unreduced[atom].layouts)

    def shape(self, atom: Atom) -> tuple[int, ...]:
        return self.graph.values[atom].split_shape if isinstance(atom, int) else atom.shape

    def leader(self, op: Op, signature: Signature) -> tuple[int, int, tuple[Strategy, ...]] | None:
        """The operand whose node an operation shares: in an update the state that its result replaces, or else any
        state; otherwise the operand produced last.
        """
        result_shapes = {self.graph.values[v].split_shape for v in op.outputs}
        states = (self.reduced.get(self.replaces[v]) for v in op.outputs if v in self.replaces)
        own = {home.node for home in states if home is not None}
        homes: dict[int, LayoutSite] = {}
        for i, atom in enumerate(op.inputs):
            if isinstance(atom, int) and atom in self.reduced:
                homes[i] = self.unreduced[atom] if self.partials.reads_unreduced(op, i) else self.reduced[atom]

        def preference(i: int) -> tuple[bool, bool, bool, int]:
            atom, node = op.inputs[i], homes[i].node
            assert isinstance(atom, int), "only values have homes"
            is_state = op.role is Role.UPDATE and node in self.state_nodes
            return is_state and node in own, is_state, self.shape(atom) in result_shapes, self.order[atom]

        for i in sorted(homes, key=preference, reverse=True):
            strategies = self.following(op, signature, i, homes[i].layouts)
            if strategies is not None:
                atom = op.inputs[i]
                if isinstance(atom, int) and not self.partials.reads_unreduced(op, i):
                    self.followed.add(atom)
                return i, homes[i].node, strategies
        return None

    # Loops and branches

    def boundary(self, outer: Atom, inner: int, name: str, role: Role, count: float, *, dropped: int = 0) -> None:
        """A value enters a loop: it gets a node inside, and an edge from outside that is charged once."""
        node = self.layout_node(inner, "boundary", name)
        layouts: Layouts = ()
        if node is not None:
            layouts = self.shared(tuple(Layout(((),) * dropped + at.dims) for at in self.reduced[inner].layouts))
        self.read(outer, node, layouts, role, count)

    def scan(self, op: Op) -> None:
        (body,) = op.blocks
        k, c = op.num_consts, op.num_carry
        inner_count = op.count * op.trips
        name = op.module or "scan"
        for outer, inner in zip(op.inputs[:k], body.inputs[:k], strict=True):
            self.boundary(outer, inner, f"{name} constant", op.role, op.count)
        self.carried(op, op.inputs[k : k + c], body.inputs[k : k + c], name)
        for outer, inner in zip(op.inputs[k + c :], body.inputs[k + c :], strict=True):
            self.boundary(outer, inner, f"{name} slice", op.role, op.count, dropped=1)
        self.block(body)
        self.close_loop(op, body.outputs[:c], body.inputs[k : k + c], inner_count)
        for piece, stack in zip(body.outputs[c:], op.outputs[c:], strict=True):
            self.stacked(piece, stack, f"{name} stacked", op.role, inner_count, op.count)

    def carried(self, op: Op, outers: Sequence[Atom], inners: Sequence[int], name: str) -> None:
        for outer, inner in zip(outers, inners, strict=True):
            accumulates = inner in self.partials.kept
            self.layout_node(inner, "boundary", f"{name} carried", partial_too=accumulates)
            if inner in self.unreduced and accumulates:
                self.place(inner, f"{name} carried, placed", op.count * op.trips)
            self.read_into(outer, self.unreduced.get(inner), op.role, op.count)

    def close_loop(self, op: Op, carried_out: Sequence[Atom], inners: Sequence[int], count: float) -> None:
        """The carried value has the same layout at the start and the end of the body, and behind the loop."""
        for atom, inner, result in zip(carried_out, inners, op.outputs, strict=False):
            home = self.unreduced.get(inner)
            self.read_into(atom, home, op.role, count, unreduced=inner in self.partials.kept)
            if home is not None:
                self.unreduced[result] = self.reduced[result] = home
                self.order[result] = len(self.order)
                if any_partial(home.layouts):
                    self.place(result, f"{self.nodes[home.node].name} result", op.count)

    def stacked(self, inner: Atom, outer: int, name: str, role: Role, count: float, outer_count: float) -> None:
        """An output of a scan: the slice of each iteration has the layout of the stacked array, maybe partial."""
        partial_too = outer in self.partials.kept
        candidates = self.every_partial_layout(outer) if partial_too else self.every_layout(outer)
        layouts = self.shared(tuple(layout for layout in candidates if not layout.dims[0]))
        node = None
        if len(layouts) > 1:
            node = self.node(len(layouts), "boundary", name, layouts)
            self.unreduced[outer] = self.reduced[outer] = LayoutSite(node, layouts)
            self.order[outer] = len(self.order)
        slices = self.shared(tuple(Layout(layout.dims[1:], layout.partial) for layout in layouts))
        self.read(inner, node, slices, role, count, unreduced=partial_too)
        if any_partial(layouts):
            self.place(outer, f"{name}, placed", outer_count)

    def while_loop(self, op: Op) -> None:
        condition, body = op.blocks
        k, n = op.num_condition_consts, op.num_consts
        name = op.module or "while"
        for outer, inner in zip(op.inputs[:k], condition.inputs[:k], strict=True):
            self.boundary(outer, inner, f"{name} constant", op.role, op.count)
        for outer, inner in zip(op.inputs[k:n], body.inputs[: n - k], strict=True):
            self.boundary(outer, inner, f"{name} constant", op.role, op.count)
        carried = body.inputs[n - k :]
        self.carried(op, op.inputs[n:], carried, name)
        for inner, inner_of_condition in zip(carried, condition.inputs[k:], strict=True):
            self.alias(inner, inner_of_condition)
        self.block(condition)
        self.read_whole(condition.outputs, op)
        self.block(body)
        self.close_loop(op, body.outputs, carried, op.count)

    def branches(self, op: Op) -> None:
        self.read_whole(op.inputs[:1], op)
        for block in op.blocks:
            for outer, inner in zip(op.inputs[1:], block.inputs, strict=True):
                self.alias(outer, inner)
            self.block(block)
        for i, result in enumerate(op.outputs):
            self.layout_node(result, "boundary", f"{op.module or 'cond'} result")
            for block in op.blocks:
                self.read_into(block.outputs[i], self.reduced.get(result), op.role, op.count)

    def read_whole(self, atoms: Sequence[Atom], op: Op) -> None:
        """Reads a predicate, which every device needs."""
        for atom in atoms:
            self.read(atom, None, (), op.role, op.count)

    # Edges

    def read(
        self, atom: Atom, node: int | None, layouts: Layouts, role: Role, count: float, *, unreduced: bool = False
    ) -> None:
        """Records that a node reads a value, with the layout for each of its strategies; None reads it replicated."""
        if not isinstance(atom, int) or atom not in self.unreduced:
            return
        if node is None:
            if self.whole is None:
                self.whole = self.node(1, "whole", "replicated")
            node, layouts = self.whole, self.shared((replicated(len(self.graph.values[atom].shape)),))
        source = self.unreduced[atom] if unreduced else self.reduced[atom]
        if not unreduced:
            self.followed.add(atom)
        target = LayoutSite(node, layouts)
        self.reads.append(Read(value=atom, source=source, target=target, role=role, count=count, weight=self.weight))

    def read_into(
        self, atom: Atom, home: LayoutSite | None, role: Role, count: float, *, unreduced: bool = False
    ) -> None:
        """Reads a value into the layouts of a site; replicated where there is no site."""
        node, layouts = (None, ()) if home is None else (home.node, home.layouts)
        self.read(atom, node, layouts, role, count, unreduced=unreduced)

    def copy(self, value: int, readers: str, source: LayoutSite, count: float) -> Reshard:
        """A node for a copy of a value, and the edge that fills it. `count`: the reads of the copy in a step."""
        # A copy for all of what no micro-batch changes is made once, before the first one, and kept.
        if readers == ALL and value in self.once:
            count /= self.graph.num_microbatches
        layouts = self.every_layout(value)
        name = f"{self.nodes[source.node].name} read by {readers}"
        site = LayoutSite(self.node(len(layouts), "copy", name, layouts), layouts)
        self.copies[value, readers] = site
        return Reshard(value=value, source=source, target=site, count=count)


# What the integer programs of one graph on one mesh have in common, whatever is asked of each: built once.


class SharedTables:
    """The seconds of operations, and the nodes and edges of a graph with their seconds, before constraints.

    The search on a mesh, the baselines on it and recipes differ in what they fix and forbid only. `graph` is with or
    without the semantics of its values, which tell nothing but the order in which axes split a dimension. `partials` of
    the graph, and `costs` of it on the mesh, where they are known.
    """

    def __init__(
        self, graph: OpGraph, model: CostModel, partials: Partials | None = None, costs: NodeCosts | None = None
    ) -> None:
        self.graph, self.model, self.costs = graph, model, costs or NodeCosts(graph, model)
        self.partials = find_partials(graph) if partials is None else partials
        # With the weights by whose ids they are known, so that the ids stay theirs.
        self._built: dict[tuple, tuple[Weights, Ilp]] = {}

    def built(
        self,
        graph: OpGraph,
        constraints: Constraints | None,
        weights: Weights,
        transfers: Mapping[int, Layout],
        arrivals: Mapping[int, Layout],
    ) -> Ilp:
        """The program before constraints, of which only the order counts in which axes split a dimension: where no axis
        is a minor one, that without constraints. `transfers` and `arrivals` of a stage are parts of its nodes, and make
        a program of their own. `graph`: the one of the tables, with the semantics of its values where constraints are
        given.
        """
        orders = constraints if constraints is not None and any(constraints.minors) else None
        key = orders.minors if orders is not None else None, id(weights)
        if transfers or arrivals or key not in self._built:
            order_of = orders.order_of if orders is not None else None
            mesh, partials = self.model.links.mesh, self.partials
            choices = build_choice_graph(graph, mesh, transfers, arrivals, order_of, weights, partials)
            ilp = build(graph, choices, self.model, self.costs, weights)
            if transfers or arrivals:
                return ilp
            self._built[key] = weights, ilp
        return self._built[key][1]


def tables_of(context: PlanningContext, graph: OpGraph, model: CostModel) -> SharedTables:
    """The tables of a graph on a mesh: the same ones for the search, the baselines and recipes on that mesh, whether
    they read the semantics of values or not. On three axes, where they are large, they go with the search.
    """
    mesh, partials = model.links.mesh, context.views.partials_of(graph)
    if len(mesh.axis_sizes) > 2:
        return SharedTables(graph, model, partials)
    # The tables keep the block, so that its id stays its own.
    what = "tables", id(graph.block), context.cluster, mesh
    return context.graphs.of(context.traced, what, lambda: SharedTables(graph, model, partials))
