"""Records of plans that are written by hand: a model of layers, as one program and in stages."""

import dataclasses
from typing import Any

from autopar.common.trace_events import DEVICES, LINKS, Timeline, TraceEvent
from autopar.hardware.cluster import Cluster
from autopar.ir.layout import Layout
from autopar.lowering.lower import SolverReport
from autopar.plan.schema import (
    FORMAT_VERSION,
    CandidateRecord,
    Decisions,
    MemoryHolder,
    MemoryKind,
    MemoryUse,
    ModuleRow,
    PipelineRecord,
    PlannedValue,
    PlanRecord,
    Predicted,
    PredictedCollective,
    StageRecord,
)

KB = 1000
NO_DECISIONS = Decisions(layouts=(), strategies=(), of_op={}, raw={}, placed={}, copies=())
SOLVED = SolverReport(status="optimal", objective_s=0.1, bound_s=0.1, gap=0.0, nodes=4, classes=4)
MEMORY = MemoryUse(
    throughout={MemoryKind.PARAMETER: 4 * KB},
    at_peak={MemoryKind.PARAMETER: 4 * KB, MemoryKind.SAVED: 6 * KB},
    largest=(MemoryHolder(name="layer*/mlp/dot_general", kind=MemoryKind.SAVED, nbytes=6 * KB, count=2),),
    course=(4 * KB, 10 * KB, 5 * KB),
)


def value(path: str, *, split: bool = False, stage: int = 0, kind: str = "state") -> PlannedValue:
    layout = Layout(((), (0,) if split else ()))
    return PlannedValue(
        path=path, shape=(5, 200), dtype="float32", nbytes=4 * KB, kind=kind, layout=layout, stage=stage
    )


def module(
    name: str, *, compute_s: float, send_s: float = 0.0, stage: int = 0, exposed_s: float | None = None
) -> ModuleRow:
    """`exposed_s`: None for all of `send_s`."""
    sent = PredictedCollective(
        kind="all-reduce",
        axes=("x",),
        module=name,
        count=2.0,
        sent_bytes=8.0 * KB,
        time_s=send_s,
        exposed_s=send_s if exposed_s is None else exposed_s,
    )
    return ModuleRow(
        module=name,
        operations=3,
        splits=('forward: P(None, None) @ P(None, "x") -> P(None, "x")',),
        compute_time_s=compute_s,
        collectives=(sent,) if send_s else (),
        saved_bytes=KB,
        stage=stage,
    )


def arguments(layers: int, stages: int = 1) -> tuple[PlannedValue, ...]:
    """Parameters and one moment of each layer, and the batch."""
    rows = []
    for tree in ("params", "mu"):
        for layer in range(layers):
            path = f"state['{tree}']['layer{layer}']['mlp']['kernel']"
            rows.append(value(path, split=True, stage=layer * stages // layers))
    return (*rows, value("batch['x']", kind="batch"))


def predicted(modules: tuple[ModuleRow, ...], **changes: Any) -> Predicted:
    """10 s of which 5 s compute, 2 s of it at the peak rate and 3 s in products, and 4 s send, 1 s of it hidden."""
    made = Predicted(
        step_time_s=10.0,
        compute_time_s=5.0,
        collective_time_s=4.0,
        hidden_time_s=1.0,
        peak_bytes=(10 * KB,),
        flops=1e12,
        mfu=0.2,
        bubble_fraction=0.0,
        collectives=tuple(c for row in modules for c in row.collectives),
        memory=(MEMORY,),
        product_time_s=3.0,
        peak_rate_time_s=2.0,
    )
    return dataclasses.replace(made, **changes)


def program(layers: int = 2, **changes: Any) -> PlanRecord:
    """One program on 8 devices, data parallelism and ZeRO weighed beside it."""
    modules = tuple(
        row
        for layer in range(layers)
        for row in (
            module(f"layer{layer}/attention", compute_s=1.0),
            module(f"layer{layer}/mlp", compute_s=1.5, send_s=2.0, exposed_s=1.5),
        )
    )
    made = PlanRecord(
        format_version=FORMAT_VERSION,
        step="train",
        fingerprint="f",
        cluster=Cluster.preset("dgx-h100"),
        axis_sizes=(8,),
        memory_limit_bytes=20 * KB,
        arguments=arguments(layers),
        results=(),
        decisions=NO_DECISIONS,
        predicted=predicted(modules),
        solver=SOLVED,
        modules=modules,
        candidates=(
            CandidateRecord(
                source="logical meshes", text="mesh 8", axis_sizes=(8,), step_time_s=10.0, peak_bytes=10 * KB
            ),
            CandidateRecord(
                source="baselines",
                text="data parallelism",
                why="slower by 5 s",
                axis_sizes=(8,),
                step_time_s=15.0,
                name="data parallelism",
            ),
            CandidateRecord(source="baselines", text="ZeRO-1", why="slower by 2 s", step_time_s=12.0),
            CandidateRecord(source="pipelines", text="", why="not searched"),
        ),
        notes=(),
        least_step_time_s=0.0,
        axis_roles=(("tensor",),),
        timeline=Timeline(
            rows=("every device",),
            links=("collectives",),
            events=(
                TraceEvent(DEVICES, 0, "layer0/mlp", "compute", 0.0, 5.0),
                TraceEvent(LINKS, 0, "all-reduce over x, layer0/mlp", "send", 5.0, 10.0, 0, 8 * KB),
            ),
        ),
    )
    return dataclasses.replace(made, **changes)


def pipeline(layers: int = 4, stages: int = 2, **changes: Any) -> PlanRecord:
    """Stages of 4 devices each, a quarter of the time lost to the bubble."""
    modules = tuple(
        module(f"layer{layer}/mlp", compute_s=1.0, send_s=0.5, stage=layer * stages // layers)
        for layer in range(layers)
    )
    each = layers // stages
    rows = tuple(
        StageRecord(
            first_layer=s * each,
            layers=tuple(f"layer{layer}" for layer in range(s * each, (s + 1) * each)),
            first_device=4 * s,
            axis_sizes=(4,),
            decisions=NO_DECISIONS,
            solver=SOLVED,
            forward_s=0.1,
            backward_s=0.2,
            weight_s=0.0,
            once_s=0.0,
            peak_bytes=10 * KB,
            in_flight=stages - s,
        )
        for s in range(stages)
    )
    events = tuple(TraceEvent(DEVICES, s, f"F 0 of stage {s}", "F", float(s), s + 1.0, s) for s in range(stages))
    record = PipelineRecord(
        schedule="1f1b",
        num_microbatches=8,
        chunks=1,
        recomputed=("nothing",) * layers,
        stages=rows,
        timeline=Timeline(
            rows=tuple(f"mesh {s}" for s in range(stages)),
            links=(),
            events=events,
            tracks={"bytes": tuple(((0.0, 4 * KB), (1.0, 10 * KB)) for _ in range(stages))},
        ),
    )
    made = dataclasses.replace(
        program(),
        axis_sizes=(),
        cluster=Cluster.preset("dgx-h100", hosts=-(-stages // 2)),
        arguments=arguments(layers, stages),
        modules=modules,
        predicted=predicted(
            modules,
            bubble_fraction=0.2,
            peak_bytes=(10 * KB,) * stages,
            memory=(dataclasses.replace(MEMORY, course=()),) * stages,
        ),
        candidates=(),
        timeline=Timeline(rows=(), links=(), events=()),
        pipeline=record,
        axis_roles=(("sharded data",),) * stages,
    )
    return dataclasses.replace(made, **changes)
