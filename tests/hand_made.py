"""A train step of two layers, written down operation by operation: nothing is traced."""

from collections.abc import Sequence

from autopar.hardware.cluster import Link
from autopar.ir.graph import ALL, Block, Op, OpGraph, OpKind, Role, Section, Value
from autopar.ir.layout import Layout, LogicalMesh, replicated
from autopar.ir.partial_sums import find_partials
from autopar.ir.resharding import MeshLinks
from autopar.lowering.lower import ShardingPlan, SolverReport, lower
from autopar.passes.stage_graph import StageGraph, split_stages
from autopar.search.inter_op.tasks import LoweredStage

LINK = Link(latency_s=1e-6, bytes_per_s=1e9, source="made up")
REPORT = SolverReport(status="optimal", objective_s=0.0, bound_s=0.0, gap=0.0, nodes=0, classes=0)
ROLES = {
    Section.BEFORE: Role.FORWARD,
    Section.FORWARD: Role.FORWARD,
    Section.BACKWARD: Role.BACKWARD,
    Section.AFTER: Role.UPDATE,
}
KINDS = {"split": OpKind.SPLIT, "accumulate": OpKind.ACCUMULATE}


class Writer:
    """Values by name, operations in the order in which they are written."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.number: dict[str, int] = {}
        self.ops: list[Op] = []

    def value(self, name: str, shape: Sequence[int]) -> int:
        self.number[name] = len(self.values)
        self.values.append(Value(id=len(self.values), shape=tuple(shape), dtype="float32", itemsize=4, name=name))
        return self.number[name]

    def op(self, section: Section, result: str, primitive: str, operands: str, shape: Sequence[int] = (4, 4)) -> None:
        """`operands` are names with spaces between them."""
        inputs = tuple(self.number[name] for name in operands.split())
        self.ops.append(
            Op(
                id=len(self.ops), kind=KINDS.get(primitive, OpKind.EQUATION), primitive=primitive, eqn=None,
                inputs=inputs, outputs=(self.value(result, shape),), rule=None, role=ROLES[section], module="",
                count=1.0, section=section,
            )
        )  # fmt: skip


def two_layers() -> OpGraph:
    """Layers a and b with the parameters w_a and w_b, and an update that scales both gradients by their common norm."""
    w = Writer()
    before, forward, backward, after = Section.BEFORE, Section.FORWARD, Section.BACKWARD, Section.AFTER
    inputs = [w.value("w_a", (4, 4)), w.value("w_b", (4, 4)), w.value("batch", (8, 4))]
    w.op(before, "x", "split", "batch", (2, 4))
    w.op(forward, "h", "layer_a", "w_a x", (2, 4))
    w.op(forward, "y", "layer_b", "w_b h", (2, 4))
    w.op(backward, "dh", "grad_h", "w_b y", (2, 4))
    w.op(backward, "g_b", "grad_w", "h y")
    w.op(backward, "g_a", "grad_w", "dh x")
    w.op(backward, "G_b", "accumulate", "g_b")
    w.op(backward, "G_a", "accumulate", "g_a")
    w.op(after, "n_a", "square", "G_a", ())
    w.op(after, "norm", "add_square", "n_a G_b", ())
    w.op(after, "w_b'", "update", "w_b G_b norm")
    w.op(after, "w_a'", "update", "w_a G_a norm")
    n = w.number
    return OpGraph(
        values=tuple(w.values),
        block=Block(inputs=tuple(inputs), outputs=(n["w_a'"], n["w_b'"], n["norm"]), ops=tuple(w.ops)),
        constants=(),
        tied=((0, 0), (1, 1)),
        donated=frozenset({0, 1}),
        batch=frozenset({2}),
        num_microbatches=4,
    )


ON_B = frozenset({"y", "dh", "g_b", "G_b", "norm", "w_b'"})  # the results of the second stage


def two_stages(graph: OpGraph | None = None) -> list[StageGraph]:
    """Layer a on the first stage, layer b on the second."""
    graph = graph or two_layers()
    stage_of = {op.id: int(graph.values[op.outputs[0]].name in ON_B) for op in graph.block.ops}
    return split_stages(graph, stage_of, {0: 0, 1: 1}, 2)


def lowered(stage: StageGraph, mesh_index: int, rows_split: Sequence[str] = ()) -> LoweredStage:
    """A stage on a mesh of two devices, replicated; of what is named the rows are split where it is made, and all its
    readers share one whole copy."""
    mesh = LogicalMesh(axis_sizes=(2,))
    graph = stage.graph
    plan = ShardingPlan(
        mesh=mesh,
        strategy={},
        partials=find_partials(graph),
        unreduced={v.id: Layout(((0,), ())) for v in graph.values if v.name in rows_split},
        reduced={},
        copies={(v.id, ALL): replicated(2) for v in graph.values if v.name in rows_split},
        report=REPORT,
        transfer_layouts={
            op.id: replicated(len(graph.values[sent].shape))
            for op in graph.block.ops
            if op.kind is OpKind.SEND and isinstance(sent := op.inputs[0], int)
        },
    )
    block = lower(graph, plan, MeshLinks(mesh=mesh, links=(LINK,)))
    return LoweredStage(stage=stage, lowered=block, mesh=mesh, mesh_index=mesh_index)
