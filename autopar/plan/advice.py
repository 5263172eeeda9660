"""What a plan says of how the step could be changed: where its time goes, and how much of the memory is free.

All of it follows from the plan's record, exactly or by a bound.
"""

from __future__ import annotations

from autopar.common.units import text_of_part
from autopar.plan.schema import MemoryKind, PlanRecord
from autopar.plan.summary import fullest
from autopar.plan.why_not import ALL_OF_STEP, module_costs, within

# Of the step: a module that takes less does not stand out. Of the memory: what is left free is no room for a batch.
MUCH_OF_STEP, MUCH_FREE = 0.3, 0.5
_STATE = (MemoryKind.PARAMETER, MemoryKind.OPTIMIZER)


def advice(record: PlanRecord) -> tuple[str, ...]:
    """What could be changed, in short; nothing for a step without time."""
    return tuple(text for text in (_largest_module(record), _free_memory(record)) if text)


def advice_and_notes(record: PlanRecord) -> tuple[str, ...]:
    """The advice, and the notes of the plan, of which some say what could be changed as well."""
    return (*advice(record), *record.notes)


def _largest_module(record: PlanRecord) -> str:
    """The innermost module in which much of the time goes, with all inside of it; not one that has all of the step."""
    step_s, seconds = record.predicted.step_time_s, within(module_costs(record))
    much = [path for path, s in seconds.items() if MUCH_OF_STEP * step_s <= s < ALL_OF_STEP * step_s]
    if not much:
        return ""
    path = max(much, key=lambda path: (len(path), seconds[path]))
    return f"{text_of_part(seconds[path] / step_s)} of the step is in {'/'.join(path)}"


def _free_memory(record: PlanRecord) -> str:
    """How much memory is free, and how many times the batch fits for certain: all but the state grows at most as it."""
    full = fullest(record)
    if full.limit_bytes is None or full.peak_bytes > (1 - MUCH_FREE) * full.limit_bytes:
        return ""
    free = f"{text_of_part(1 - full.peak_bytes / full.limit_bytes)} of the memory is free"
    throughout = record.predicted.memory[full.number].throughout
    state_bytes = sum(throughout.get(kind, 0) for kind in _STATE)
    growing_bytes = full.peak_bytes - state_bytes
    times = int((full.limit_bytes - state_bytes) / growing_bytes) if growing_bytes > 0 else 0
    if times < 2 or not any(value.kind == "batch" for value in record.arguments):
        return free
    return (
        f"{free}, room for {times:,} times the batch or more in the same layouts (autopar.fit: what larger ones gain)"
    )
