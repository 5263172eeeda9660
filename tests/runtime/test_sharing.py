"""Devices that share their processors: hand-made clocks, and work that takes as long as it is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.runtime.pipeline.emit import emit
from autopar.runtime.pipeline.standard_schedules import make_schedule
from autopar.runtime.simulation.shared_cores import on_shared_processors
from autopar.runtime.simulation.simulator import simulate
from tests.runtime.pipelines import chain
from tests.runtime.test_simulator import spans, two_stages


def test_what_runs_alone_has_the_processors_for_itself():
    program = emit(two_stages(), make_schedule("inference", 2, 3))
    simulation = simulate(program, task_s=[1.0, 1.0, 0.5], transfer_s=[2.0])
    shared = on_shared_processors(simulation, program, [1, 1], used=1.0)
    assert spans(program, shared) == {
        ("F0", 0): (0.0, 0.5),  # 0 to 1 when all work
        ("F0", 1): (0.5, 1.0),
        ("F0", 2): (1.0, 1.5),
        ("send", 0): (0.5, 1.5),
        ("send", 1): (1.5, 3.0),  # 3 to 5, of which the first half beside F1
        ("send", 2): (3.0, 4.5),
        ("F1", 0): (1.5, 2.0),
        ("F1", 1): (3.0, 3.5),
        ("F1", 2): (4.5, 5.0),
        ("stack", 0): (5.0, 5.25),
    }
    assert shared.step_time_s == 5.25
    assert shared.busy_s == (1.5, 1.75)
    assert shared.repeating_busy_s == (1.5, 1.5)
    assert shared.repeating_span_s == (1.5, 3.5)
    assert shared.peak_bytes == simulation.peak_bytes
    lossy = on_shared_processors(simulation, program, [1, 1], used=0.8)
    assert spans(program, lossy)["F0", 0] == (0.0, 1 / 1.6)
    assert on_shared_processors(simulation, program, [1, 1], used=0.4).step_time_s == simulation.step_time_s
    assert [when for when, _ in shared.bytes_over_time[0]] == [0.0, 0.5, 1.0, 1.5, 3.0, 4.5]


def test_a_larger_mesh_leaves_less_to_the_other():
    program = emit(two_stages(), make_schedule("inference", 2, 1))
    simulation = simulate(program, task_s=[1.0, 1.0, 0.0], transfer_s=[0.0])
    shared = on_shared_processors(simulation, program, [6, 2], used=1.0)
    assert spans(program, shared)["F0", 0] == (0.0, 0.75)
    assert spans(program, shared)["F1", 0] == (0.75, 1.0)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
@given(
    times=st.lists(st.floats(0.1, 5.0), min_size=3, max_size=3),
    devices=st.lists(st.integers(1, 4), min_size=3, max_size=3),
)
def test_a_step_takes_as_long_as_all_its_work(name, times, devices):
    schedule = make_schedule(name, 3, 4)
    program = emit(chain(schedule), schedule)
    pipeline = program.pipeline
    task_s = [times[task.mesh] for task in pipeline.tasks]
    simulation = simulate(program, task_s, [0.0] * len(pipeline.transfers))
    shared = on_shared_processors(simulation, program, devices, used=1.0)
    work = sum(busy_s * n for busy_s, n in zip(simulation.busy_s, devices, strict=True))
    assert shared.step_time_s == pytest.approx(work / sum(devices))
    assert shared.step_time_s <= simulation.step_time_s * (1 + 1e-9)
    lossy = on_shared_processors(simulation, program, devices, used=0.5)
    assert shared.step_time_s <= lossy.step_time_s <= 2 * shared.step_time_s + 1e-9
