"""What a plan says of the ways that were weighed beside it, and of what could be changed."""

import dataclasses

import autopar
from autopar.common.text import text_of_s
from autopar.plan import rivals
from autopar.plan.rivals import advice
from autopar.plan.schema import CandidateRecord, MemoryKind, MemoryUse
from tests.plan.records import module, pipeline, program, value


def with_memory(record, peak_bytes: int, state_bytes: int):
    """The record on devices of 100 bytes."""
    throughout = {MemoryKind.PARAMETER: state_bytes // 2, MemoryKind.OPTIMIZER: state_bytes - state_bytes // 2}
    use = MemoryUse(throughout=throughout, at_peak={MemoryKind.SAVED: peak_bytes}, largest=())
    predicted = dataclasses.replace(record.predicted, peak_bytes=(peak_bytes,), memory=(use,))
    return dataclasses.replace(record, predicted=predicted, memory_limit_bytes=100)


def test_free_memory_is_told():
    batch = dataclasses.replace(program(), modules=(), arguments=(dataclasses.replace(value("batch"), kind="batch"),))
    assert advice(with_memory(batch, 40, 20)) == (
        "60 % of the memory is free (autopar.fit: the largest batch that fits, and what it gains)",
    )
    assert advice(with_memory(batch, 51, 20)) == ()
    assert advice(with_memory(dataclasses.replace(batch, arguments=()), 40, 20)) == ("60 % of the memory is free",)


def test_a_module_that_takes_much_of_the_step_is_named():
    step_s = program().predicted.step_time_s
    layers = tuple(module(f"layer{i}/attention", compute_s=0.3 * step_s) for i in range(2))
    record = dataclasses.replace(program(), modules=(*layers, module("head", compute_s=0.1 * step_s)))
    assert advice(with_memory(record, 90, 20)) == ("60 % of the step is in layer*/attention",)
    parts = tuple(module(f"layer0/mlp/{name}", compute_s=0.25 * step_s) for name in ("up", "down"))
    record = dataclasses.replace(record, modules=(*parts, module("layer1/norm", compute_s=0.3 * step_s)))
    assert advice(with_memory(record, 90, 20)) == ("50 % of the step is in layer*/mlp",)
    small = tuple(module(name, compute_s=0.1 * step_s) for name in ("attention", "mlp"))
    assert advice(with_memory(dataclasses.replace(record, modules=small), 90, 20)) == ()


def program_on(axis_sizes, step_time_s, **fields):
    """A candidate."""
    fields = {"peak_bytes": 1} | fields
    return CandidateRecord(
        source="logical meshes", text="mesh", axis_sizes=axis_sizes, step_time_s=step_time_s, **fields
    )


def test_the_advantage_over_recipes_is_taken_from_the_record():
    assert rivals.advantage(program()) == (
        "1.50x as fast as data parallelism (15 s); 1.20x as fast as ZeRO-1 (12 s), the next best without tensor "
        "parallelism."
    )
    assert (
        rivals.advantage(pipeline())
        == "Neither data parallelism nor another recipe was weighed beside it: plan.why_not(recipe) does that."
    )
    step_s = pipeline().predicted.step_time_s
    one_stage = CandidateRecord(
        source="pipelines", text="2 micro-batches, mesh 8, ZeRO-3", step_time_s=step_s, peak_bytes=1
    )
    too_slow = CandidateRecord(source="pipelines", text="mesh 8, ZeRO-1", why="slower", step_time_s=2 * step_s)
    assert rivals.advantage(dataclasses.replace(pipeline(), candidates=(one_stage, too_slow))) == (
        f"The fastest found is a standard plan: ZeRO-3; 2.00x as fast as ZeRO-1 ({text_of_s(2 * step_s)}), the next "
        "best without tensor parallelism."
    )
    own = program_on((8,), 10.0, name="data parallelism")
    assert rivals.advantage(program(candidates=(own,))) == "The fastest found is a standard plan: data parallelism."
    too_large = CandidateRecord(source="baselines", text="data parallelism", why="over the memory limit by 1 GB")
    assert rivals.advantage(program(candidates=(too_large,))) == (
        "Not compared with data parallelism (over the memory limit by 1 GB)."
    )
    # A program that the search made itself, of which all axes split the batch alone, is data parallelism.
    alike = program_on((8,), 12.0, axis_roles=("data",))
    bounded = CandidateRecord(source="baselines", text="data parallelism", why="not tried: a bound says so")
    assert rivals.advantage(program(candidates=(bounded, alike))) == ("1.20x as fast as data parallelism (12 s).")
    alone = program(axis_sizes=(1,), axis_roles=(("x",),), candidates=())
    assert rivals.advantage(alone) == ""
    assert rivals.advantage(dataclasses.replace(alone, recipe="zero(1)")) == "Planned under zero(1)."
    untried = CandidateRecord(source="baselines", text="data parallelism and ZeRO", why="not tried: effort='quick'")
    assert rivals.advantage(program(candidates=(untried,))) == (
        "Not compared with data parallelism and ZeRO (not tried: effort='quick'): plan.why_not(recipe) does that."
    )


def test_recipes_that_do_not_fit_are_not_said_to_be_slower():
    over = {"why": "over the memory limit by 10 kB", "step_time_s": 15.0, "peak_bytes": 30_000}
    lost = tuple(CandidateRecord(source="baselines", text=name, **over) for name in ("data parallelism", "ZeRO-1"))
    fits = CandidateRecord(source="baselines", text="ZeRO-3", why="slower by 4 s", step_time_s=14.0, peak_bytes=9)
    assert rivals.advantage(program(candidates=(*lost, fits))) == (
        "Data parallelism does not fit (30 kB a device, of 20 kB); 1.40x as fast as ZeRO-3 (14 s), the next best "
        "without tensor parallelism."
    )
    tensor = program_on((8,), 9.0, peak_bytes=30_000, axis_roles=("tensor",))
    assert rivals.tensor_parallelism(program(axis_roles=(("data",),), candidates=(tensor,))).endswith(
        "the step does not fit (30 kB a device, of 20 kB)."
    )


def test_the_cost_of_tensor_parallelism():
    assert rivals.tensor_parallelism(program()) == (
        "Tensor parallelism is part of the plan: its collectives take 4 s, and the step waits 3 s for them (30%)."
    )
    in_one = pipeline(axis_roles=(("data",), ("tensor",)))
    assert rivals.tensor_parallelism(in_one) == (
        "Tensor parallelism is part of the plan, in stage 1: its collectives take 500 ms, and the step waits 500 ms "
        "for them (5%)."
    )
    data = program(axis_roles=(("data",),))
    assert rivals.tensor_parallelism(data) == (
        "No way with tensor parallelism was weighed: plan.why_not(autopar.recipes.tensor_parallel(size=8)) plans one."
    )
    trials = [program_on((2, 4), s, peak_bytes=15_000, axis_roles=("data", "tensor")) for s in (40.0, 20.0)]
    weighed = dataclasses.replace(data, candidates=(*data.candidates, *trials))
    assert rivals.tensor_parallelism(weighed) == (
        "With tensor parallelism, the batch split over 2, the matrices split over 4: 20 s a step (10 s here), peak "
        "15 kB (10 kB here)."
    )
    assert "matrices split over 4: 20 s a step (10 s here)" in " ".join(str(autopar.Plan(weighed)).split())
    assert rivals.tensor_parallelism(program(axis_sizes=(1,), axis_roles=(("x",),))) == ""
