"""What a plan says of how the step could be changed."""

import dataclasses

from autopar.plan.rivals import advice
from autopar.plan.schema import MemoryKind, MemoryUse
from tests.plan.records import module, program, value


def with_memory(record, peak_bytes: int, state_bytes: int):
    """The record on devices of 100 bytes."""
    throughout = {MemoryKind.PARAMETER: state_bytes // 2, MemoryKind.OPTIMIZER: state_bytes - state_bytes // 2}
    use = MemoryUse(throughout=throughout, at_peak={MemoryKind.SAVED: peak_bytes}, largest=())
    predicted = dataclasses.replace(record.predicted, peak_bytes=(peak_bytes,), memory=(use,))
    return dataclasses.replace(record, predicted=predicted, memory_limit_bytes=100)


def test_free_memory_is_told_with_the_batch_that_fits_for_certain():
    batch = dataclasses.replace(program(), modules=(), arguments=(dataclasses.replace(value("batch"), kind="batch"),))
    # 20 bytes stay and 20 may grow: four times these are the 80 that are left.
    assert advice(with_memory(batch, 40, 20)) == (
        "60 % of the memory is free, room for 4 times the batch or more in the same layouts "
        "(autopar.fit: what larger ones gain)",
    )
    assert advice(with_memory(batch, 51, 20)) == ()
    assert advice(with_memory(batch, 50, 1)) == ("50 % of the memory is free, room for 2 times the batch or more in "
        "the same layouts (autopar.fit: what larger ones gain)",)  # fmt: skip
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
